"""The last minutes of a live engine, bounded in batches, bytes and time: what `space` lets the user walk through.

Batches are kept as they came over the wire, packed together, and decoded again where somebody walks.
"""

import threading
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import overload

from kvscope.events.codec import decode_batch, encode_batch
from kvscope.events.finder import Finder
from kvscope.events.fold_transposed import apply_watched
from kvscope.events.keyframe import Keyframe
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Batch
from kvscope.transport.healing import receivable
from kvscope.transport.refusals import Refusals
from kvscope.transport.timetravel.segments import (
    BYTES_PER_BATCH,
    BYTES_PER_WIRE_BYTE,
    HistoryColumns,
    Kept,
    PackedBatches,
    Segment,
)

MAX_BATCHES = 60_000
MAX_BYTES = 48 << 20
MAX_NS = 30 * 60 * 10**9
SEGMENT_EVENTS = 2048  # how far a walk folds at most, unless copies of the state are large
SEGMENTS_IN_BUDGET = 16  # a segment goes as a whole: none may be more than this part of all
_NUM_UNPACKED = 4  # segments at once: who looks for something, and who walks, are each in one or two


class _Decoding(Sequence[tuple[int, Batch]]):
    """Batches decoded at every look; what of them cannot be read is counted."""

    def __init__(self, seqs: Sequence[int], parts: Sequence[PackedBatches | list[Kept]]) -> None:
        self._seqs = seqs
        self._starts = list(accumulate(map(len, parts), initial=0))[:-1]
        self._unpacked = lru_cache(_NUM_UNPACKED)(lambda number: _unpack(parts[number]))
        self.refusals = Refusals()

    def __len__(self) -> int:
        return len(self._seqs)

    def kept(self, place: int) -> Kept:
        """The batch as it was kept, `place >= 0`."""
        number = bisect_right(self._starts, place) - 1
        return self._unpacked(number)[place - self._starts[number]]

    @overload
    def __getitem__(self, place: int) -> tuple[int, Batch]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[int, Batch]]: ...
    def __getitem__(self, place: int | slice) -> tuple[int, Batch] | list[tuple[int, Batch]]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        batch = self.kept(place)
        if isinstance(batch, bytes):
            batch, num_refused = decode_batch(batch, printable=True)
            self.refusals.add(place, num_refused)
        return self._seqs[place], batch


def _unpack(part: PackedBatches | list[Kept]) -> list[Kept]:
    return part.unpack() if isinstance(part, PackedBatches) else part


class FrozenTrack:
    """A stretch of a live engine's past: an `IndexedTrack`. Any thread may read."""

    missing = None

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.columns = HistoryColumns()
        self._keyframes = []
        for segment in segments:
            if self.columns.seqs:
                self.columns.checkpoints.append(len(self.columns.seqs))
                self._keyframes.append(segment.keyframe)
            self.columns.extend(segment.columns)
        self.batches = _Decoding(self.columns.seqs, [segment.freeze() for segment in segments])
        self.initial_state = segments[0].keyframe.restore() if segments else None
        self.initial_seq = segments[0].seq if segments else None

    @property
    def num_refused_events(self) -> int:
        """Of the batches that were looked at so far."""
        return self.batches.refusals.total

    def checkpoint(self, number: int) -> EngineState:
        """The state after `columns.checkpoints[number]` batches, for the caller to fold on."""
        return self._keyframes[number].restore()

    def fold(self, state: EngineState, position: int, finder: Finder) -> EngineState:
        """The state after the batch after `position` others, given the one before it. Raises FoldError."""
        return apply_watched(state, receivable(self.batches[position][1]), finder)

    def mentions(self, position: int, needles: Sequence[bytes]) -> bool:
        """Whether the bytes of the batch after `position` others hold one of these; a full state may hold anything."""
        kept = self.batches.kept(position)
        return not isinstance(kept, bytes) or any(needle in kept for needle in needles)


class History:
    """A `Keeper`. When there is too much, the oldest segment goes as a whole; the newest one always stays.

    The view calls `restart` and `append`; any thread may `freeze`.
    """

    def __init__(self, *, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES, max_ns: int = MAX_NS) -> None:
        self._max_batches, self._max_bytes, self._max_ns = max_batches, max_bytes, max_ns
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._num_batches = self._num_bytes = 0

    def restart(self, state: EngineState, seq: int | None) -> None:
        """A snapshot has replaced the state: part of the same past, unless another engine life has begun."""
        with self._lock:
            if not self._segments or self._segments[0].keyframe.epoch != state.epoch:
                self._segments, self._num_batches, self._num_bytes = [], 0, 0
            elif seq is not None:
                keyframe = Keyframe(state)
                events = (FullState(state=keyframe.restore()),)
                batch = Batch(
                    epoch=state.epoch, step=state.step, phase=state.phase, time_ns=state.time_ns, events=events
                )
                self._add(seq, batch, batch, 2 * keyframe.num_bytes)
            self._begin_segment(state, seq)
            self._trim()

    def append(self, seq: int, batch: Batch, state: EngineState, payload: bytes | None) -> None:
        """Keep a batch; `state` is the state after it, `payload` what came over the wire."""
        with self._lock:
            if not self._segments:
                self._begin_segment(state, seq)
                return
            kept = encode_batch(batch) if payload is None else payload
            self._add(seq, batch, kept, BYTES_PER_WIRE_BYTE * len(kept) + BYTES_PER_BATCH)
            if self._is_full(self._segments[-1]):
                self._begin_segment(state, seq)
            self._trim()

    def freeze(self) -> FrozenTrack:
        """The past as it is now; what comes later does not change it."""
        with self._lock:
            return FrozenTrack(self._segments)

    def __len__(self) -> int:
        return self._num_batches

    @property
    def num_bytes(self) -> int:
        """Roughly, in memory."""
        return self._num_bytes

    def _begin_segment(self, state: EngineState, seq: int | None) -> None:
        if self._segments:
            before = self._segments[-1]
            self._num_bytes -= before.total_bytes
            before.pack()
            self._num_bytes += before.total_bytes
        segment = Segment(Keyframe(state), seq)
        self._segments.append(segment)
        self._num_bytes += segment.keyframe.num_bytes

    def _add(self, seq: int, batch: Batch, kept: Kept, num_bytes: int) -> None:
        self._segments[-1].add(seq, batch, kept, num_bytes)
        self._num_batches += 1
        self._num_bytes += num_bytes

    def _is_full(self, segment: Segment) -> bool:
        """Copies of the state take no more room than what happened between them, but for long quiet times."""
        is_long = segment.num_events >= SEGMENT_EVENTS or segment.num_bytes * SEGMENTS_IN_BUDGET >= self._max_bytes
        is_worth_a_copy = segment.num_bytes >= segment.keyframe.num_bytes
        return (is_long and is_worth_a_copy) or len(segment) * SEGMENTS_IN_BUDGET >= self._max_batches

    def _trim(self) -> None:
        while len(self._segments) > 1 and self._has_too_much():
            oldest = self._segments.pop(0)
            self._num_batches -= len(oldest)
            self._num_bytes -= oldest.total_bytes

    def _has_too_much(self) -> bool:
        first, last = self._segments[0].columns.times_ns, self._segments[-1].columns.times_ns
        is_long_ago = bool(first and last) and last[-1] - first[-1] > self._max_ns
        return is_long_ago or self._num_batches > self._max_batches or self._num_bytes > self._max_bytes
