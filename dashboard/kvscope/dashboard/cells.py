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
    numbers_of,
    symbols_of,
)
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.grid_layout import GridLayout, Light, Zoom
from kvscope.dashboard.groups import TINT, Groups
from kvscope.dashboard.halves import CURSOR_INK, GROUND, PAIRS, half_letters, pair_up
from kvscope.dashboard.owners import SEVERAL
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part

Cell = tuple[int, str, int]  # column, character, look
LIT, FRESH, CURSOR = 16, 32, 48  # looks: colour codes, from these numbers on lit or fresh; the cursor


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

    def unlike(self, before: "Cells | None") -> dict[int, list[Cell] | None]:
        """By row that looks otherwise than in an earlier picture: its cells that do. None: any of them may, where the
        earlier picture was not of these rows, or there is none.
        """
        if before is None or (before.rows, len(before.looks)) != (self.rows, len(self.looks)):
            return dict.fromkeys(self.rows)
        places = np.flatnonzero((self.looks != before.looks) | (self.symbols != before.symbols))
        rows, columns = np.divmod(places, self.columns)
        found: dict[int, list[Cell]] = {}
        values = (rows + self.rows.start, columns, self.symbols[places], self.looks[places])
        for row, column, symbol, look in zip(*(column.tolist() for column in values), strict=True):
            found.setdefault(row, []).append((column, self.alphabet[symbol], look))
        return {**found}

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


def make_cells(
    pool: PoolFrame, layout: GridLayout, rows: range, light: Light, glyphs: Glyphs, *, memory: Groups | None = None
) -> Cells:
    """The cells of these rows at a zoom with one character per cell: DENSE, HALVES or GROUPS.

    `memory` is of the last picture: what it has of groups that are still the same is not counted again.
    """
    start, stop = rows.start * layout.blocks_per_row, min(rows.stop * layout.blocks_per_row, pool.num_blocks)
    in_view = slice(start, stop)
    if layout.zoom is Zoom.GROUPS:
        letters = group_letters(light.by, glyphs)
        symbols, looks = _make_groups(pool, in_view, layout.group, light, memory or Groups())
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


def _make_blocks(pool: PoolFrame, in_view: slice, light: Light) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
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


def _make_groups(
    pool: PoolFrame, in_view: slice, group: int, light: Light, memory: Groups
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    symbols, codes = memory.look(pool, in_view, group, light.by)
    looks = codes * (not light.dim_others)
    lit = _inside(light.logical, in_view)[::-1]  # of several in a group the first one counts
    if len(lit):
        colours = pool.owners[in_view.start + lit] if light.by is ColourBy.OWNER else codes[lit // group]
        looks[lit // group] = colours + np.uint8(LIT)
    return symbols, looks


def _inside(block_ids: Collection[int], in_view: slice) -> NDArray[np.intp]:
    """These blocks, sorted, counted from the first in view; only those in view."""
    found = np.fromiter(block_ids, np.intp, len(block_ids))
    inside: NDArray[np.intp] = np.sort(found[(found >= in_view.start) & (found < in_view.stop)]) - in_view.start
    return inside
