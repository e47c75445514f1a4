"""The nearest zoom of the grid: each block as a card with its holders and the text in its slots. Pure.

P3  ■■■■ 1   r1.0 L0
"Now" " is" " the" " winter"
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.colouring import Mark, marks_of
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.grid import block_style, name_style, number_style, slot_glyphs
from kvscope.dashboard.grid_layout import MAX_CARDS, GridLayout, Light
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part, clip, make_strip, measure, piece_parts


class Caption(NamedTuple):
    """Who holds a block, and the texts of its written slots."""

    holders: tuple[tuple[str, int], ...]
    pieces: Sequence[str]


Captions = Mapping[int, Caption]


def build_captions(frame: Frame, pool: PoolFrame | None = None) -> Captions:
    """Captions of every held block of a small pool, the device's unless told; none at all for a large one."""
    pool = pool or frame.pool
    if pool.num_blocks > MAX_CARDS:
        return {}
    captions: dict[int, Caption] = {}
    for request in frame.requests:
        for sequence in request.sequences:
            for logical, block_id in enumerate(sequence.table_in(pool.letter), sequence.num_released):
                known = captions.get(block_id)
                if known is None:
                    first = logical * pool.block_size
                    known = Caption((), sequence.pieces[first : first + pool.written[block_id]])
                holder = (sequence.sequence_id, logical)
                captions[block_id] = known._replace(holders=(*known.holders, holder))
    return captions


def draw_card_row(
    pool: PoolFrame, layout: GridLayout, row: int, light: Light, *, captions: Captions, glyphs: Glyphs, width: int
) -> list[Strip]:
    """One row of cards: the line of facts, the line of texts, and a line of air."""
    first = row * layout.columns
    block_ids = range(first, min(first + layout.columns, pool.num_blocks))
    facts: list[Part] = []
    texts: list[Part] = []
    for block_id, mark in zip(block_ids, marks_of(pool, light.by, block_ids, glyphs), strict=True):
        caption = captions.get(block_id)
        facts += _fit(_facts(pool, block_id, mark, light, caption=caption, glyphs=glyphs), layout.cell_width, glyphs)
        texts += _fit(_texts(block_id, light, caption, glyphs), layout.cell_width, glyphs)
    return [make_strip(facts, width), make_strip(texts, width), make_strip([], width)]


def draw_holders_row(
    pool: PoolFrame, layout: GridLayout, row: int, light: Light, *, captions: Captions, glyphs: Glyphs, width: int
) -> Strip:
    """The line under a row of the SLOTS zoom, when there is room for one: whose logical block each one is."""
    first = row * layout.columns
    parts: list[Part] = []
    for block_id in range(first, min(first + layout.columns, pool.num_blocks)):
        caption, dimmed = captions.get(block_id), light.dim_others and block_id not in light.logical
        style = theme.FAINT if dimmed else theme.SOFT
        words = [(_holder_words(caption), style)] if caption is not None else []
        parts += _fit(words, layout.cell_width, glyphs, num_air=1)
    return make_strip(parts, width)


def _holder_words(caption: Caption) -> str:
    sequence_id, logical = caption.holders[0]
    more = f" +{len(caption.holders) - 1}" if len(caption.holders) > 1 else ""
    return f"{sequence_id} L{logical}{more}"


def _facts(
    pool: PoolFrame, block_id: int, mark: Mark, light: Light, *, caption: Caption | None, glyphs: Glyphs
) -> list[Part]:
    style = block_style(block_id, mark, light)
    lit = block_id in light.logical
    name = pool.name(block_id)
    parts: list[Part] = [
        (name, name_style(block_id, light)),
        (" " * (len(str(pool.num_blocks - 1)) + 2 - len(name)), theme.PLAIN),
        (slot_glyphs(pool, block_id, glyphs), style),
        (" ", theme.PLAIN),
    ]
    if mark.number:
        parts += [(mark.number, number_style(pool, block_id, mark, light)), (" ", theme.PLAIN)]
    if caption is not None:
        between = f" {glyphs.separator} "
        words = between.join(f"{sequence_id} L{logical}" for sequence_id, logical in caption.holders)
        parts.append((words, style if lit or not light.dim_others else theme.FAINT))
    else:
        parts.append(("cached" if pool.written[block_id] else "free", theme.FAINT))
    return parts


def _texts(block_id: int, light: Light, caption: Caption | None, glyphs: Glyphs) -> list[Part]:
    if caption is None:
        return []
    style: Style = theme.TEXT if block_id in light.logical or not light.dim_others else theme.FAINT
    return piece_parts(caption.pieces, style, glyphs) or [("reserved, nothing written yet", theme.FAINT)]


def _fit(parts: list[Part], width: int, glyphs: Glyphs, *, num_air: int = 2) -> list[Part]:
    """`parts` in exactly `width` cells, with some of air at the end."""
    room = width - num_air
    fitted: list[Part] = []
    for text, style in parts:
        shown = clip(text, room - measure(fitted), glyphs)
        if shown:
            fitted.append((shown, style))
    return [*fitted, (" " * (width - measure(fitted)), theme.PLAIN)]
