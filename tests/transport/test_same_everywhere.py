"""One long run, four states at every sequence number: the engine's own, the mirror, a live view, and the replay."""

import hashlib

import pytest

from kvscope.events.codec import encode_state
from kvscope.events.state import EngineState
from kvscope.events.types import Batch
from kvscope.transport.recording import Recorder, ReplaySource, read_recording
from kvscope.transport.source import View

NUM_EVENTS, BURST = 100_000, 400


def digest(state: EngineState) -> bytes:
    return hashlib.sha256(encode_state(state)).digest()


class Digests:
    """A view's keeper: the digest of the state at every number."""

    def __init__(self) -> None:
        self.by_seq: dict[int, bytes] = {}

    def restart(self, state: EngineState, seq: int | None) -> None:
        if seq is not None:
            self.by_seq[seq] = digest(state)

    def append(self, seq: int, batch: Batch, state: EngineState, payload: bytes | None) -> None:
        self.by_seq[seq] = digest(state)


class MirrorRecorder:
    """Records, and looks at the publisher's mirror each time."""

    error = None

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.by_seq = recorder, {}
        self.publisher = None

    def record(self, seq: int, log_time_ns: int, payload: bytes, *_: object) -> None:
        self.by_seq[seq] = digest(self.publisher._mirror)
        self.recorder.record(seq, log_time_ns, payload)


@pytest.mark.slow
def test_hundred_thousand_events(lab, tmp_path) -> None:
    recorder = MirrorRecorder(Recorder(tmp_path / "long.mcap"))
    served = lab.serve()
    recorder.publisher = served.publisher
    served.publisher.set_recorder(recorder)
    live, engine, num_events = Digests(), {}, 0
    client = lab.attach(view=View(live))
    while num_events < NUM_EVENTS:
        for _ in range(BURST):
            batch = served.stream.next()
            engine[len(served.stream.batches) - 1] = digest(served.stream.state)
            num_events += len(batch.events)
            assert served.publish_batch(batch)
        lab.wait_live(client, served)
    recorder.recorder.close()
    assert client.view.findings == []
    assert recorder.by_seq == engine
    assert set(live.by_seq) >= set(range(BURST, len(engine)))
    assert all(engine[seq] == found for seq, found in live.by_seq.items())

    source = ReplaySource(read_recording(tmp_path / "long.mcap"))
    player = source.player
    source.start()
    player.pause()
    player.seek_start()
    replayed = {}
    while player.step_forward():
        replayed[source.view.last_seq] = digest(source.view.state)
    assert replayed == engine
    backwards = {}
    for _ in range(2_000):
        backwards[source.view.last_seq] = digest(source.view.state)
        player.step_back()
    assert all(engine[seq] == found for seq, found in backwards.items())
    source.close()
