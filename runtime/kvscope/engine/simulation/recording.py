"""A sink that writes a recording and waits for the disk: unlike a live engine, a simulation has time."""

import time

from kvscope.events.codec import encode_batch
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.events.types import Batch, EngineStarted
from kvscope.transport.recording import Recorder, SeriesRecorder

MAX_QUEUED_BYTES = 32 << 20  # below what the recorder gives up at
POLL_S = 0.005


class RecordingSink:
    """Batches are numbered from 0, as a publisher would."""

    needs_full_state = False

    def __init__(self, recorder: Recorder | SeriesRecorder) -> None:
        self._recorder = recorder
        self._state = EngineState()  # for the recording's index and checkpoints
        self._seq = 0
        self._wall_time_ns = 0

    def publish(self, batch: Batch) -> bool:
        while self._recorder.num_queued_bytes > MAX_QUEUED_BYTES and self._recorder.error is None:
            time.sleep(POLL_S)
        if self._seq == 0:
            (started,) = batch.events
            assert isinstance(started, EngineStarted)
            self._wall_time_ns = started.wall_time_ns
        self._state = apply_batch(self._state, batch)
        payload = encode_batch(batch)
        self._recorder.record(self._seq, self._wall_time_ns + batch.time_ns, payload, batch, self._state)
        self._seq += 1
        return True

    def take_dropped(self) -> int:
        return 0
