"""Recording a live engine from outside: a view's keeper that writes down what the view is shown.

What is written is what a viewer sees: a keyframe where it joined, then every batch in order. Batches that the engine
can still replay are never missing; after a longer loss a keyframe stands in their place.
"""

import time
from typing import TYPE_CHECKING

from kvscope.events.codec import encode_batch, encode_state
from kvscope.events.state import EngineState
from kvscope.events.types import Batch
from kvscope.transport.recording.bookmarks import Bookmark
from kvscope.transport.recording.format import RecordingError
from kvscope.transport.source import View

if TYPE_CHECKING:
    from kvscope.transport.recording.recorder import Recorder
    from kvscope.transport.recording.series import SeriesRecorder


class Tap:
    """States: idle -> recording -> ended (`end` was called, or `ended` says why it happened by itself) -> recording.

    A view calls `restart` and `append` with its lock held, which also guards everything here.
    """

    def __init__(self) -> None:
        self.ended: str | None = None
        self.num_batches = self.num_events = 0
        self.num_holes = self.num_missing_batches = 0
        self._recorder: Recorder | SeriesRecorder | None = None
        self._epoch = b""
        self._last_seq = 0
        self._began_at = self._last_at = 0.0  # monotonic seconds

    @property
    def seconds(self) -> float:
        """From the beginning of the recording to the last thing kept."""
        return self._last_at - self._began_at

    def begin(self, recorder: "Recorder | SeriesRecorder", view: View) -> None:
        """Keep the view's state, and every batch from here on; the recorder stays the caller's to close.

        Raises:
            RecordingError: there is no state yet.
        """
        with view.lock:
            if view.last_seq is None:
                raise RecordingError("the engine's state has not arrived yet")
            self.ended = None
            self.num_batches = self.num_events = self.num_holes = self.num_missing_batches = 0
            self._recorder, self._epoch = recorder, view.state.epoch
            self._began_at = time.monotonic()
            self._keep_state(recorder, view.state, view.last_seq)

    def end(self, view: View) -> None:
        """Keep nothing more. Idempotent."""
        with view.lock:
            self._recorder = None

    def bookmark(self, bookmark: Bookmark, view: View) -> None:
        """Into the recording, while there is one."""
        with view.lock:
            if self._recorder is not None:
                self._recorder.record_bookmark(bookmark, view.state.wall_time_ns + view.state.time_ns)

    def append(self, seq: int, batch: Batch, state: EngineState, payload: bytes | None) -> None:
        """One batch was applied."""
        if self._recorder is None:
            return
        self._recorder.record(seq, state.wall_time_ns + batch.time_ns, encode_batch(batch), batch, state)
        self.num_batches += 1
        self.num_events += len(batch.events)
        self._last_seq, self._last_at = seq, time.monotonic()

    def restart(self, state: EngineState, seq: int | None) -> None:
        """The view began again from a snapshot: what lies between was lost, or another life has begun."""
        if self._recorder is None or seq is None:
            return
        if state.epoch != self._epoch:
            # Numbers begin again with every life; a recording is of one.
            self._recorder, self.ended = None, "another engine has taken its place"
        elif seq > self._last_seq:
            self.num_missing_batches += seq - self._last_seq
            self.num_holes += 1
            self._keep_state(self._recorder, state, seq)

    def _keep_state(self, recorder: "Recorder | SeriesRecorder", state: EngineState, seq: int) -> None:
        recorder.record_keyframe(seq, state.wall_time_ns + state.time_ns, encode_state(state))
        self._last_seq, self._last_at = seq, time.monotonic()
