"""Looks once over a whole track in a thread of its own: usage, notable batches, keyframes, then the audit.

Everything grows from the start of the track while it runs; readers look at as much as there is.
"""

import contextlib
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator

from kvscope.events import types as ev
from kvscope.events.audit import Auditor, Finding
from kvscope.events.fold import apply_event, begin_batch
from kvscope.events.keyframe import Keyframe
from kvscope.events.notable import Notable, most_notable
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Event
from kvscope.transport.timetravel.keyframes import Keyframes
from kvscope.transport.timetravel.track import Columns, IndexedTrack, Place, Track, TrackIndex

WORK_S, REST_S = 0.004, 0.002  # so that the screen, in the same interpreter, stays quick


class Survey:
    """`held[i]` blocks are held after batch i, `kinds[i]` is its highest `Notable`, 0 for none."""

    def __init__(
        self, track: Track, index: TrackIndex, keyframes: Keyframes, on_finding: Callable[[], None] | None = None
    ) -> None:
        self.held, self.kinds = array("q"), bytearray()
        self.num_blocks = 0
        self.findings: list[Finding] = []
        self.num_audited = 0  # batches
        self._places: list[Place] = []  # of the findings: the moments from which on they hold
        self._known: set[tuple[int, str]] = set()
        self._track, self._index, self._keyframes = track, index, keyframes
        self._on_finding = on_finding
        self._closing, self._may_work = threading.Event(), threading.Event()
        self._may_work.set()
        self._thread = threading.Thread(target=self._run, name="kvscope-survey", daemon=True)
        self._rested_at = time.perf_counter()

    def start(self) -> None:
        self._thread.start()

    @property
    def is_working(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closing.set()
        self._may_work.set()
        if self._thread.ident is not None:
            self._thread.join()

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Rest, while somebody waits for what the caller does."""
        self._may_work.clear()
        try:
            yield
        finally:
            self._may_work.set()

    def take_over(self, columns: Columns) -> bool:
        """What a recording's index knows already; False when it knows nothing of the kind."""
        if len(columns.held) < len(self._index):
            return False
        self.held, self.kinds, self.num_blocks = columns.held, bytearray(columns.kinds), columns.num_blocks
        return True

    def run(self) -> None:
        """Both passes, in the caller's thread. A batch that cannot be folded ends them."""
        is_measured = isinstance(self._track, IndexedTrack) and self.take_over(self._track.columns)
        for look in (self._audit,) if is_measured else (self._measure, self._audit):
            try:
                look()
            except Exception:  # the player says what is wrong, when it gets there
                self._closing.set()
        if self._on_finding is not None:
            self._on_finding()  # everything has been looked at

    def num_findings_at(self, place: Place) -> int:
        """How many of the findings a moment has behind it, as far as the audit has come."""
        return bisect_right(self._places, place)

    def next_finding(self, place: Place) -> Place | None:
        index = bisect_right(self._places, place)
        return self._places[index] if index < len(self._places) else None

    def previous_finding(self, place: Place) -> Place | None:
        index = bisect_left(self._places, place)
        return self._places[index - 1] if index else None

    # --- the survey's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.run()

    def _initial(self) -> EngineState:
        initial = self._track.initial_state
        return Keyframe(initial if initial is not None else EngineState()).restore(traced=True)

    def _positions(self) -> Iterable[int]:
        """All batches, with a rest now and then; fewer when the survey is closed."""
        for position in range(len(self._index)):
            if not self._may_work.is_set() or time.perf_counter() - self._rested_at > WORK_S:
                if self._closing.wait(REST_S):
                    return
                self._may_work.wait()
                self._rested_at = time.perf_counter()
            yield position

    def _measure(self) -> None:
        state = self._initial()
        held = _count_held(state)
        for position in self._positions():
            batch = self._index.batch(position)
            begin_batch(state, batch)
            for event in batch.events:
                state = apply_event(state, event)
                held = held_after(held, state, event)
            self._keyframes.offer(position + 1, state)
            self.num_blocks = max(self.num_blocks, len(state.ref_counts))
            self.kinds.append(most_notable(batch))
            self.held.append(held)

    def _audit(self) -> None:
        auditor = Auditor(self._initial())
        for position in self._positions():
            batch = self._index.batch(position)
            begin_batch(auditor.state, batch)
            for number, event in enumerate(batch.events, 1):
                place = Place(position, number) if number < len(batch.events) else Place(position + 1)
                self._note(place, auditor.observe_event(event))
            self._note(Place(position + 1), auditor.finish_batch())
            self.num_audited = position + 1

    def _note(self, place: Place, findings: list[Finding]) -> None:
        """A fault that lasts is told once, at the moment it began."""
        fresh = [finding for finding in findings if finding[:2] not in self._known]
        if fresh:
            self._known.update(finding[:2] for finding in fresh)
            self.findings += fresh  # before their places: who looks up a place finds what is there
            self._places += [place] * len(fresh)
            self.kinds[place.position - (place.event == 0)] = Notable.FINDING
            if self._on_finding is not None:
                self._on_finding()


def held_after(held: int, state: EngineState, event: Event) -> int:
    """How many blocks are held after `event`, given how many were before, and the state after it.

    O(blocks of the event): counting the whole pool after every batch would dominate the survey.
    """
    refs = state.ref_counts
    match event:
        case ev.BlocksAllocated() | ev.BlocksReused() | ev.BlocksSwappedIn():
            return held + sum(refs[block_id] == 1 for block_id in event.block_ids)
        case ev.BlockCopied():
            return held + (refs[event.target_block] == 1) - (refs[event.source_block] == 0)
        case ev.BlocksReleased() | ev.BlocksOutOfWindow() | ev.BlocksSwappedOut():
            return held - sum(refs[block_id] == 0 for block_id in event.block_ids)
        case ev.EngineStarted() | FullState():
            return _count_held(state)
    return held


def _count_held(state: EngineState) -> int:
    return len(state.ref_counts) - state.ref_counts.count(0)
