"""The pool in one picture: a number per block in numpy columns, and the totals counted from them. Pure."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvscope.dashboard.column_copies import ColumnCopies
from kvscope.dashboard.copies import DEVICE, HOST, BlockTable, RequestFrame
from kvscope.dashboard.owners import OwnerCodes, Owners
from kvscope.events.columns import Column, watch

MAX_RECENT = 8
_NOTHING = np.zeros(0, np.intp)


class TracesFrame(NamedTuple):
    """Copies of the columns of `Traces`; `now` is the stamp of this step, and `since_step` where they begin."""

    writes: NDArray[np.int32]
    hits: NDArray[np.int32]
    now: int
    since_step: int


class Changes(NamedTuple):
    """Which blocks were touched from one picture to the next, for the last few pictures of one pool."""

    pool: object  # the same for pictures of the same pool
    number: int  # of this picture
    recent: tuple[NDArray[np.intp], ...]  # the last are those of this one

    def then(self, touched: NDArray[np.intp]) -> "Changes":
        """Those of the next picture."""
        return Changes(self.pool, self.number + 1, (*self.recent[1 - MAX_RECENT :], touched))

    def since(self, earlier: "Changes") -> NDArray[np.intp] | None:
        """Where this picture may differ from an earlier one; None: anywhere."""
        missed = self.number - earlier.number
        if earlier.pool is not self.pool or not 0 <= missed <= len(self.recent):
            return None
        return np.concatenate((_NOTHING, *self.recent[len(self.recent) - missed :]))


class PoolFrame(NamedTuple):
    """Per block, by physical id: ref count, written slots, owner colour; and the totals of the whole pool."""

    block_size: int
    refs: NDArray[np.int32]
    written: NDArray[np.int32]
    owners: Owners
    num_held: int
    num_cached: int
    num_shared: int
    num_saved: int  # blocks that sharing spares: table entries minus held blocks
    num_written_slots: int  # of held blocks
    num_shared_slots: int  # of these, in blocks with a ref count above one
    letter: str = DEVICE  # which of the two pools it is
    traces: TracesFrame | None = None  # while somebody looks at them
    changes: Changes | None = None  # where that is known

    @property
    def num_blocks(self) -> int:
        return len(self.refs)

    def name(self, block_id: int) -> str:
        """`P3`; of a block in host memory `H3`."""
        return f"{self.letter}{block_id}"

    def count_shared(self, block_ids: Collection[int]) -> int:
        """How many of these blocks have a ref count above one."""
        if not self.num_shared:
            return 0
        blocks = (
            block_ids.blocks if isinstance(block_ids, BlockTable) else np.fromiter(block_ids, np.intp, len(block_ids))
        )
        return int(np.count_nonzero(self.refs[blocks] > 1))

    @property
    def num_reserved_slots(self) -> int:
        return self.num_held * self.block_size

    @property
    def num_wasted_slots(self) -> int:
        """Reserved, not written."""
        return self.num_reserved_slots - self.num_written_slots


class Totals(NamedTuple):
    """What is counted over blocks. Those of a pool are the sums of those of its parts."""

    num_held: int
    num_cached: int
    num_shared: int
    num_saved: int
    num_written_slots: int
    num_shared_slots: int


class PoolCopy:
    """A live pool's columns as they were at the last frame. For the next one only blocks that were touched are counted,
    unless it is another pool, or somebody else has looked at this one in between.
    """

    def __init__(self) -> None:
        self._flags = bytearray()
        self._copies = ColumnCopies(), ColumnCopies()
        self.refs = self.written = np.zeros(0, np.int32)
        self.changes: Changes | None = None
        self.totals = count_blocks(self.refs, self.written)

    def update(self, refs: Column, written: Column) -> None:
        """Take over what has changed, with the view's lock held. Arrays that somebody holds stay as they were."""
        before = self.refs, self.written
        is_known = refs.touched is written.touched is self._flags
        touched = refs.take_touched() if is_known else None
        if touched is not None and not len(touched):
            return
        self.refs, self.written = (
            copies.take(column.numbers, touched) for copies, column in zip(self._copies, (refs, written), strict=True)
        )
        if touched is not None and self.changes is not None:
            self._recount(touched, *before)
            self.changes = self.changes.then(touched)
        else:
            self.changes = Changes(object(), 0, ())
            self._flags = watch(refs, written)
            self.totals = count_blocks(self.refs, self.written)

    def _recount(self, touched: NDArray[np.intp], refs: NDArray[np.int32], written: NDArray[np.int32]) -> None:
        """`refs` and `written` are those of the last frame."""
        gone = count_blocks(refs[touched], written[touched])
        come = count_blocks(self.refs[touched], self.written[touched])
        self.totals = Totals(*(total - old + new for total, old, new in zip(self.totals, gone, come, strict=True)))


def count_blocks(refs: NDArray[np.int32], written: NDArray[np.int32]) -> Totals:
    """Each mask is one byte per block, so a count of it reads a quarter of what a sum of the column reads; what few
    blocks have, such as a ref count above one, is summed over those few.
    """
    held, shared = refs != 0, refs > 1
    cached = np.greater(written != 0, held)
    num_cached, num_shared = _count(cached), _count(shared)
    return Totals(
        num_held=_count(held),
        num_cached=num_cached,
        num_shared=num_shared,
        num_saved=int(refs[shared].sum()) - num_shared if num_shared else 0,
        num_written_slots=int(written.sum()) - (int(written[cached].sum()) if num_cached else 0),
        num_shared_slots=int(written[shared].sum()) if num_shared else 0,
    )


def build_pool(
    block_size: int,
    refs: ArrayLike,
    written: ArrayLike,
    requests: Sequence[RequestFrame],
    owners: OwnerCodes | None = None,
    *,
    totals: Totals | None = None,
    letter: str = DEVICE,
) -> PoolFrame:
    """A pool with its owner colours; `owners` remembers the last frame's, to save work. Columns are kept as given.

    `totals` are counted where nobody knows them.
    """
    refs, written = np.asarray(refs, np.int32), np.asarray(written, np.int32)
    found = (owners or OwnerCodes(letter)).look(len(refs), requests)
    return PoolFrame(block_size, refs, written, found, *(totals or count_blocks(refs, written)), letter=letter)


def build_host_pool(
    block_size: int, refs: NDArray[np.int32], requests: Sequence[RequestFrame], owners: OwnerCodes | None = None
) -> PoolFrame:
    """The pool that requests are swapped out to. Its blocks keep no column of written slots: tables tell."""
    if not len(refs):
        return EMPTY_HOST_POOL
    written = np.zeros(len(refs), np.int32)
    for sequence in (sequence for request in requests for sequence in request.sequences if sequence.host_table):
        starts = (sequence.num_released + np.arange(len(sequence.host_table))) * block_size
        written[list(sequence.host_table)] = np.clip(sequence.num_written - starts, 0, block_size)
    return build_pool(block_size, refs, written, requests, owners, letter=HOST)


def _count(values: NDArray[Any]) -> int:
    return int(np.count_nonzero(values))


EMPTY_POOL = build_pool(1, (), (), ())
EMPTY_HOST_POOL = EMPTY_POOL._replace(letter=HOST)
