"""The waste ledger as lines: what is spent, what is saved, and the same requests with their maxima reserved. Pure."""

from textual.strip import Strip

from kvscope.analysis.ledger import Ledger
from kvscope.dashboard import theme
from kvscope.dashboard.charts import share_out
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.header import format_bytes
from kvscope.dashboard.strips import Part, make_strip, wrap_parts

_COLUMNS = (("", 32), ("slots", 9), ("blocks", 9), ("bytes", 10), ("requests", 10))
_NARROW = (("", 30), ("blocks", 8), ("bytes", 9), ("requests", 10))  # slots are what blocks tell too
TABLE_WIDTH = sum(width for _, width in _COLUMNS)


def draw_ledger(ledger: Ledger, glyphs: Glyphs, width: int) -> list[Strip]:
    """Every figure three ways: in blocks, in bytes, and in requests like the present ones."""
    size, saved, maximum = ledger.block_size, ledger.saved, ledger.maximum
    rows: list[tuple[str, float, bool]] = [
        (f"held for {_count(ledger.num_requests, 'request')}", ledger.held * size, True),
        ("  written", ledger.written_slots, False),
        ("  reserved, not written", ledger.unwritten_slots, False),
        ("    in the last blocks: slack", ledger.slack_slots, False),
        ("  duplicates: the same twice", ledger.duplicates * size, False),
        ("saved now", saved.total * size, True),
        ("  full blocks, candidates'", saved.sharing * size, False),
        ("  put off by copy-on-write", saved.copy_on_write * size, False),
        ("  the prefix cache's", saved.prefix_cache * size, False),
        ("maxima reserved would hold", maximum.slots, True),
    ]
    (_, label_width), *figures = _columns(width)
    head = "".join(name.rjust(column) for name, column in figures)
    title = f" Waste ledger, step {ledger.step}".ljust(label_width)
    lines = [make_strip([(title, theme.BRAND), (head, theme.SOFT)], width)]
    lines += [_draw_row(ledger, label, slots, strong, width) for label, slots, strong in rows]
    return [*lines, make_strip([], width), *draw_comparison(ledger, glyphs, width)]


def _draw_row(ledger: Ledger, label: str, slots: float, strong: bool, width: int) -> Strip:
    blocks = slots / ledger.block_size
    told = {
        "slots": f"{slots:,.0f}",
        "blocks": f"{blocks:,.0f}" if blocks == int(blocks) else f"{blocks:,.1f}",
        "bytes": format_bytes(round(ledger.num_bytes(slots))),
        "requests": f"{ledger.more_requests(slots):,.1f}",
    }
    (_, label_width), *columns = _columns(width)
    figures = "".join(told[name].rjust(column) for name, column in columns)
    style = theme.FAINT if not slots else theme.STRONG if strong else theme.TEXT
    return make_strip([(f" {label}".ljust(label_width), style if not slots else theme.TEXT), (figures, style)], width)


def _columns(width: int) -> tuple[tuple[str, int], ...]:
    return _COLUMNS if width >= TABLE_WIDTH else _NARROW


def draw_comparison(ledger: Ledger, glyphs: Glyphs, width: int) -> list[Strip]:
    """The pool by blocks, and how far the reserved maxima would reach in it or beyond."""
    pool, maximum = ledger.num_blocks * ledger.block_size, ledger.maximum
    if not ledger.num_requests:
        return [make_strip([(" nothing is held: no request runs", theme.SOFT)], width)]
    room = max(min(width, TABLE_WIDTH) - 11, 8)
    inside = room if maximum.slots <= pool else max(room * pool // maximum.slots, 1)  # where the pool ends
    held = ledger.held * ledger.block_size
    written, empty, free = share_out([ledger.written_slots, ledger.unwritten_slots, pool - held], inside)
    blocks: list[Part] = [
        (" blocks   ", theme.SOFT),
        (glyphs.bar_written * written, theme.BRAND),
        (glyphs.bar_reserved * empty, theme.NOTICE),
        (glyphs.bar_free * free, theme.FAINT),
    ]
    reach = room if maximum.slots > pool else max(round(room * maximum.slots / pool), written)
    reserved: list[Part] = [
        (" maxima   ", theme.SOFT),
        (glyphs.bar_written * written, theme.BRAND),
        (glyphs.bar_reserved * (reach - written), theme.BAD if maximum.slots > pool else theme.NOTICE),
        (glyphs.bar_free * (room - reach), theme.FAINT),
    ]
    return [make_strip(blocks, width), make_strip(reserved, width), *_draw_verdict(ledger, width)]


def _draw_verdict(ledger: Ledger, width: int) -> list[Strip]:
    number, fitting = ledger.num_requests, ledger.maximum.num_fitting
    more = ledger.more_requests((ledger.num_blocks - ledger.held) * ledger.block_size)
    style = theme.NOTICE if fitting < number else theme.TEXT
    words: list[Part] = [
        (f"with maxima reserved {fitting} of the {_count(number, 'request')} would fit; ", style),
        (f"in blocks all do, and {more:,.1f} more like them", theme.SOFT),
    ]
    indent = make_strip([(" ", theme.PLAIN)])
    return [Strip.join([indent, line]) for line in wrap_parts(words, max(width - 1, 8))]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
