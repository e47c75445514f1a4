"""How a pool is laid out in cells, at each zoom, and what stands out in it. Pure.

Six zooms, from near to far:

    CARDS                   id, slots, holders and texts: see cards.py
    SLOTS    P12 ■■■□ 2 L3  id, every slot, ref count; the logical number when selected
    BLOCKS   ■2 ◧  □  ·     one glyph per block, ref count when shared; with its id where there is room
    DENSE    ■2◧□··         one character per block; a shared block shows its ref count
    HALVES   ▀█▄··          one character per two blocks, one above the other, in two colours: see halves.py
    GROUPS   █▆▃·           one character per group of blocks: how many of them are held
"""

from collections.abc import Collection, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.pool_frame import PoolFrame

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
    HALVES = 4
    GROUPS = 5


_NEAR = (Zoom.CARDS, Zoom.SLOTS, Zoom.BLOCKS, Zoom.DENSE)


class GridLayout(NamedTuple):
    """`columns` cells per row, each `cell_width` wide and `lines` high, `group` blocks per cell.

    Or `stack` rows of blocks on one line: then a cell has a block of each, one above the other.
    """

    zoom: Zoom
    columns: int
    rows: int
    cell_width: int
    label_width: int
    group: int
    lines: int
    stack: int = 1

    @property
    def height(self) -> int:
        return self.rows * self.lines

    @property
    def blocks_per_row(self) -> int:
        return self.blocks_abreast * self.stack

    @property
    def blocks_abreast(self) -> int:
        """From a block to the one below it."""
        return self.columns * self.group

    def block_at(self, column: int, line: int) -> int | None:
        """The (first or upper) block under a character position, or None beside the cells."""
        index = (column - self.label_width) // self.cell_width
        if column < self.label_width or index >= self.columns:
            return None
        return line // self.lines * self.blocks_per_row + index * self.group

    def line_of(self, block_id: int) -> int:
        return block_id // self.blocks_per_row * self.lines


class Light(NamedTuple):
    """What stands out: `logical` maps the selected blocks to their logical number; the cursor is one block; `fresh`
    blocks were reserved, copied or written by the latest step; `by` is what a colour says."""

    logical: Mapping[int, int]
    dim_others: bool
    cursor: int | None
    fresh: Collection[int] = frozenset()
    by: ColourBy = ColourBy.OWNER


NO_LIGHT = Light({}, dim_others=False, cursor=None)


def lay_out(pool: PoolFrame, width: int, height: int, zoom: Zoom | None = None, *, halves: bool = True) -> GridLayout:
    """The layout at a zoom; without one, the nearest zoom at which the whole pool is on screen.

    `halves`: whether HALVES may be chosen, which needs colours and half-block characters.
    """
    return _lay_out(_Size(pool.num_blocks, pool.block_size), width, height, zoom, halves)


class _Size(NamedTuple):
    """All that a layout needs to know of a pool."""

    num_blocks: int
    block_size: int


@lru_cache(maxsize=64)
def _lay_out(pool: _Size, width: int, height: int, zoom: Zoom | None, halves: bool) -> GridLayout:
    if zoom is not None:
        return _layout_at(zoom, pool, width, height)
    for candidate in (*_NEAR, Zoom.HALVES) if halves else _NEAR:
        layout = _layout_at(candidate, pool, width, height)
        if layout.zoom is candidate and layout.height <= height:
            return layout
    return _layout_at(Zoom.GROUPS, pool, width, height)


def _layout_at(zoom: Zoom, pool: _Size, width: int, height: int) -> GridLayout:
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
        case Zoom.DENSE | Zoom.HALVES:
            stack = 2 if zoom is Zoom.HALVES else 1
            return _grid(zoom, num_blocks, _whole(width - id_width - 1), 1, label_width=id_width + 1, stack=stack)
    columns = max(width - id_width - 1, 1)
    group = max(-(-num_blocks // max(columns * height, 1)), 1)
    return _grid(zoom, num_blocks, columns, 1, label_width=id_width + 1, group=group)


def _grid(
    zoom: Zoom,
    num_blocks: int,
    columns: int,
    cell_width: int,
    *,
    label_width: int = 0,
    group: int = 1,
    lines: int = 1,
    stack: int = 1,
) -> GridLayout:
    columns = max(columns, 1)
    rows = -(-num_blocks // (columns * group * stack))
    return GridLayout(zoom, columns, rows, cell_width, label_width, group, lines, stack)


def _airy(layout: GridLayout, height: int) -> GridLayout:
    """With a second line per row for the holders, where the whole pool still fits."""
    return layout._replace(lines=2) if layout.rows * 2 <= height else layout


def _whole(columns: int) -> int:
    """Rows of a multiple of eight blocks are easier to count in."""
    return columns - columns % 8 if columns > 8 else columns
