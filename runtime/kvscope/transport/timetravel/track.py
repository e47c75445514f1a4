"""What one can walk along: batches in order and the state before them, with an index of where things are."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

from kvscope.events.finder import Finder
from kvscope.events.fold_transposed import apply_watched
from kvscope.events.state import EngineState
from kvscope.events.types import Batch
from kvscope.transport.healing import receivable


class Track(Protocol):
    """A recording, or the recent past of a live engine. `initial_state` None: from the engine's start."""

    @property
    def batches(self) -> Sequence[tuple[int, Batch]]: ...
    @property
    def initial_state(self) -> EngineState | None: ...
    @property
    def initial_seq(self) -> int | None: ...
    @property
    def num_refused_events(self) -> int: ...
    @property
    def missing(self) -> str | None: ...


class Columns(Protocol):
    """What is known of a track without decoding a batch; `held` and `kinds` may be empty."""

    seqs: "array[int]"
    steps: "array[int]"
    times_ns: "array[int]"
    num_events: "array[int]"
    held: "array[int]"
    kinds: "array[int]"
    checkpoints: "array[int]"
    num_blocks: int


@runtime_checkable
class IndexedTrack(Track, Protocol):
    """A track whose batches are decoded when somebody looks.

    `checkpoint(k)` is the state after `columns.checkpoints[k]` batches; `fold` applies the batch after `position`
    others to a state, and returns it. `mentions` is whether the bytes of that batch hold one of these, or may do so.
    """

    @property
    def columns(self) -> Columns: ...
    def checkpoint(self, number: int) -> EngineState: ...
    def fold(self, state: EngineState, position: int, finder: Finder) -> EngineState: ...
    def mentions(self, position: int, needles: Sequence[bytes]) -> bool: ...


class Place(NamedTuple):
    """A moment: `position` whole batches have been applied, and `event` events of the next one."""

    position: int
    event: int = 0


class TrackIndex:
    """Numbers of every batch in arrays, so that a place is found without a walk. `n` batches have places 0 to n."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._indexed = track if isinstance(track, IndexedTrack) else None
        if isinstance(track, IndexedTrack):
            columns = track.columns
            self.seqs, self.steps, self.times_ns = columns.seqs, columns.steps, columns.times_ns
            self.events_before = array("q", accumulate(columns.num_events, initial=0))
            return
        batches = track.batches
        self.seqs = array("q", (seq for seq, _ in batches))
        self.steps = array("q", (batch.step for _, batch in batches))
        self.times_ns = array("q", (batch.time_ns for _, batch in batches))
        # events before batch i; its last entry is the number of all events
        self.events_before = array("q", accumulate((len(receivable(batch).events) for _, batch in batches), initial=0))

    def __len__(self) -> int:
        return len(self.seqs)

    def batch(self, position: int) -> Batch:
        """The batch after place `position`, as a receiver folds it."""
        return receivable(self._track.batches[position][1])

    def fold(self, state: EngineState, position: int, finder: Finder) -> EngineState:
        """The state after that batch, given the one before it, which is changed. Raises FoldError.

        The finder is the state's, of which it hears nothing but this; a batch is quicker with that of the batch before.
        """
        if self._indexed is not None:
            return self._indexed.fold(state, position, finder)
        return apply_watched(state, self.batch(position), finder)

    def mentions(self, position: int, needles: Sequence[bytes]) -> bool:
        """Whether that batch may say one of these; False is certain."""
        return self._indexed is None or self._indexed.mentions(position, needles)

    def num_events(self, position: int) -> int:
        """Of the batch after place `position`."""
        return self.events_before[position + 1] - self.events_before[position]

    @cached_property
    def epoch(self) -> bytes:
        """Whose past it is."""
        initial = self._track.initial_state
        if initial is not None and initial.epoch:
            return initial.epoch
        return self._track.batches[0][1].epoch if len(self) else b""

    @cached_property
    def _before(self) -> EngineState:
        initial = self._track.initial_state
        return initial if initial is not None else EngineState()

    def seq_at(self, position: int) -> int | None:
        """The number of the last of `position` batches."""
        return self.seqs[position - 1] if position else self._track.initial_seq

    def step_at(self, position: int) -> int:
        """The engine step of the last of `position` batches; before the first, of the state that precedes it."""
        return self.steps[position - 1] if position else self._before.step

    def time_ns_at(self, position: int) -> int:
        """When that was, since the engine's start."""
        return self.times_ns[position - 1] if position else self._before.time_ns

    def after_seq(self, seq: int) -> int:
        """The position after batch number `seq`."""
        return bisect_right(self.seqs, seq)

    def after_step(self, step: int) -> int:
        """The position after the last batch of engine step `step`."""
        return bisect_right(self.steps, step)

    def before_step(self, step: int) -> int:
        """The position before the first batch of engine step `step`."""
        return bisect_left(self.steps, step)

    def at_time(self, time_ns: int) -> int:
        """The position after everything up to a time since the engine's start."""
        return bisect_right(self.times_ns, time_ns)

    def back_by_events(self, position: int, num_events: int) -> int:
        """The last position with at least `num_events` events between it and `position`, else 0."""
        return max(bisect_right(self.events_before, self.events_before[position] - num_events) - 1, 0)

    def on_by_events(self, position: int, num_events: int) -> int:
        """The last position with at most `num_events` events between `position` and it."""
        return bisect_right(self.events_before, self.events_before[position] + num_events) - 1
