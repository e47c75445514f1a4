"""The block grid: how a pool is laid out in cells, and one row of it as a strip. Pure.

Four zooms, from near to far:

    SLOTS    P12 ■■■□ 2     id, every slot, ref count
    BLOCKS   ■2 ◧  □  ·     one glyph per block, ref count when shared
    DENSE    ■2◧□··         one character per block; a shared block shows its ref count
    GROUPS   █▆▃·           one character per group of blocks: how many of them are held
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.frames import PoolFrame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.strips import Part, make_strip

MAX_SLOTS_DRAWN = 32  # a block with more slots than this is drawn as one glyph


class Zoom(IntEnum):
    SLOTS = 0
    BLOCKS = 1
    DENSE = 2
    GROUPS = 3


class GridLayout(NamedTuple):
    """`columns` cells per row, `cell_width` characters each, `group` blocks per cell."""

    zoom: Zoom
    columns: int
    rows: int
    cell_width: int
    label_width: int
    group: int

    @property
    def blocks_per_row(self) -> int:
        return self.columns * self.group

    def block_at(self, column: int, row: int) -> int | None:
        """The (first) block under a character position, or None beside the cells."""
        index = (column - self.label_width) // self.cell_width
        if column < self.label_width or index >= self.columns:
            return None
        return row * self.blocks_per_row + index * self.group

    def row_of(self, block_id: int) -> int:
        return block_id // self.blocks_per_row


class Light(NamedTuple):
    """What is selected: `logical` maps its blocks to their logical number; the cursor is one block."""

    logical: Mapping[int, int]
    dim_others: bool
    cursor: int | None


NO_LIGHT = Light({}, dim_others=False, cursor=None)


def lay_out(pool: PoolFrame, width: int, height: int, zoom: Zoom | None = None) -> GridLayout:
    """The layout at a zoom; without one, the nearest zoom at which the whole pool is on screen."""
    if zoom is not None:
        return _layout_at(zoom, pool, width, height)
    for candidate in (Zoom.SLOTS, Zoom.BLOCKS, Zoom.DENSE):
        layout = _layout_at(candidate, pool, width, height)
        if layout.zoom is candidate and layout.rows <= height:
            return layout
    return _layout_at(Zoom.GROUPS, pool, width, height)


def _layout_at(zoom: Zoom, pool: PoolFrame, width: int, height: int) -> GridLayout:
    num_blocks, id_width = pool.num_blocks, len(str(max(pool.num_blocks - 1, 0))) + 1
    if zoom is Zoom.SLOTS and (pool.block_size > MAX_SLOTS_DRAWN or id_width + pool.block_size + 4 > width):
        zoom = Zoom.BLOCKS
    label_width = 0 if zoom is Zoom.SLOTS else id_width + 1
    cell_width = {Zoom.SLOTS: id_width + 1 + pool.block_size + 4, Zoom.BLOCKS: 3}.get(zoom, 1)
    columns = max((width - label_width + (zoom is Zoom.SLOTS)) // cell_width, 1)
    if zoom in (Zoom.BLOCKS, Zoom.DENSE) and columns > 8:
        columns -= columns % 8
    group = 1
    if zoom is Zoom.GROUPS:
        group = max(-(-num_blocks // max(columns * height, 1)), 1)
    rows = -(-num_blocks // (columns * group)) if num_blocks else 0
    return GridLayout(zoom, columns, rows, cell_width, label_width, group)


def block_glyph(ref_count: int, num_written: int, block_size: int, glyphs: Glyphs) -> str:
    """The state of one block as one character."""
    if not ref_count:
        return glyphs.cached if num_written else glyphs.free
    if not num_written:
        return glyphs.reserved
    return glyphs.full if num_written >= block_size else glyphs.partly


def draw_row(pool: PoolFrame, layout: GridLayout, row: int, light: Light, glyphs: Glyphs, width: int) -> Strip:
    """Row `row` of the grid."""
    start = row * layout.blocks_per_row
    stop = min(start + layout.blocks_per_row, pool.num_blocks)
    parts: list[Part] = []
    if layout.label_width:
        parts.append((f"P{start}".rjust(layout.label_width - 1) + " ", theme.FAINT))
    if layout.zoom is Zoom.GROUPS:
        for first in range(start, stop, layout.group):
            parts.append(_draw_group(pool, first, min(first + layout.group, stop), light, glyphs))
        return make_strip(_merged(parts), width)
    draw = {Zoom.SLOTS: _draw_slots, Zoom.BLOCKS: _draw_block}.get(layout.zoom, _draw_dense)
    for block_id in range(start, stop):
        parts += draw(pool, block_id, light, glyphs, layout.cell_width)
    return make_strip(_merged(parts), width)


def _style(pool: PoolFrame, block_id: int, light: Light) -> Style:
    if block_id in light.logical:
        return theme.lit_style(pool.owners[block_id])
    return theme.FAINT if light.dim_others else theme.owner_style(pool.owners[block_id])


def _draw_slots(pool: PoolFrame, block_id: int, light: Light, glyphs: Glyphs, cell_width: int) -> list[Part]:
    ref_count, num_written = pool.refs[block_id], pool.written[block_id]
    style = _style(pool, block_id, light)
    lit = block_id in light.logical
    id_width = cell_width - pool.block_size - 4
    id_style = theme.CURSOR if block_id == light.cursor else theme.STRONG if lit else theme.SOFT
    if not ref_count:
        slots = glyphs.cached * num_written + glyphs.free * (pool.block_size - num_written)
    else:
        slots = glyphs.written * num_written + glyphs.reserved * (pool.block_size - num_written)
    refs: Part = (f"{ref_count or '':<2}", theme.FAINT if ref_count <= 1 else theme.STRONG)
    if ref_count > 1:
        refs = (f"{ref_count:<2}" if ref_count > 9 else f"{ref_count}", theme.SHARED)
    name = f"P{block_id}"
    tail = " " * (3 - len(refs[0]))
    return [
        (name, id_style),
        (" " * (id_width - len(name)), theme.PLAIN),
        (slots, style),
        (" ", theme.PLAIN),
        refs,
        (tail, theme.PLAIN),
    ]


def _draw_block(pool: PoolFrame, block_id: int, light: Light, glyphs: Glyphs, cell_width: int) -> list[Part]:
    ref_count = pool.refs[block_id]
    glyph = block_glyph(ref_count, pool.written[block_id], pool.block_size, glyphs)
    style = theme.CURSOR if block_id == light.cursor else _style(pool, block_id, light)
    digit = "" if ref_count <= 1 else str(ref_count) if ref_count <= 9 else glyphs.many
    return [(glyph, style), (digit, theme.SHARED), (" " * (cell_width - 1 - len(digit)), theme.PLAIN)]


def _draw_dense(pool: PoolFrame, block_id: int, light: Light, glyphs: Glyphs, cell_width: int) -> list[Part]:
    ref_count = pool.refs[block_id]
    style = theme.CURSOR if block_id == light.cursor else _style(pool, block_id, light)
    if ref_count > 1:
        return [(str(ref_count) if ref_count <= 9 else glyphs.many, style)]
    return [(block_glyph(ref_count, pool.written[block_id], pool.block_size, glyphs), style)]


def _draw_group(pool: PoolFrame, start: int, stop: int, light: Light, glyphs: Glyphs) -> Part:
    refs = pool.refs[start:stop]
    num_held = len(refs) - refs.count(0)
    glyph = glyphs.levels[-(-num_held * (len(glyphs.levels) - 1) // len(refs))]
    if light.cursor is not None and start <= light.cursor < stop:
        return glyph, theme.CURSOR
    lit = (
        next((block_id for block_id in range(start, stop) if block_id in light.logical), None)
        if light.logical
        else None
    )
    if lit is not None:
        return glyph, theme.lit_style(pool.owners[lit])
    if light.dim_others or not num_held:
        return glyph, theme.FAINT
    owners = pool.owners[start:stop].lstrip(b"\0")
    return glyph, theme.owner_style(owners[0] if owners else 0)


def _merged(parts: list[Part]) -> list[Part]:
    """Neighbours of one style as one part: fewer escape sequences, less to compare."""
    merged: list[Part] = []
    for text, style in parts:
        if merged and merged[-1][1] is style:
            merged[-1] = (merged[-1][0] + text, style)
        elif text:
            merged.append((text, style))
    return merged


def legend(layout: GridLayout, pool: PoolFrame, glyphs: Glyphs) -> list[Part]:
    """What the cells of this zoom mean."""
    if layout.zoom is Zoom.GROUPS:
        words = f"{layout.group} blocks per cell, {glyphs.levels[1]} few held {glyphs.levels[-1]} all held {glyphs.levels[0]} free"
        return [(words, theme.SOFT)]
    if layout.zoom is Zoom.SLOTS:
        return [
            (
                f"{glyphs.written} written {glyphs.reserved} reserved {glyphs.free} free {glyphs.cached} cached",
                theme.SOFT,
            ),
            ("  digit: ref count", theme.SOFT),
        ]
    words = f"{glyphs.full} full {glyphs.partly} partly {glyphs.reserved} reserved {glyphs.free} free {glyphs.cached} cached"
    return [(f"{words}  2+ shared", theme.SOFT)]
