"""One character per cell, for the dense zooms of the grid: rows in view by numpy at once, lines from runs. Pure.

A cell is a symbol (an index into a string) and a look (an index into a table of styles); a row that has the bytes of
the last picture's row is not drawn again.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.style import Style

from kvscope.dashboard import theme
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.grid_layout import GridLayout, Light, Zoom
from kvscope.dashboard.owners import SEVERAL
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part

# Looks: owner codes, from these numbers on lit or fresh; the cursor; and how many of a group's blocks are shared.
LIT, FRESH, CURSOR, TINT = 16, 32, 48, 64
_OWNERS = range(SEVERAL + 1)
STYLES: dict[int, Style] = {
    **{code: theme.owner_style(code) for code in _OWNERS},
    **{LIT + code: theme.lit_style(code) for code in _OWNERS},
    **{FRESH + code: theme.owner_style(code) + theme.BOLD for code in _OWNERS},
    CURSOR: theme.CURSOR,
    **{TINT + level: style for level, style in enumerate(theme.TINTS)},
}


class Cells(NamedTuple):
    """The cells of some rows, side by side; the last row may be shorter."""

    rows: range
    columns: int
    alphabet: str
    symbols: NDArray[np.uint8]
    looks: NDArray[np.uint8]

    def key(self, row: int) -> tuple[bytes, bytes]:
        """Equal for rows that look the same."""
        place = self._place(row)
        return self.symbols[place].tobytes(), self.looks[place].tobytes()

    def length(self, row: int) -> int:
        """How many cells it has."""
        return len(self.looks[self._place(row)])

    def text(self, row: int) -> str:
        """The row's characters."""
        return "".join(map(self.alphabet.__getitem__, self.symbols[self._place(row)].tolist()))

    def parts(self, row: int) -> list[Part]:
        """The row with neighbours of one style as one part."""
        text, looks = self.text(row), self.looks[self._place(row)]
        starts = [0, *(np.flatnonzero(looks[1:] != looks[:-1]) + 1).tolist()]
        stops = [*starts[1:], len(text)]
        return [(text[a:b], STYLES[look]) for a, b, look in zip(starts, stops, looks[starts].tolist(), strict=True)]

    def each_in(self, row: int, named: Mapping[int, str]) -> list[str]:
        """For each cell of the row what its look is called."""
        return list(map(named.__getitem__, self.looks[self._place(row)].tolist()))

    def _place(self, row: int) -> slice:
        start = (row - self.rows.start) * self.columns
        return slice(start, start + self.columns)


def make_cells(pool: PoolFrame, layout: GridLayout, rows: range, light: Light, glyphs: Glyphs) -> Cells:
    """The cells of these rows at a zoom with one character per cell, DENSE or GROUPS."""
    start, stop = rows.start * layout.blocks_per_row, min(rows.stop * layout.blocks_per_row, pool.num_blocks)
    in_view = slice(start, stop)
    if layout.zoom is Zoom.GROUPS:
        alphabet = glyphs.levels
        symbols, looks = _make_groups(pool, in_view, layout.group, light, len(alphabet))
    else:
        alphabet = (
            glyphs.free + glyphs.cached + "23456789" + glyphs.many + glyphs.reserved + glyphs.partly + glyphs.full
        )
        symbols, looks = _make_blocks(pool, in_view, light)
    if light.cursor is not None and start <= light.cursor < stop:
        looks[(light.cursor - start) // layout.group] = CURSOR
    return Cells(rows, layout.columns, alphabet, symbols, looks)


_Columns = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def _make_blocks(pool: PoolFrame, in_view: slice, light: Light) -> _Columns:
    """A block's state, or its ref count when shared."""
    refs, written = pool.refs[in_view], pool.written[in_view]
    state = np.where(written >= pool.block_size, 13, np.where(written > 0, 12, 11))
    symbols = np.where(refs == 0, written != 0, np.where(refs > 1, np.minimum(refs, 10), state)).astype(np.uint8)
    looks = pool.owners[in_view] * (not light.dim_others)
    fresh = _inside(light.fresh, in_view)
    if not light.dim_others:
        looks[fresh] += np.uint8(FRESH)
    lit = _inside(light.logical, in_view)
    looks[lit] = pool.owners[in_view][lit] + np.uint8(LIT)
    return symbols, looks


def _make_groups(pool: PoolFrame, in_view: slice, group: int, light: Light, num_levels: int) -> _Columns:
    """How many blocks of a group are held, in a colour that says how many of these are shared."""
    refs, owners = pool.refs[in_view], pool.owners[in_view]
    sizes = np.full(-(-len(refs) // group), group)
    sizes[-1:] = len(refs) - (len(sizes) - 1) * group
    num_held = _count_by_group(refs != 0, group)
    symbols = -(-num_held * (num_levels - 1) // sizes)
    looks = np.zeros(len(sizes), np.uint8)
    if not light.dim_others:
        num_shared = _count_by_group(refs > 1, group) if pool.num_shared else np.zeros(len(sizes), np.int32)
        tints = -(-num_shared * (len(theme.TINTS) - 1) // np.maximum(num_held, 1))
        looks = np.where(num_held > 0, TINT + tints, 0).astype(np.uint8)
    lit = _inside(light.logical, in_view)[::-1]  # of several in a group the first one counts
    looks[lit // group] = owners[lit] + np.uint8(LIT)
    return symbols.astype(np.uint8), looks


def _count_by_group(mask: NDArray[np.bool_], group: int) -> NDArray[np.int32]:
    """How many of each group are; the last group may be shorter."""
    return np.add.reduceat(mask, np.arange(0, len(mask), group), dtype=np.int32)


def _inside(block_ids: Collection[int], in_view: slice) -> NDArray[np.intp]:
    """These blocks, sorted, counted from the first in view; only those in view."""
    found = np.fromiter(block_ids, np.intp, len(block_ids))
    return np.sort(found[(found >= in_view.start) & (found < in_view.stop)]) - in_view.start
