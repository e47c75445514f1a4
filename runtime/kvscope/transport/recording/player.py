"""Plays a recording back: the same view as a live engine's, under a clock that can be stopped, sped up and rewound."""

import copy
import threading
import time

from kvscope.events.state import EngineState
from kvscope.transport.healing import receivable
from kvscope.transport.recording.reader import Recording
from kvscope.transport.requests import one_line
from kvscope.transport.source import Control, Status, View

MIN_SPEED, MAX_SPEED = 0.1, 100.0
MAX_GAP_S = 1.0  # longer silences are cut: nobody wants to watch an idle engine
MAX_LAG_S = 0.25
BREATH_S = 0.0002  # lets a waiting pause() or seek() in, however fast the recording plays


class Player:
    """`position` of `length` batches have been applied. States: paused <-> playing; playing -> paused at the end.

    Methods may be called from any thread; each returns once the view shows the result.
    """

    def __init__(self, recording: Recording, view: View) -> None:
        self.length = len(recording.batches)
        self._recording, self._view = recording, view
        self._changed = threading.Condition(threading.RLock())
        self._position = 0
        self._is_playing = self._is_closing = False
        self._speed = 1.0
        self._applied_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kvscope-replay", daemon=True)

    @property
    def position(self) -> int:
        return self._position

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
            self._is_playing = self._position < self.length
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

    def step_forward(self) -> bool:
        """Pause, and apply the next batch; False at the end."""
        with self._changed:
            self._is_playing = False
            return self._apply_next()

    def step_back(self) -> bool:
        """Pause, and undo the last batch; False at the start."""
        with self._changed:
            self._is_playing = False
            if self._position == 0:
                return False
            self.seek(self._position - 1)
            return True

    def seek_start(self) -> None:
        self.seek(0)

    def seek(self, position: int) -> None:
        """Show the state after the first `position` batches. Folds from the start: O(position)."""
        with self._changed:
            self._rewind()
            while self._position < min(position, self.length) and self._apply_next():
                pass

    def start(self) -> None:
        self._rewind()
        self._thread.start()
        self.play()

    def close(self) -> None:
        with self._changed:
            self._is_closing, self._is_playing = True, False
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    # --- with `_changed` held, or before the thread runs ---------------------------------------------------------

    def _rewind(self) -> None:
        initial = self._recording.initial_state
        self._view.replace_state(
            copy.deepcopy(initial) if initial is not None else EngineState(), self._recording.initial_seq
        )
        with self._view.lock:
            self._view.log.clear()
            self._view.findings.clear()
        self._position = 0
        self._applied_at = time.monotonic()
        self._show()

    def _apply_next(self) -> bool:
        if self._position >= self.length:
            return False
        seq, batch = self._recording.batches[self._position]
        try:
            self._view.apply(seq, receivable(batch))
        except Exception as error:
            self.length = self._position
            self._is_playing = False
            self._show(f"batch {seq} does not fit: {one_line(error)}")
            return False
        self._position += 1
        self._is_playing = self._is_playing and self._position < self.length
        self._show()
        return True

    def _show(self, trouble: str = "") -> None:
        self._view.set_status(Status.REPLAY, trouble or self._recording.missing or "")

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
                self._apply_next()
                self._applied_at = due if now - due < MAX_LAG_S else now
            time.sleep(BREATH_S)

    def _gap_s(self) -> float:
        batches = self._recording.batches
        if self._position == 0:
            return 0.0
        gap_ns = batches[self._position][1].time_ns - batches[self._position - 1][1].time_ns
        return min(max(gap_ns / 1e9, 0.0), MAX_GAP_S)


class ReplaySource:
    """A `Source` over a recording; it begins to play when started."""

    control: Control | None = None

    def __init__(self, recording: Recording) -> None:
        self.view = View()
        with self.view.lock:
            self.view.num_refused_events = recording.num_refused_events
        self.player = Player(recording, self.view)

    def start(self) -> None:
        self.player.start()

    def close(self) -> None:
        """End the player's thread. Idempotent."""
        self.player.close()
