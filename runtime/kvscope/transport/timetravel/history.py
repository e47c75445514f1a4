"""The last minutes of a live engine, bounded in batches and bytes: what `space` lets the user walk through."""

import threading
from dataclasses import dataclass, field

from kvscope.events.keyframe import Keyframe
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Batch
from kvscope.transport.timetravel.track import FrozenTrack

MAX_BATCHES = 60_000  # ten minutes at fifty steps a second
MAX_BYTES = 96 << 20
SEGMENT_EVENTS = 2048  # how far a walk folds at most, unless copies of the state are large
SEGMENTS_IN_BUDGET = 16  # a segment goes as a whole: none may be more than this part of all
BYTES_PER_WIRE_BYTE = 6  # of a decoded batch, roughly


@dataclass(slots=True)
class _Segment:
    """A copy of the state, and the batches that follow it; the next segment begins where they end."""

    keyframe: Keyframe
    seq: int | None  # of the batch before
    batches: list[tuple[int, Batch]] = field(default_factory=list)
    num_events: int = 0
    num_bytes: int = 0  # of the batches


class History:
    """A `Keeper`. When there is too much, the oldest segment goes as a whole; the newest one always stays.

    The view calls `restart` and `append`; any thread may `freeze`.
    """

    def __init__(self, *, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES) -> None:
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._num_batches = self._num_bytes = 0

    def restart(self, state: EngineState, seq: int | None) -> None:
        """A snapshot has replaced the state: part of the same past, unless another engine life has begun."""
        with self._lock:
            if not self._segments or self._segments[0].keyframe.epoch != state.epoch:
                self._segments, self._num_batches, self._num_bytes = [], 0, 0
            elif seq is not None:
                events = (FullState(state=Keyframe(state).restore()),)
                batch = Batch(
                    epoch=state.epoch, step=state.step, phase=state.phase, time_ns=state.time_ns, events=events
                )
                self._add(seq, batch, 2 * Keyframe(state).num_bytes)
            self._begin_segment(state, seq)

    def append(self, seq: int, batch: Batch, state: EngineState, num_bytes: int) -> None:
        """Keep a batch; `state` is the state after it, `num_bytes` its size on the wire."""
        with self._lock:
            if not self._segments:
                self._begin_segment(state, seq)
                return
            self._add(seq, batch, BYTES_PER_WIRE_BYTE * num_bytes)
            if self._is_full(self._segments[-1]):
                self._begin_segment(state, seq)
            self._trim()

    def freeze(self) -> FrozenTrack:
        """The past as it is now; what comes later does not change it."""
        with self._lock:
            batches: list[tuple[int, Batch]] = []
            keyframes = []
            for segment in self._segments:
                keyframes.append((len(batches), segment.keyframe))
                batches += segment.batches
            if not keyframes:
                return FrozenTrack([])
            first = self._segments[0]
        return FrozenTrack(batches, first.keyframe.restore(), first.seq, keyframes=keyframes)

    def __len__(self) -> int:
        return self._num_batches

    @property
    def num_bytes(self) -> int:
        """Roughly, in memory."""
        return self._num_bytes

    def _begin_segment(self, state: EngineState, seq: int | None) -> None:
        segment = _Segment(Keyframe(state), seq)
        self._segments.append(segment)
        self._num_bytes += segment.keyframe.num_bytes

    def _add(self, seq: int, batch: Batch, num_bytes: int) -> None:
        segment = self._segments[-1]
        segment.batches.append((seq, batch))
        segment.num_events += len(batch.events)
        segment.num_bytes += num_bytes
        self._num_batches += 1
        self._num_bytes += num_bytes

    def _is_full(self, segment: _Segment) -> bool:
        """Copies of the state take no more room than what happened between them, but for long quiet times."""
        is_long = segment.num_events >= SEGMENT_EVENTS or segment.num_bytes * SEGMENTS_IN_BUDGET >= self._max_bytes
        is_worth_a_copy = segment.num_bytes >= segment.keyframe.num_bytes
        return (is_long and is_worth_a_copy) or len(segment.batches) * SEGMENTS_IN_BUDGET >= self._max_batches

    def _trim(self) -> None:
        while len(self._segments) > 1 and (self._num_batches > self._max_batches or self._num_bytes > self._max_bytes):
            oldest = self._segments.pop(0)
            self._num_batches -= len(oldest.batches)
            self._num_bytes -= oldest.num_bytes + oldest.keyframe.num_bytes
