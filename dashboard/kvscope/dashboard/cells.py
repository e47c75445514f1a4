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
from kvscope.dashboard.colouring import (
    SCALES,
    ColourBy,
    alphabet,
    codes_of,
    codes_of_symbols,
    numbers_of,
    symbols_of,
)
from kvscope.dashboard.glyphs import NUM_LEVELS, Glyphs
from kvscope.dashboard.grid_layout import GridLayout, Light, Zoom
from kvscope.dashboard.halves import CURSOR_INK, GROUND, PAIRS, half_letters, pair_up
from kvscope.dashboard.owners import SEVERAL
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part

# Looks: colour codes, from these numbers on lit or fresh; the cursor; and how many of a group's blocks are shared.
LIT, FRESH, CURSOR, TINT = 16, 32, 48, 64


def _looks(by: ColourBy) -> dict[int, Style]:
    """The style of every look."""
    scale = SCALES[by]
    lit = [theme.lit_style(code) for code in range(SEVERAL + 1)] if by is ColourBy.OWNER else [*map(_bold, scale)]
    return {
        **dict(enumerate(scale)),
        **dict(enumerate(lit, start=LIT)),
        **dict(enumerate(map(_bold, scale), start=FRESH)),
        CURSOR: theme.CURSOR,
        **dict(enumerate(theme.TINTS, start=TINT)),
    }


def _bold(style: Style) -> Style:
    return style + theme.BOLD


STYLES = {by: _looks(by) for by in ColourBy}


class Cells(NamedTuple):
    """The cells of some rows, side by side; the last row may be shorter."""

    rows: range
    columns: int
    styles: Mapping[int, Style]  # of every look
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
        return [
            (text[a:b], self.styles[look]) for a, b, look in zip(starts, stops, looks[starts].tolist(), strict=True)
        ]

    def each_in(self, row: int, named: Mapping[int, str]) -> list[str]:
        """For each cell of the row what its look is called."""
        return list(map(named.__getitem__, self.looks[self._place(row)].tolist()))

    def _place(self, row: int) -> slice:
        start = (row - self.rows.start) * self.columns
        return slice(start, start + self.columns)


def make_cells(pool: PoolFrame, layout: GridLayout, rows: range, light: Light, glyphs: Glyphs) -> Cells:
    """The cells of these rows at a zoom with one character per cell: DENSE, HALVES or GROUPS."""
    start, stop = rows.start * layout.blocks_per_row, min(rows.stop * layout.blocks_per_row, pool.num_blocks)
    in_view = slice(start, stop)
    if layout.zoom is Zoom.GROUPS:
        letters = group_letters(light.by, glyphs)
        symbols, looks = _make_groups(pool, in_view, layout.group, light)
    else:
        letters = alphabet(light.by, glyphs)
        symbols, looks = _make_blocks(pool, in_view, light)
    if light.cursor is not None and start <= light.cursor < stop:
        looks[(light.cursor - start) // layout.group] = CURSOR
    cells = Cells(rows, layout.columns, STYLES[light.by], letters, symbols, looks)
    return _paired(cells, light.by, glyphs) if layout.zoom is Zoom.HALVES else cells


def group_letters(by: ColourBy, glyphs: Glyphs) -> str:
    """What a group of blocks can be: by owner from none held to all held, and none held but some cached."""
    return glyphs.levels + glyphs.cached if by is ColourBy.OWNER else alphabet(by, glyphs)


_Columns = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def _make_blocks(pool: PoolFrame, in_view: slice, light: Light) -> _Columns:
    """One block in each cell."""
    symbols = symbols_of(pool, light.by, numbers_of(pool, light.by, in_view))
    codes = codes_of(pool, light.by, in_view, symbols)
    looks = codes * (not light.dim_others)
    fresh = _inside(light.fresh, in_view)
    if not light.dim_others:
        looks[fresh] += np.uint8(FRESH)
    lit = _inside(light.logical, in_view)
    looks[lit] = codes[lit] + np.uint8(LIT)
    return symbols, looks


def _paired(dense: Cells, by: ColourBy, glyphs: Glyphs) -> Cells:
    """Two rows of blocks on each line, from what they look like in cells of their own."""
    inks = np.where(dense.symbols > 0, dense.looks % LIT + 1, GROUND)  # the first symbol of every mode: free
    inks[dense.looks == CURSOR] = CURSOR_INK
    pairs, found = PAIRS[by], pair_up(inks.astype(np.uint8), dense.columns)
    return Cells(dense.rows, dense.columns, pairs.styles, half_letters(glyphs), pairs.symbols[found], found)


def _make_groups(pool: PoolFrame, in_view: slice, group: int, light: Light) -> _Columns:
    """By owner how many blocks of a group are held; by state what most are; else what the largest number is."""
    if light.by is ColourBy.OWNER:
        symbols, codes = _held_and_shared(pool, in_view, group)
    else:
        numbers = numbers_of(pool, light.by, in_view)
        if light.by is ColourBy.STATE:
            symbols = _most_frequent(symbols_of(pool, light.by, numbers), len(SCALES[light.by]), group)
        else:
            starts = np.arange(0, len(numbers[0]), group)
            symbols = symbols_of(pool, light.by, [np.maximum.reduceat(column, starts) for column in numbers])
        codes = codes_of_symbols(light.by, symbols)
    looks = codes * (not light.dim_others)
    lit = _inside(light.logical, in_view)[::-1]  # of several in a group the first one counts
    colours = pool.owners[in_view][lit] if light.by is ColourBy.OWNER else codes[lit // group]
    looks[lit // group] = colours + np.uint8(LIT)
    return symbols.astype(np.uint8), looks


def _held_and_shared(pool: PoolFrame, in_view: slice, group: int) -> _Columns:
    """How many blocks of a group are held, in a colour that says how many of these are shared."""
    refs, top = pool.refs[in_view], NUM_LEVELS - 1
    sizes = np.full(-(-len(refs) // group), group)
    sizes[-1:] = len(refs) - (len(sizes) - 1) * group
    num_held = _count_by_group(refs != 0, group)
    symbols = -(-num_held * top // sizes)
    if pool.num_cached:
        symbols[(num_held == 0) & (_count_by_group(pool.written[in_view] != 0, group) > 0)] = NUM_LEVELS
    num_shared = _count_by_group(refs > 1, group) if pool.num_shared else np.zeros(len(sizes), np.int32)
    tints = -(-num_shared * (len(theme.TINTS) - 1) // np.maximum(num_held, 1))
    return symbols.astype(np.uint8), np.where(num_held > 0, TINT + tints, 0).astype(np.uint8)


def _most_frequent(symbols: NDArray[np.uint8], num_symbols: int, group: int) -> NDArray[np.uint8]:
    """Of each group; of equals the one that says more."""
    counts = [_count_by_group(symbols == symbol, group) for symbol in reversed(range(num_symbols))]
    return (num_symbols - 1 - np.argmax(counts, axis=0)).astype(np.uint8)


def _count_by_group(mask: NDArray[np.bool_], group: int) -> NDArray[np.int32]:
    """How many of each group are; the last group may be shorter. In two bytes, which takes half the time."""
    starts, small = np.arange(0, len(mask), group), np.uint16 if group < 1 << 16 else np.int32
    return np.add.reduceat(mask.view(np.uint8), starts, dtype=small).astype(np.int32)


def _inside(block_ids: Collection[int], in_view: slice) -> NDArray[np.intp]:
    """These blocks, sorted, counted from the first in view; only those in view."""
    found = np.fromiter(block_ids, np.intp, len(block_ids))
    return np.sort(found[(found >= in_view.start) & (found < in_view.stop)]) - in_view.start
