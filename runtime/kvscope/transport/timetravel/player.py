"""Plays the past back: the same view as a live engine's, under a clock that can be stopped, sped up and rewound."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvscope.transport.source import Control, Status, View
from kvscope.transport.timetravel.clock import MAX_SPEED, MIN_SPEED, PlayClock
from kvscope.transport.timetravel.keyframes import Keyframes
from kvscope.transport.timetravel.signposts import Signposts
from kvscope.transport.timetravel.survey import Survey
from kvscope.transport.timetravel.track import IndexedTrack, Place, Track, TrackIndex
from kvscope.transport.timetravel.walker import UnfitBatchError, Walker
from kvscope.transport.timetravel.watch import Watch, admits, changes_block, lets_go_of, preempts

if TYPE_CHECKING:
    from kvscope.transport.recording.bookmarks import Bookmark  # recordings bring their player with them

MAX_WAIT_S = 0.1
FEW_EVENTS = 1_000  # so many are shown batch by batch; more of them at once
FRAME_EVENTS = 16_384  # so many are folded for one picture at most: playing is then slower than asked
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
        self._track, self._view, self._status, self._missing = track, view, status, track.missing or ""
        self._changed = threading.Condition(threading.RLock())
        self._is_playing = self._is_closing = False
        self._clock = PlayClock(self.index.times_ns)
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
    def ends(self) -> bool:
        """Whether there is an end: that of a recording. The past of an engine goes on into what it does now."""
        return self._status is not Status.HISTORY

    @property
    def speed(self) -> float:
        return self._clock.speed

    @speed.setter
    def speed(self, speed: float) -> None:
        with self._changed:
            self._clock.read(time.monotonic())  # what has passed was played at the old speed
            self._clock.speed = min(max(speed, MIN_SPEED), MAX_SPEED)
            self._changed.notify()

    def play(self) -> None:
        with self._changed:
            self._is_playing = self.position < self.length
            self._clock.set(self.position, time.monotonic())
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
        known = self._view.state.requests.get(request_id)
        if known is not None and not known.num_preemptions:
            return False  # there was none, however far one looks
        return self._look_back(lambda: preempts(request_id))

    def mark(self, places: Iterable[Place]) -> None:
        """The moments that count as notable because somebody says so, instead of those before. Never waits."""
        self._signposts.bookmarks = sorted({self._clamp(place) for place in places})

    @property
    def marks(self) -> list[Place]:
        return self._signposts.bookmarks

    def seek_start(self) -> None:
        self.seek(0)

    def seek_end(self) -> None:
        self.seek(self.length)

    def seek(self, position: int, event: int = 0) -> bool:
        """Show the state after `position` batches and `event` events of the next: nearest keyframe, then fold."""
        with self._changed:
            here = self.place
            self._go(Place(position, event))
            return self.place != here

    def seek_step(self, step: int) -> None:
        """To the end of an engine step."""
        self.seek(self.index.after_step(step))

    def seek_seq(self, seq: int) -> None:
        """To just after a batch."""
        self.seek(self.index.after_seq(seq))

    def seek_time(self, time_ns: int) -> None:
        """To everything that had happened so long after the engine's start."""
        self.seek(self.index.at_time(time_ns))

    @property
    def looked_back(self) -> float | None:
        """How much of what lies before has been looked through by the look back that is under way, from 0 to 1."""
        return self._signposts.looked_back

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self, *, at_end: bool = False, playing: bool = True) -> None:
        """Begin at the start, playing unless told; or at the end, paused."""
        self.rewind()
        if at_end:
            self.seek_end()
        self.stand()
        if not at_end and playing:
            self.play()

    def rewind(self) -> None:
        """Show the state before the first batch, whatever was on show. Before `stand` or `start`."""
        self._walker.rewind()
        self._show()

    def stand(self) -> None:
        """Begin where it is, paused."""
        self.survey.start()
        self._thread.start()

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

    def _look_back(self, make: Callable[[], Watch]) -> bool:
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
        with self.survey.held_back():
            try:
                self._walker.go(place)
            except UnfitBatchError as error:
                self._end_at(error)
        self._clock.set(self.position, time.monotonic())
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
        """What the audit has found up to this moment; it may come later than the moment itself.

        And how many events could not be read: of what was looked at so far, of all once the audit is over.
        """
        with self._changed:
            count = self.survey.num_findings_at(self.place)
            if count != len(self._view.findings):
                self._view.show_findings(self.survey.findings[:count])
        self._view.show_refusals(self._track.num_refused_events)

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
                due = min(self._clock.read(time.monotonic()), self.length)
                if due <= self.position:
                    self._changed.wait(min(self._clock.wait_s(self.position), MAX_WAIT_S))
                    continue
                self._play_to(due)
            time.sleep(BREATH_S)

    def _play_to(self, due: int) -> None:
        """Show the moment that is due, exactly; or, where too much would have to be folded for it, one on the way."""
        before = self.index.events_before
        if before[due] - before[self.position] <= FEW_EVENTS:
            while self._is_playing and self.position < due:
                self._advance()
            return
        start = self._walker.start_of(due)
        target = min(due, max(self.index.on_by_events(start, FRAME_EVENTS), self.position + 1))
        with self.survey.held_back():
            try:
                self._walker.go(Place(target))
            except UnfitBatchError as error:
                self._end_at(error)
        if target < due:
            self._clock.set(target, time.monotonic())
        self._is_playing = self._is_playing and self.position < self.length
        self._show()


class ReplaySource:
    """A `Source` over a track; a recording begins to play when started, the past of an engine stands at its end."""

    control: Control | None = None

    def __init__(self, track: Track, *, status: Status = Status.REPLAY, min_play_s: float = 0.0) -> None:
        """A recording of less than `min_play_s` stands at its start: played, it would be over before one looks."""
        self.view = View()
        self.bookmarks: Sequence[Bookmark] = getattr(track, "bookmarks", ())
        self._at_end = status is Status.HISTORY
        self.player = Player(track, self.view, status=status)
        times_ns = self.player.index.times_ns
        self.is_brief = bool(len(times_ns)) and times_ns[-1] - times_ns[0] < min_play_s * 1e9

    def start(self) -> None:
        self.player.start(at_end=self._at_end, playing=not self.is_brief)

    def close(self) -> None:
        """End the player's threads. Idempotent."""
        self.player.close()
