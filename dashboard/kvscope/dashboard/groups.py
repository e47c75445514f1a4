"""The far zoom: what groups of blocks look like, counted again only where blocks were touched since the last time."""

import numpy as np
from numpy.typing import NDArray

from kvscope.dashboard import theme
from kvscope.dashboard.colouring import SCALES, ColourBy, codes_of_symbols, numbers_of, symbols_of
from kvscope.dashboard.glyphs import NUM_LEVELS
from kvscope.dashboard.pool_frame import Changes, PoolFrame

TINT = 64  # looks from here on: how many of a group's held blocks are shared
FEW = 4  # with more than one group in so many touched, all of them are counted again

_Columns = tuple[NDArray[np.uint8], NDArray[np.uint8]]


class Groups:
    """The symbols and colour codes of the last picture's groups."""

    def __init__(self) -> None:
        self._columns: _Columns = np.zeros(0, np.uint8), np.zeros(0, np.uint8)
        self._of: tuple[slice, int, ColourBy, int] | None = None
        self._changes: Changes | None = None

    def look(self, pool: PoolFrame, in_view: slice, group: int, by: ColourBy) -> _Columns:
        """Those of a picture; `in_view` begins with the first block of a group. The arrays are the caller's."""
        of, changes, self._changes = (in_view, group, by, pool.block_size), self._changes, pool.changes
        touched = None
        if of == self._of and changes is not None and pool.changes is not None and not by.needs_traces:
            touched = pool.changes.since(changes)
        self._of = of
        self._bring_up(pool, in_view, group, by, touched)
        symbols, codes = self._columns
        return symbols.copy(), codes.copy()

    def _bring_up(
        self, pool: PoolFrame, in_view: slice, group: int, by: ColourBy, touched: NDArray[np.intp] | None
    ) -> None:
        """After blocks were touched; None: any of them."""
        if touched is not None:
            symbols, codes = self._columns
            is_touched = np.zeros(len(symbols), np.bool_)
            is_touched[(touched[(touched >= in_view.start) & (touched < in_view.stop)] - in_view.start) // group] = True
            groups = np.flatnonzero(is_touched)
            if len(groups) * FEW <= len(symbols):
                refs = _of_groups(pool.refs[in_view], groups, group)
                is_by_refs = by is ColourBy.OWNER and not pool.num_cached
                written = refs if is_by_refs else _of_groups(pool.written[in_view], groups, group)
                symbols[groups], codes[groups] = _columns_of(
                    pool._replace(refs=refs, written=written), slice(0, len(refs)), group, by
                )
                return
        self._columns = _columns_of(pool, in_view, group, by)


def _of_groups(column: NDArray[np.int32], groups: NDArray[np.intp], group: int) -> NDArray[np.int32]:
    """The blocks of these groups, which are in order; the last group may be shorter."""
    num_whole = len(column) // group
    whole = column[: num_whole * group].reshape(num_whole, group)[groups[groups < num_whole]].ravel()
    return whole if not len(groups) or groups[-1] < num_whole else np.concatenate((whole, column[num_whole * group :]))


def _columns_of(pool: PoolFrame, places: slice, group: int, by: ColourBy) -> _Columns:
    """Of whole groups; the last one may be shorter.

    By owner how many blocks of a group are held; by state what most are; else what the largest number is.
    """
    if by is ColourBy.OWNER:
        return _held_and_shared(pool, places, group)
    numbers = numbers_of(pool, by, places)
    if by is ColourBy.STATE:
        symbols = _most_frequent(symbols_of(pool, by, numbers), len(SCALES[by]), group)
    else:
        starts = np.arange(0, len(numbers[0]), group)
        symbols = symbols_of(pool, by, [np.maximum.reduceat(column, starts) for column in numbers])
    return symbols.astype(np.uint8), codes_of_symbols(by, symbols)


def _held_and_shared(pool: PoolFrame, places: slice, group: int) -> _Columns:
    """How many blocks of a group are held, in a colour that says how many of these are shared."""
    refs, top = pool.refs[places], NUM_LEVELS - 1
    sizes = np.full(-(-len(refs) // group), group)
    sizes[-1:] = len(refs) - (len(sizes) - 1) * group
    num_held = _count_by_group(refs != 0, group)
    symbols = -(-num_held * top // sizes)
    if pool.num_cached:
        symbols[(num_held == 0) & (_count_by_group(pool.written[places] != 0, group) > 0)] = NUM_LEVELS
    tints = (num_held > 0) * np.uint8(TINT)
    if pool.num_shared:
        num_shared = _count_by_group(refs > 1, group)
        tints += (-(-num_shared * (len(theme.TINTS) - 1) // np.maximum(num_held, 1))).astype(np.uint8)
    return symbols.astype(np.uint8), tints


def _most_frequent(symbols: NDArray[np.uint8], num_symbols: int, group: int) -> NDArray[np.uint8]:
    """Of each group; of equals the one that says more."""
    counts = [_count_by_group(symbols == symbol, group) for symbol in reversed(range(num_symbols))]
    most: NDArray[np.uint8] = (num_symbols - 1 - np.argmax(counts, axis=0)).astype(np.uint8)
    return most


def _count_by_group(mask: NDArray[np.bool_], group: int) -> NDArray[np.int32]:
    """How many of each group are; the last group may be shorter. In two bytes, which takes half the time."""
    starts, small = np.arange(0, len(mask), group), np.uint16 if group < 1 << 16 else np.int32
    return np.add.reduceat(mask.view(np.uint8), starts, dtype=small).astype(np.int32)
