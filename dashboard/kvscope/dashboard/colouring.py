"""What a block's colour can say, and the character that says the same without a colour. Pure.

    OWNER   whose block it is                       the state, or the ref count when shared
    STATE   free, cached, reserved, partly, full    the state
    REFS    how many tables point at it             1 to 9, + for more
    AGE     steps since its last write              0 this step, 1 below 10, 2 below 100, 3 below 1,000, 4 more
    REUSE   how often the prefix cache gave it      0 to 9, + for more

A symbol is an index into the alphabet of its mode. From REFS on the symbols are in the order of what they say, so that
the symbol of a group of blocks is that of its largest numbers.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.style import Style

from kvscope.dashboard import theme
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.owners import SEVERAL
from kvscope.dashboard.pool_frame import PoolFrame

Numbers = NDArray[Any]


class ColourBy(Enum):
    """The value is what the legend calls it."""

    OWNER = "owner"
    STATE = "state"
    REFS = "ref count"
    AGE = "last write"
    REUSE = "cache hits"

    @property
    def following(self) -> "ColourBy":
        modes: list[ColourBy] = [*ColourBy]
        return modes[(modes.index(self) + 1) % len(modes)]

    @property
    def needs_traces(self) -> bool:
        """Whether it is told by what the viewer has seen, not by the engine's state alone."""
        return self in (ColourBy.AGE, ColourBy.REUSE)


class Mark(NamedTuple):
    """One block: the code of its colour, the number beside its slots, and the same in one character."""

    code: int
    number: str
    digit: str


_RAMP = (theme.FAINT, theme.SOFT, *theme.TINTS[1:])
_KINDS = (theme.FAINT, *(theme.owner_style(code) for code in (4, 5, 2, 1)))
# By mode: the styles of its codes, 0 being what says nothing; and the code of each of its symbols.
SCALES: dict[ColourBy, tuple[Style, ...]] = {
    ColourBy.OWNER: tuple(theme.owner_style(code) for code in range(SEVERAL + 1)),
    ColourBy.STATE: _KINDS,
    ColourBy.REFS: _RAMP,
    ColourBy.AGE: _RAMP,
    ColourBy.REUSE: _RAMP,
}
_CODES = {
    ColourBy.STATE: np.array([0, 1, 2, 3, 4], np.uint8),
    ColourBy.REFS: np.array([0, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4], np.uint8),
    ColourBy.AGE: np.array([0, 0, 0, 0, 1, 2, 3, 4], np.uint8),
    ColourBy.REUSE: np.array([0, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4], np.uint8),
}
AGE_LIMITS = (0, 9, 99, 999)  # in steps: the oldest write that is drawn as 0, 1, 2, 3


def alphabet(by: ColourBy, glyphs: Glyphs) -> str:
    """The symbols of a mode."""
    free, cached, reserved = glyphs.free, glyphs.cached, glyphs.reserved
    return {
        ColourBy.OWNER: free + cached + "23456789" + glyphs.many + reserved + glyphs.partly + glyphs.full,
        ColourBy.STATE: free + cached + reserved + glyphs.partly + glyphs.full,
        ColourBy.REFS: free + cached + "123456789" + glyphs.many,
        ColourBy.AGE: free + reserved + "?43210",
        ColourBy.REUSE: free + reserved + "0123456789" + glyphs.many,
    }[by]


def numbers_of(pool: PoolFrame, by: ColourBy, places: slice) -> list[Numbers]:
    """What a mode's symbols are made of: ref counts, written slots, and what was seen of the blocks written now."""
    refs, written, traces = pool.refs[places], pool.written[places], pool.traces
    if traces is None or not by.needs_traces:
        return [refs, written]
    seen = (traces.writes if by is ColourBy.AGE else traces.hits)[places]
    return [refs, written, seen * (written > 0)]


def symbols_of(pool: PoolFrame, by: ColourBy, numbers: Sequence[Numbers]) -> Numbers:
    """The symbol of each block, or of each group from the largest numbers in it."""
    refs, written, *seen = numbers
    if by is ColourBy.STATE:  # of a whole pool: in bytes
        kept, full = (written > 0).view(np.uint8), (written >= pool.block_size).view(np.uint8)
        return kept + (refs > 0) * (full + np.uint8(2))
    state = np.where(written >= pool.block_size, 2, np.where(written > 0, 1, 0))
    match by:
        case ColourBy.OWNER:
            held = np.where(refs > 1, np.minimum(refs, 10), 11 + state)
        case ColourBy.REFS:
            held = np.minimum(refs, 10) + 1
        case _:
            told = _age_symbols(pool, seen[0]) if by is ColourBy.AGE else 2 + np.minimum(seen[0], 10)
            return np.where(written > 0, told, refs > 0).astype(np.uint8)
    return np.where(refs > 0, held, written > 0).astype(np.uint8)


def _age_symbols(pool: PoolFrame, writes: Numbers) -> Numbers:
    """2: not seen written; 3 to 7: so long ago, the last for this step."""
    traces = pool.traces
    assert traces is not None
    return np.where(writes > 0, 7 - np.searchsorted(AGE_LIMITS, traces.now - writes), 2)


def codes_of(pool: PoolFrame, by: ColourBy, places: slice, symbols: Numbers | None = None) -> NDArray[np.uint8]:
    """The colours of these blocks; `symbols` are theirs, where they are known."""
    if by is ColourBy.OWNER:
        return pool.owners[places]
    return _CODES[by][symbols_of(pool, by, numbers_of(pool, by, places)) if symbols is None else symbols]


def codes_of_symbols(by: ColourBy, symbols: Numbers) -> NDArray[np.uint8]:
    """The colours of groups that have these symbols, in any mode but OWNER."""
    return _CODES[by][symbols]


def marks_of(pool: PoolFrame, by: ColourBy, blocks: range, glyphs: Glyphs) -> list[Mark]:
    """Of some blocks that follow each other, for the near zooms."""
    places = slice(blocks.start, blocks.stop)
    if not by.needs_traces:
        first = 1 if by is ColourBy.REFS else 2  # a ref count that is shown in one character
        refs = pool.refs[places].tolist()
        digits = ["" if count < first else str(count) if count < 10 else glyphs.many for count in refs]
        numbers = [str(count or "") for count in refs]
    else:
        symbols, letters = symbols_of(pool, by, numbers_of(pool, by, places)), alphabet(by, glyphs)
        digits = ["" if symbol < 2 else letters[symbol] for symbol in symbols.tolist()]
        exact = _ages(pool, places) if by is ColourBy.AGE else _hits(pool, places)
        numbers = [_short(number) if digit.isdecimal() or digit == glyphs.many else digit
                   for number, digit in zip(exact, digits, strict=True)]  # fmt: skip
    return list(map(Mark, codes_of(pool, by, places).tolist(), numbers, digits))


def _ages(pool: PoolFrame, places: slice) -> list[int]:
    assert pool.traces is not None
    return (pool.traces.now - pool.traces.writes[places]).tolist()  # type: ignore[no-any-return]


def _hits(pool: PoolFrame, places: slice) -> list[int]:
    assert pool.traces is not None
    return pool.traces.hits[places].tolist()  # type: ignore[no-any-return]


def _short(number: int) -> str:
    """In three characters at most: 999, 12k, 3M."""
    for unit in ("", "k", "M"):
        if number < (1000 if not unit else 100):
            return f"{number}{unit}"
        number //= 1000
    return "99M"
