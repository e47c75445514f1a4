"""Moves a view from moment to moment along a track: nearest keyframe, then fold.

A far move is folded on a private state and shown at once, so nobody sees the places in between. Not thread-safe.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from kvscope.events.finder import Finder
from kvscope.events.fold import begin_batch
from kvscope.events.keyframe import Keyframe
from kvscope.events.state import EngineState
from kvscope.transport.source import MAX_LOG_ENTRIES, LogEntry, View, tell
from kvscope.transport.timetravel.keyframes import TRAIL_EVENTS, Keyframes
from kvscope.transport.timetravel.track import Place, Track, TrackIndex

# How much of what led to a moment its log tells: written anew it has the first, steps back may leave the second of it.
TAIL_EVENTS, MIN_TAIL_EVENTS = 400, 100


class UnfitBatchError(Exception):
    """A batch cannot be folded; `position` batches before it can."""

    def __init__(self, position: int, seq: int, reason: Exception) -> None:
        super().__init__(f"batch {seq} does not fit: {' '.join(str(reason).split())}")
        self.position = position


@contextmanager
def _without_collector() -> Iterator[None]:
    """What a walk makes by the ten thousand holds no cycles; looking for some would be half of a slow walk."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Walker:
    """`place` is what the view shows. The log is whole from batch `_log_start` to there."""

    def __init__(self, track: Track, index: TrackIndex, keyframes: Keyframes, view: View) -> None:
        self.place = Place(0)
        self.index, self.keyframes = index, keyframes
        self._track, self._view = track, view
        self._initial = Keyframe(track.initial_state if track.initial_state is not None else EngineState())
        self._log_start = 0
        self._is_whole = True  # False: a batch failed half-way, the state on show is no moment of the track

    def rewind(self) -> None:
        """Show the state before the first batch."""
        self._show(self._initial.restore(traced=True), Place(0), [], 0)

    def advance(self, num_events: int | None = None) -> None:
        """Apply the rest of the next batch, or so many of its events, to the state on show.

        Raises:
            UnfitBatchError: it cannot be folded; the state on show is then half of it, and `go` must replace it.
        """
        position, first = self.place
        count = self.index.num_events(position)
        stop = count if num_events is None else min(first + num_events, count)
        seq = self.index.seqs[position]
        try:
            self._view.advance(seq, self.index.batch(position), first, stop)
        except Exception as error:
            self._is_whole = False
            raise UnfitBatchError(position, seq, error) from None
        self.place = Place(position + 1) if stop == count else Place(position, stop)
        if self.place.event == 0:
            self.keyframes.offer(position + 1, self._view.state)

    def go(self, place: Place) -> None:
        """Show the moment `place`. Raises UnfitBatchError when a batch on the way there cannot be folded."""
        if place != self.place or not self._is_whole:
            with _without_collector():
                self._go(place)

    def _go(self, place: Place) -> None:
        log, log_start, told = self._log_to_keep(place)
        start, state = self._begin_at(told)
        entries: list[LogEntry] = []
        trail: list[tuple[int, Keyframe]] = []
        marks, finder = self._trail_marks(start, place.position), Finder(state)
        for position in range(start, place.position):
            if position in marks:
                trail.append((position, Keyframe(state)))
            state = self._tell(state, position, entries) if position >= told else self._fold(state, position, finder)
            self.keyframes.offer(position + 1, state)
        if place.event:
            state = self._tell(state, place.position, entries, place.event)
        self.keyframes.leave_trail(trail, place.position)
        self._show(state, place, [*log, *entries], log_start)

    def _fold(self, state: EngineState, position: int, finder: Finder) -> EngineState:
        try:
            return self.index.fold(state, position, finder)
        except Exception as error:
            raise UnfitBatchError(position, self.index.seqs[position], error) from None

    def _tell(self, state: EngineState, position: int, entries: list[LogEntry], stop: int | None = None) -> EngineState:
        """Fold one batch, or its events up to `stop`, and add their lines to `entries`."""
        seq = self.index.seqs[position]
        try:
            batch = self.index.batch(position)
            begin_batch(state, batch)
            state, told = tell(state, seq, batch, 0, stop)
        except Exception as error:
            raise UnfitBatchError(position, seq, error) from None
        entries += told
        return state

    def start_of(self, position: int) -> int:
        """Where a walk to `position` begins to fold: at a copy of the state before it, or at the state on show."""
        nearest = self.keyframes.nearest(position)
        here = self.place.position if self._is_whole and self.place.position <= position else 0
        return max(nearest[0] if nearest is not None else 0, self.keyframes.stored_before(position), here)

    def _begin_at(self, position: int) -> tuple[int, EngineState]:
        nearest = self.keyframes.nearest(position) or (0, self._initial)
        stored = self.keyframes.stored_before(position)
        here = self.place.position
        if self._is_whole and not self.place.event and max(nearest[0], stored) < here <= position:
            nearest = here, Keyframe(self._view.state)
        elif nearest[0] < stored and (state := self.keyframes.read_stored(stored)) is not None:
            state.trace()
            return stored, state
        return nearest[0], nearest[1].restore(traced=True)

    def _log_to_keep(self, place: Place) -> tuple[list[LogEntry], int, int]:
        """`(entries, where they begin, where they end)`: the part of the log that the new moment has in common."""
        enough = self.index.back_by_events(place.position, MIN_TAIL_EVENTS)
        end = min(place.position, self.place.position)
        log, log_start = self._view.log, self._log_start
        if len(log) == MAX_LOG_ENTRIES:  # older ones have left it, perhaps in the middle of a batch
            log_start = self.index.after_seq(log[0].seq)
        if log_start <= enough <= end:
            last_seq = self.index.seq_at(end)
            return [entry for entry in log if last_seq is not None and entry.seq <= last_seq], log_start, end
        tail_start = self.index.back_by_events(place.position, TAIL_EVENTS)
        return [], tail_start, tail_start

    def _trail_marks(self, start: int, end: int) -> set[int]:
        marks = {self.index.back_by_events(end, distance) for distance in TRAIL_EVENTS}
        return {position for position in marks if start < position < end}

    def _show(self, state: EngineState, place: Place, log: list[LogEntry], log_start: int) -> None:
        self.place, self._log_start, self._is_whole = place, log_start, True
        seq = self.index.seqs[place.position] if place.event else self.index.seq_at(place.position)
        self._view.show_moment(state, seq, log)
