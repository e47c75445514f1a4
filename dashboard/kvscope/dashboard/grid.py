"""The block grid: how a pool is laid out in cells, and one row of it as a strip. Pure.

Five zooms, from near to far:

    CARDS                   id, slots, holders and texts: see cards.py
    SLOTS    P12 ■■■□ 2 L3  id, every slot, ref count; the logical number when selected
    BLOCKS   ■2 ◧  □  ·     one glyph per block, ref count when shared; with its id where there is room
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
from kvscope.dashboard.strips import Part, make_strip, measure

MAX_CARDS = 96  # a pool with more blocks never fits a screen as cards
CARD_WIDTH = 30
SLOTS_TAIL = 8  # ref count, logical number and air, after the id and the slots
TIGHT_TAIL = 5  # the same without the logical number
NAMED_TAIL = 5  # glyph, ref count and air, after the id of a block
MAX_SLOTS_DRAWN = 32  # a block with more slots than this is drawn as one glyph


class Zoom(IntEnum):
    CARDS = 0
    SLOTS = 1
    BLOCKS = 2
    DENSE = 3
    GROUPS = 4


class GridLayout(NamedTuple):
    """`columns` cells per row, each `cell_width` wide and `lines` high, `group` blocks per cell."""

    zoom: Zoom
    columns: int
    rows: int
    cell_width: int
    label_width: int
    group: int
    lines: int

    @property
    def height(self) -> int:
        return self.rows * self.lines

    @property
    def blocks_per_row(self) -> int:
        return self.columns * self.group

    def block_at(self, column: int, line: int) -> int | None:
        """The (first) block under a character position, or None beside the cells."""
        index = (column - self.label_width) // self.cell_width
        if column < self.label_width or index >= self.columns:
            return None
        return line // self.lines * self.blocks_per_row + index * self.group

    def line_of(self, block_id: int) -> int:
        return block_id // self.blocks_per_row * self.lines


class Light(NamedTuple):
    """What stands out: `logical` maps the selected blocks to their logical number; the cursor is one block; `fresh`
    blocks were reserved, copied or written by the latest step."""

    logical: Mapping[int, int]
    dim_others: bool
    cursor: int | None
    fresh: frozenset[int] = frozenset()


NO_LIGHT = Light({}, dim_others=False, cursor=None)


def lay_out(pool: PoolFrame, width: int, height: int, zoom: Zoom | None = None) -> GridLayout:
    """The layout at a zoom; without one, the nearest zoom at which the whole pool is on screen."""
    if zoom is not None:
        return _layout_at(zoom, pool, width, height)
    for candidate in (Zoom.CARDS, Zoom.SLOTS, Zoom.BLOCKS, Zoom.DENSE):
        layout = _layout_at(candidate, pool, width, height)
        if layout.zoom is candidate and layout.height <= height:
            return layout
    return _layout_at(Zoom.GROUPS, pool, width, height)


def _layout_at(zoom: Zoom, pool: PoolFrame, width: int, height: int) -> GridLayout:
    num_blocks, id_width = pool.num_blocks, len(str(max(pool.num_blocks - 1, 0))) + 1
    if zoom is Zoom.CARDS and (num_blocks > MAX_CARDS or pool.block_size > MAX_SLOTS_DRAWN):
        zoom = Zoom.SLOTS
    if zoom is Zoom.SLOTS and (pool.block_size > MAX_SLOTS_DRAWN or id_width + pool.block_size + SLOTS_TAIL > width):
        zoom = Zoom.BLOCKS
    match zoom:
        case Zoom.CARDS:
            columns = max(width // max(CARD_WIDTH, id_width + pool.block_size + 14), 1)
            return _grid(zoom, num_blocks, columns, width // columns, lines=3)
        case Zoom.SLOTS:
            roomy, tight = (
                _grid(zoom, num_blocks, (width + 2) // cell_width, cell_width)
                for cell_width in (id_width + pool.block_size + SLOTS_TAIL, id_width + pool.block_size + TIGHT_TAIL)
            )
            return tight if roomy.rows > height >= tight.rows else _airy(roomy, height)
        case Zoom.BLOCKS:
            for cell_width in (max(id_width + NAMED_TAIL, 9), id_width + NAMED_TAIL):
                named = _grid(zoom, num_blocks, (width + 2) // cell_width, cell_width)
                if named.rows <= height:
                    return _airy(named, height)
            return _grid(zoom, num_blocks, _whole((width - id_width - 1) // 3), 3, label_width=id_width + 1)
        case Zoom.DENSE:
            return _grid(zoom, num_blocks, _whole(width - id_width - 1), 1, label_width=id_width + 1)
    columns = max(width - id_width - 1, 1)
    group = max(-(-num_blocks // max(columns * height, 1)), 1)
    return _grid(zoom, num_blocks, columns, 1, label_width=id_width + 1, group=group)


def _grid(
    zoom: Zoom, num_blocks: int, columns: int, cell_width: int, *, label_width: int = 0, group: int = 1, lines: int = 1
) -> GridLayout:
    columns = max(columns, 1)
    return GridLayout(zoom, columns, -(-num_blocks // (columns * group)), cell_width, label_width, group, lines)


def _airy(layout: GridLayout, height: int) -> GridLayout:
    """With a second line per row for the holders, where the whole pool still fits."""
    return layout._replace(lines=2) if layout.rows * 2 <= height else layout


def _whole(columns: int) -> int:
    """Rows of a multiple of eight blocks are easier to count in."""
    return columns - columns % 8 if columns > 8 else columns


def block_glyph(ref_count: int, num_written: int, block_size: int, glyphs: Glyphs) -> str:
    """The state of one block as one character."""
    if not ref_count:
        return glyphs.cached if num_written else glyphs.free
    if not num_written:
        return glyphs.reserved
    return glyphs.full if num_written >= block_size else glyphs.partly


def draw_row(pool: PoolFrame, layout: GridLayout, row: int, light: Light, *, glyphs: Glyphs, width: int) -> Strip:
    """Row `row` of the grid."""
    start = row * layout.blocks_per_row
    stop = min(start + layout.blocks_per_row, pool.num_blocks)
    parts: list[Part] = []
    if layout.label_width:
        parts.append((f"P{start}".rjust(layout.label_width - 1) + " ", theme.FAINT))
    if layout.zoom is Zoom.GROUPS:
        groups = range(start, stop, layout.group)
        parts += [_draw_group(pool, first, min(first + layout.group, stop), light, glyphs) for first in groups]
        return make_strip(_merged(parts), width)
    draw = {Zoom.SLOTS: _draw_slots, Zoom.BLOCKS: _draw_block}.get(layout.zoom, _draw_dense)
    for block_id in range(start, stop):
        parts += draw(pool, block_id, light, glyphs, layout.cell_width)
    return make_strip(_merged(parts), width)


def block_style(pool: PoolFrame, block_id: int, light: Light) -> Style:
    """The owner's colour; lit or dimmed by what is selected."""
    if block_id in light.logical:
        return theme.lit_style(pool.owners[block_id])
    if light.dim_others:
        return theme.FAINT
    style = theme.owner_style(pool.owners[block_id])
    return style + theme.BOLD if block_id in light.fresh else style


def name_style(block_id: int, light: Light) -> Style:
    """The block's id: the cursor, then what is selected, then what the latest step touched."""
    if block_id == light.cursor:
        return theme.CURSOR
    if block_id in light.logical:
        return theme.STRONG
    if light.dim_others:
        return theme.FAINT
    return theme.FRESH if block_id in light.fresh else theme.SOFT


def slot_glyphs(pool: PoolFrame, block_id: int, glyphs: Glyphs) -> str:
    """One glyph per slot."""
    num_written = pool.written[block_id]
    filled, empty = (glyphs.written, glyphs.reserved) if pool.refs[block_id] else (glyphs.cached, glyphs.free)
    return filled * num_written + empty * (pool.block_size - num_written)


def _draw_slots(pool: PoolFrame, block_id: int, light: Light, glyphs: Glyphs, cell_width: int) -> list[Part]:
    ref_count, lit = pool.refs[block_id], block_id in light.logical
    id_width = len(str(pool.num_blocks - 1)) + 1
    name, refs = f"P{block_id}", f"{ref_count}" if ref_count else ""
    tail = cell_width - id_width - pool.block_size
    logical = f" L{light.logical[block_id]}" if lit and tail >= SLOTS_TAIL else ""
    air = max(tail - 2 - len(refs) - len(logical), 0)
    return [
        (name, name_style(block_id, light)),
        (" " * (id_width + 1 - len(name)), theme.PLAIN),
        (slot_glyphs(pool, block_id, glyphs), block_style(pool, block_id, light)),
        (" ", theme.PLAIN),
        (refs, theme.SHARED if ref_count > 1 else theme.FAINT),
        (logical, theme.STRONG),
        (" " * air, theme.PLAIN),
    ]


def _draw_block(pool: PoolFrame, block_id: int, light: Light, glyphs: Glyphs, cell_width: int) -> list[Part]:
    ref_count = pool.refs[block_id]
    glyph = block_glyph(ref_count, pool.written[block_id], pool.block_size, glyphs)
    style = theme.CURSOR if block_id == light.cursor else block_style(pool, block_id, light)
    digit = "" if ref_count <= 1 else str(ref_count) if ref_count <= 9 else glyphs.many
    name: list[Part] = []
    if cell_width > 3:
        label = f"P{block_id}".ljust(len(str(pool.num_blocks - 1)) + 2)
        name = [(label, name_style(block_id, light))]
    room = cell_width - measure(name) - 1 - len(digit)
    return [*name, (glyph, style), (digit, theme.SHARED), (" " * room, theme.PLAIN)]


def _draw_dense(pool: PoolFrame, block_id: int, light: Light, glyphs: Glyphs, cell_width: int) -> list[Part]:
    ref_count = pool.refs[block_id]
    style = theme.CURSOR if block_id == light.cursor else block_style(pool, block_id, light)
    if ref_count > 1:
        return [(str(ref_count) if ref_count <= 9 else glyphs.many, style)]
    return [(block_glyph(ref_count, pool.written[block_id], pool.block_size, glyphs), style)]


def _draw_group(pool: PoolFrame, start: int, stop: int, light: Light, glyphs: Glyphs) -> Part:
    refs = pool.refs[start:stop]
    num_held = len(refs) - refs.count(0)
    glyph = glyphs.levels[-(-num_held * (len(glyphs.levels) - 1) // len(refs))]
    if light.cursor is not None and start <= light.cursor < stop:
        return glyph, theme.CURSOR
    if light.logical and not light.logical.keys().isdisjoint(range(start, stop)):
        lit = next(block_id for block_id in range(start, stop) if block_id in light.logical)
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


def legend(layout: GridLayout, glyphs: Glyphs) -> list[Part]:
    """What the cells of this zoom mean."""
    if layout.zoom is Zoom.GROUPS:
        low, high, free = glyphs.levels[1], glyphs.levels[-1], glyphs.levels[0]
        return [(f"{layout.group} blocks per cell: {low} few held  {high} all held  {free} free", theme.SOFT)]
    states = f"{glyphs.reserved} reserved  {glyphs.free} free  {glyphs.cached} cached"
    if layout.zoom <= Zoom.SLOTS:
        return [(f"{glyphs.written} written  {states}  number: refs", theme.SOFT)]
    return [(f"{glyphs.full} full  {glyphs.partly} partly  {states}  2+ shared", theme.SOFT)]
