"""Charts out of characters: a stacked area, and a line of bars. Told by glyph first, by colour second. Pure."""

from collections.abc import Sequence

from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.strips import Part, make_strip, merged

AXIS_WIDTH = 14


def layer_looks(glyphs: Glyphs) -> tuple[Part, ...]:
    """Sign and colour of shared, written, unwritten, cached and free slots, from the bottom up."""
    return (
        (glyphs.shared, theme.STRONG),
        (glyphs.written, theme.BRAND),
        (glyphs.reserved, theme.NOTICE),
        (glyphs.cached, theme.SOFT),
        (glyphs.free, theme.FAINT),
    )


def share_out(parts: Sequence[int], cells: int) -> list[int]:
    """`cells` cells for these parts, true to scale, by largest remainder."""
    total = sum(parts)
    if not total:
        return [0] * len(parts)
    counts = [part * cells // total for part in parts]
    rest = sorted(range(len(parts)), key=lambda i: (-(parts[i] * cells % total), i))
    for index in rest[: cells - sum(counts)]:
        counts[index] += 1
    return counts


def draw_stack(
    columns: Sequence[Sequence[int] | None], labels: Sequence[str], glyphs: Glyphs, height: int
) -> list[Strip]:
    """One line per row, the top one first; `labels` stand at the axis. None is a column that nobody has seen."""
    looks = layer_looks(glyphs)
    cells: list[list[Part]] = []
    for column in columns:
        if column is None:
            cells.append([(" ", theme.PLAIN)] * height)
            continue
        stack = [looks[layer] for layer, count in enumerate(share_out(column, height)) for _ in range(count)]
        cells.append(stack + [(" ", theme.PLAIN)] * (height - len(stack)))
    rows = []
    for row in reversed(range(height)):
        label: Part = (labels[height - 1 - row].rjust(AXIS_WIDTH - 1) + " ", theme.SOFT)
        rows.append(make_strip([label, *merged(stack[row] for stack in cells)]))
    return rows


def draw_bars(values: Sequence[float | None], peak: float, style: Style, glyphs: Glyphs) -> list[Part]:
    """One character per value, as high as its share of the peak; nothing for None."""
    steps = len(glyphs.levels) - 1
    signs = (
        " " if value is None else glyphs.levels[min(-(-int(value * steps * 1000) // int(peak * 1000 or 1)), steps)]
        for value in values
    )
    return merged((sign, style) for sign in signs)
