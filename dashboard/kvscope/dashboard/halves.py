"""Two blocks in one cell, one above the other: half-block characters, told apart by colour alone. Pure.

    P0   ▀▀▀█▄··    a row of blocks, P0 to P6, above the next one, P7 to P13
    P14  █▀·····

Blocks run from left to right as at the nearer zooms; each pair of their rows is one line, so that the block under P0
is the first of the next row. The name is that of the upper row's first block. Each half has the colour that its block
has at DENSE, in every mode; a free block is the ground, two of them a dot, so that the end of the pool can be seen.
What only a character can say (a state under an owner's colour, a ref count in full) is for the nearer zooms.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.style import Style

from kvscope.dashboard import theme
from kvscope.dashboard.colouring import SCALES, ColourBy
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.owners import SEVERAL

# What a half is drawn in: the ground, a colour code (from 1 on), or the cursor's colour.
GROUND, CURSOR_INK = 0, SEVERAL + 2
_NUM_INKS = CURSOR_INK + 1
_NONE, _UPPER, _LOWER, _BOTH = range(4)  # symbols: where the text colour is
_TEXT_ONLY = (theme.STRONG.color, theme.SOFT.color)  # the terminal's own text colour is no colour for a ground


class Pairs(NamedTuple):
    """For each look, which is a pair of inks: the symbol, and its style."""

    symbols: NDArray[np.uint8]
    styles: dict[int, Style]


def _make_pairs(by: ColourBy) -> Pairs:
    inks = [None, *(Style(color=style.color) for style in SCALES[by])]
    inks += [None] * (CURSOR_INK - len(inks)) + [Style(color=theme.CURSOR.bgcolor)]
    drawn = [_draw(upper, lower) for upper in inks for lower in inks]
    return Pairs(np.array([symbol for symbol, _ in drawn], np.uint8), dict(enumerate(style for _, style in drawn)))


def _draw(upper: Style | None, lower: Style | None) -> tuple[int, Style]:
    """One colour for the text, the other for the ground under it; without a second one, the pane's ground."""
    if upper is None or lower is None:
        one = upper or lower
        return (_NONE, theme.FAINT) if one is None else (_LOWER if upper is None else _UPPER, one)
    if upper == lower:
        return _BOTH, upper
    if lower.color in _TEXT_ONLY:
        return _LOWER, Style(color=lower.color, bgcolor=upper.color)
    return _UPPER, Style(color=upper.color, bgcolor=lower.color)


PAIRS = {by: _make_pairs(by) for by in ColourBy}


def half_letters(glyphs: Glyphs) -> str:
    """The symbols: neither, the upper half, the lower half, both."""
    return glyphs.free + glyphs.halves


def pair_up(inks: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    """The look of each cell, from the inks of blocks, of which the first one is a line's first."""
    num_lines = -(-len(inks) // (2 * columns))
    padded = np.full(num_lines * 2 * columns, GROUND, np.uint8)
    padded[: len(inks)] = inks
    upper, lower = padded.reshape(num_lines, 2, columns).swapaxes(0, 1)
    num_missing = max(num_lines * 2 * columns - len(inks) - columns, 0)  # cells of the last line without an upper block
    looks = (upper * np.uint8(_NUM_INKS) + lower).ravel()
    return looks[: len(looks) - num_missing]
