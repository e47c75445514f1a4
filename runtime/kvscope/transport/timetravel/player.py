"""Plays the past back: the same view as a live engine's, under a clock that can be stopped, sped up and rewound."""

import threading
import time
from collections.abc import Callable

from kvscope.transport.source import Control, Status, View
from kvscope.transport.timetravel.keyframes import Keyframes
from kvscope.transport.timetravel.signposts import Signposts
from kvscope.transport.timetravel.survey import Survey
from kvscope.transport.timetravel.track import IndexedTrack, Place, Track, TrackIndex
from kvscope.transport.timetravel.walker import UnfitBatchError, Walker
from kvscope.transport.timetravel.watch import Matches, admits, changes_block, lets_go_of, preempts

MIN_SPEED, MAX_SPEED = 0.1, 100.0
MAX_GAP_S = 1.0  # longer silences are cut: nobody wants to watch an idle engine
MAX_LAG_S = 0.25
BREATH_S = 0.0002  # lets a waiting pause() or seek() in, however fast the recording plays


class Player:
    """`position` of `length` batches have been applied. States: paused <-> playing; playing -> paused at the end.

    Methods may be called from any thread; each returns once the view shows the result. Those that move to another
    moment pause, and return False where there is nothing to move to.
    """

    def __init__(self, track: Track, view: View, *, status: Status = Status.REPLAY) -> None:
        self.index = TrackIndex(track)
        self.length = len(self.index)
        stored = track if isinstance(track, IndexedTrack) else None
        keyframes = Keyframes(self.index.events_before, stored=stored)
        self.survey = Survey(track, self.index, keyframes, self._show_findings)
        self._signposts = Signposts(self.index, self.survey)
        self._walker = Walker(track, self.index, keyframes, view)
        self._view, self._status, self._missing = view, status, track.missing or ""
        self._changed = threading.Condition(threading.RLock())
        self._is_playing = self._is_closing = False
        self._speed = 1.0
        self._applied_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kvscope-replay", daemon=True)

    @property
    def place(self) -> Place:
        return self._walker.place

    @property
    def position(self) -> int:
        return self._walker.place.position

    @property
    def playing(self) -> bool:
        return self._is_playing

    @property
    def speed(self) -> float:
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        with self._changed:
            self._speed = min(max(speed, MIN_SPEED), MAX_SPEED)
            self._changed.notify()

    def play(self) -> None:
        with self._changed:
            self._is_playing = self.position < self.length
            self._applied_at = time.monotonic()
            self._changed.notify()

    def pause(self) -> None:
        with self._changed:
            self._is_playing = False

    def toggle(self) -> None:
        if self._is_playing:
            self.pause()
        else:
            self.play()

    # --- moving --------------------------------------------------------------------------------------------------

    def step_forward(self) -> bool:
        """Apply the next batch, or the rest of it."""
        with self._changed:
            self._is_playing = False
            return self._advance()

    def step_back(self) -> bool:
        """Undo the last batch, or the begun one."""
        return self._move(self._signposts.batch_back)

    def event_forward(self) -> bool:
        """Apply one event."""
        with self._changed:
            self._is_playing = False
            return self._advance(1)

    def event_back(self) -> bool:
        """Undo one event."""
        return self._move(self._signposts.event_back)

    def engine_step_forward(self) -> bool:
        """To the end of the engine step that comes next."""
        return self._move(self._signposts.engine_step)

    def engine_step_back(self) -> bool:
        """To the start of the engine step that was applied last."""
        return self._move(self._signposts.engine_step_back)

    def next_notable(self) -> bool:
        """To just after the next event that stands out."""
        return self._move(self._signposts.notable)

    def previous_notable(self) -> bool:
        """To just after the last such event before this moment."""
        return self._move(self._signposts.notable_back)

    def back_to_block_change(self, block_id: int) -> bool:
        """To just after the last event before this one that changed the block."""
        return self._look_back(lambda: changes_block(block_id, self._view.state))

    def back_to_block_release(self, block_id: int) -> bool:
        """To just after somebody let go of the block."""
        return self._look_back(lambda: lets_go_of(block_id))

    def back_to_admission(self, request_id: str) -> bool:
        return self._look_back(lambda: admits(request_id))

    def back_to_preemption(self, request_id: str) -> bool:
        return self._look_back(lambda: preempts(request_id))

    def seek_start(self) -> None:
        self.seek(0)

    def seek_end(self) -> None:
        self.seek(self.length)

    def seek(self, position: int, event: int = 0) -> None:
        """Show the state after `position` batches and `event` events of the next: nearest keyframe, then fold."""
        with self._changed:
            self._go(Place(position, event))

    def seek_step(self, step: int) -> None:
        """To the end of an engine step."""
        self.seek(self.index.after_step(step))

    def seek_time(self, time_ns: int) -> None:
        """To everything that had happened so long after the engine's start."""
        self.seek(self.index.at_time(time_ns))

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self, *, at_end: bool = False) -> None:
        """Begin at the start, playing; or at the end, paused."""
        self._walker.rewind()
        self._show()
        if at_end:
            self.seek_end()
        self.survey.start()
        self._thread.start()
        if not at_end:
            self.play()

    def close(self) -> None:
        """End the threads. Idempotent."""
        with self._changed:
            self._is_closing, self._is_playing = True, False
            self._changed.notify()
        self.survey.close()
        if self._thread.ident is not None:
            self._thread.join()

    # --- with `_changed` held, or before the thread runs ---------------------------------------------------------

    def _move(self, find: Callable[[Place], Place | None]) -> bool:
        with self._changed:
            self._is_playing = False
            here = self.place
            place = find(here)
            if place is not None:
                self._go(place)
            return self.place != here

    def _look_back(self, make: Callable[[], Matches]) -> bool:
        """Past the event on show, then to the last one that matches; what matches may depend on the state there."""
        with self._changed:
            self._is_playing = False
            here = self.place
            before = self._signposts.event_back(here)
            if before is None:
                return False
            self._go(before)
            found = self._signposts.last_event(before, make())
            self._go(here if found is None else found)
            return found is not None

    def _go(self, place: Place) -> None:
        place = self._clamp(place)
        try:
            self._walker.go(place)
        except UnfitBatchError as error:
            self._end_at(error)
        self._applied_at = time.monotonic()
        self._show()

    def _clamp(self, place: Place) -> Place:
        position = min(max(place.position, 0), self.length)
        if position != place.position or position == self.length:
            return Place(position)
        num_events = self.index.num_events(position)
        return place if 0 <= place.event < num_events else Place(position + (place.event > 0))

    def _advance(self, num_events: int | None = None) -> bool:
        if self.position >= self.length:
            return False
        try:
            self._walker.advance(num_events)
        except UnfitBatchError as error:
            self._end_at(error)
            self._show()
            return False
        self._is_playing = self._is_playing and self.position < self.length
        self._show()
        return True

    def _end_at(self, error: UnfitBatchError) -> None:
        """What cannot be folded ends the recording; the moment before it is shown whole."""
        self.length, self._missing, self._is_playing = error.position, str(error), False
        self._walker.go(Place(error.position))

    def _show_findings(self) -> None:
        """What the audit has found up to this moment; it may come later than the moment itself."""
        with self._changed:
            count = self.survey.num_findings_at(self.place)
            if count != len(self._view.findings):
                self._view.show_findings(self.survey.findings[:count])

    def _show(self) -> None:
        self._show_findings()
        self._view.set_status(self._status, self._missing)

    # --- the player's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closing:
                    return
                if not self._is_playing:
                    self._changed.wait()
                    continue
                due = self._applied_at + self._gap_s() / self._speed
                now = time.monotonic()
                if due > now:
                    self._changed.wait(due - now)
                    continue
                # Counting from when it was due keeps the pace; a long delay is not made up for.
                self._advance()
                self._applied_at = due if now - due < MAX_LAG_S else now
            time.sleep(BREATH_S)

    def _gap_s(self) -> float:
        if self.position == 0:
            return 0.0
        times = self.index.times_ns
        return min(max((times[self.position] - times[self.position - 1]) / 1e9, 0.0), MAX_GAP_S)


class ReplaySource:
    """A `Source` over a track; a recording begins to play when started, the past of an engine stands at its end."""

    control: Control | None = None

    def __init__(self, track: Track, *, status: Status = Status.REPLAY) -> None:
        self.view = View()
        with self.view.lock:
            self.view.num_refused_events = track.num_refused_events
        self._at_end = status is Status.HISTORY
        self.player = Player(track, self.view, status=status)

    def start(self) -> None:
        self.player.start(at_end=self._at_end)

    def close(self) -> None:
        """End the player's threads. Idempotent."""
        self.player.close()
