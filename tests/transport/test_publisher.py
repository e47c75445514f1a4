"""The publisher never makes the engine wait, and never hides a hole."""

import copy
import os
import socket
import stat
from pathlib import Path

import msgpack
import msgspec
import pytest
import zmq

from kvscope.events import types as ev
from kvscope.events.codec import MAX_BATCH_BYTES, decode_batch, decode_state
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Batch
from kvscope.transport.endpoints import EndpointError
from kvscope.transport.publisher import NullPublisher, Publisher, SnapshotUnavailable
from kvscope.transport.wire import EVENTS_TOPIC, HEARTBEAT_TOPIC, decode_heartbeat, decode_seq


class Subscriber:
    """A raw SUB socket; `events()` reads until a number has come."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.subscribe(EVENTS_TOPIC)
        self.socket.connect(address)

    def receive(self, topic: bytes) -> tuple[int, bytes]:
        while True:
            frames = self.socket.recv_multipart()
            if frames[0] == topic:
                assert len(frames) == 3
                return decode_seq(frames[1]), frames[2]

    def wait_until_subscribed(self, publisher: Publisher) -> None:
        self.receive(HEARTBEAT_TOPIC)

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_frames(lab) -> None:
    served = lab.serve(heartbeat_interval_s=0.01)
    served.publish()
    subscriber = Subscriber(lab.endpoints.events)
    subscriber.wait_until_subscribed(served.publisher)
    served.publish(30)
    for expected in range(1, 31):
        seq, payload = subscriber.receive(EVENTS_TOPIC)
        assert seq == expected
        assert decode_batch(payload).batch == served.stream.batches[expected]
    subscriber.close()


def test_heartbeats_while_idle(lab) -> None:
    served = lab.serve(heartbeat_interval_s=0.01)
    served.publish(4)
    subscriber = Subscriber(lab.endpoints.events)
    beats = [subscriber.receive(HEARTBEAT_TOPIC) for _ in range(3)]
    seqs = [seq for seq, _ in beats]
    assert seqs == list(range(seqs[0], seqs[0] + 3))
    decoded = [decode_heartbeat(payload) for _, payload in beats]
    assert {(beat.epoch, beat.last_seq, beat.step) for beat in decoded} == {(served.stream.epoch, 3, 1)}
    assert decoded[0].time_ns < decoded[1].time_ns
    subscriber.close()


def fill(lab, served) -> None:
    """One batch in the thread's hands, one in the queue of one; the mirror's lock must be held."""
    assert served.publish_batch(served.stream.next())
    lab.wait_until(lambda: not served.publisher._queue)
    assert served.publish_batch(served.stream.next())


def test_publish_returns_when_the_queue_is_full(lab) -> None:
    """The lock keeps the publisher thread from taking anything; if publish waited (vLLM 53859), this would not end."""
    served = lab.serve(max_queue=1)
    served.publish()
    served.drain()
    with served.publisher._mirror_lock:
        fill(lab, served)
        assert not any(served.publish_batch(served.stream.next()) for _ in range(50))
        assert not served.publisher.needs_full_state  # there is no room for one
    lab.wait_until(lambda: served.publisher.needs_full_state)
    assert not served.publish_batch(served.stream.next()), "nothing but a full state may follow a hole"
    assert served.publisher.take_dropped() == 51
    assert served.publisher.take_dropped() == 0


def test_a_drop_is_healed_by_a_full_state(lab) -> None:
    served = lab.serve(max_queue=1)
    client = lab.attach()
    served.publish()
    lab.wait_live(client)
    with served.publisher._mirror_lock:
        fill(lab, served)
        for _ in range(20):
            assert not served.publish_batch(served.stream.next())
    served.drain()
    served.publish()
    assert not served.publisher.needs_full_state
    served.drain()
    lab.wait_live(client, served)
    assert client.view.state == served.stream.state
    assert any(isinstance(entry.event, ev.BatchesDropped) for entry in client.view.log)
    assert client.view.findings == []
    assert decode_state(served.publisher.snapshot().state) == served.stream.state


def test_a_dropped_announcement_is_announced_again(lab) -> None:
    served = lab.serve(max_queue=1)
    served.publish()
    served.drain()
    with served.publisher._mirror_lock:
        fill(lab, served)
        assert not served.publish_batch(served.stream.next())
        assert served.publish_batch(served.stream.full_state(served.publisher.take_dropped())) is False
        assert served.publisher.take_dropped() == 2
    lab.wait_until(lambda: served.publisher.needs_full_state)


def test_snapshot_equals_the_fold_up_to_its_number(lab) -> None:
    served = lab.serve()
    with pytest.raises(SnapshotUnavailable):
        served.publisher.snapshot()
    seen = set()
    for number in range(100):
        served.publish(3)
        if number % 5 == 0:
            served.drain()  # so that the snapshots are not all of one moment
        if served.publisher.last_seq is None:
            continue
        snapshot = served.publisher.snapshot()
        state = EngineState()
        for batch in served.stream.batches[: snapshot.seq + 1]:
            state = apply_batch(state, copy.deepcopy(batch))
        assert decode_state(snapshot.state) == state
        seen.add(snapshot.seq)
    assert len(seen) > 10


def test_a_mirror_that_cannot_follow_asks_for_a_full_state(lab) -> None:
    served = lab.serve()
    served.publish(5)
    bad = ev.SlotsWritten(sequence_id="nobody.0", start=0, stop=1)
    assert served.publish_batch(msgspec.structs.replace(served.stream.batches[-1], events=(bad,)))
    lab.wait_until(lambda: served.publisher.needs_full_state)
    with pytest.raises(SnapshotUnavailable, match="full state"):
        served.publisher.snapshot()
    served.publish()
    served.drain()
    assert decode_state(served.publisher.snapshot().state) == served.stream.state
    assert not served.publisher.needs_full_state


def test_a_batch_that_cannot_be_encoded_does_not_end_the_thread(lab) -> None:
    served = lab.serve()
    served.publish(3)
    unencodable = msgspec.structs.replace(served.stream.batches[-1], events=(ev.EngineStopped(reason="\udcff"),))
    served.publisher.publish(unencodable)
    lab.wait_until(lambda: served.publisher.needs_full_state)
    served.publish()
    served.drain()
    assert served.publisher.last_seq == 3
    assert decode_state(served.publisher.snapshot().state) == served.stream.state


def test_the_mirror_does_not_change_the_engines_state(lab) -> None:
    served = lab.serve()
    served.publish(9)
    state = copy.deepcopy(served.stream.state)
    handed_over = FullState(state=state)
    served.publish_batch(msgspec.structs.replace(served.stream.batches[-1], events=(handed_over,)))
    served.publish(20)
    served.drain()
    assert state != served.stream.state
    assert handed_over.state == state


def test_a_batch_larger_than_a_frame_reaches_clients_as_a_snapshot(lab) -> None:
    served = lab.serve()
    client = lab.attach()
    served.publish(5)
    lab.wait_live(client, served)
    huge = ev.TokensGenerated(sequence_id="r1.0", token_ids=[], pieces=[], text="x" * (MAX_BATCH_BYTES + 1))
    batch = msgspec.structs.replace(served.stream.batches[-1], events=(huge,))
    served.stream.auditor.observe(batch)
    served.publish_batch(batch)
    served.publish(2)
    lab.wait_live(client, served)
    assert client.view.state == served.stream.state
    assert client.view.num_gaps == 1


def test_close_sends_what_is_queued(lab) -> None:
    """A queue that is not empty is no reason not to end (vLLM 52857)."""
    served = lab.serve(heartbeat_interval_s=0.01)
    served.publish()
    subscriber = Subscriber(lab.endpoints.events)
    subscriber.wait_until_subscribed(served.publisher)
    served.publish(100)
    served.publisher.close()
    assert [subscriber.receive(EVENTS_TOPIC)[0] for _ in range(100)] == list(range(1, 101))
    assert served.publish_batch(served.stream.next()) is False
    served.publisher.close()
    subscriber.close()


def test_a_subscriber_that_does_not_read_slows_nobody(lab) -> None:
    served = lab.serve()
    served.publish(5)
    stopped = Subscriber(lab.endpoints.events)
    stopped.wait_until_subscribed(served.publisher)
    client = lab.attach()
    lab.wait_live(client, served)
    pause = Batch(epoch=served.stream.epoch, step=9, phase="control", time_ns=1, events=(ev.EnginePaused(),) * 20)
    for _ in range(8_000):
        lab.wait_until(lambda: not served.publisher._queue)
        assert served.publish_batch(pause)
    served.publisher.take_dropped()
    served.drain()
    assert served.publisher.last_seq == 8_004
    lab.wait_live(client, served)
    received = 0
    while stopped.socket.poll(0):
        stopped.socket.recv_multipart()
        received += 1
    assert received < 8_000, "the stopped one lost batches, and that is its own affair"
    stopped.close()


def test_a_viewer_that_was_stopped_catches_up(lab) -> None:
    """The test holds the view's lock, which stops the reader thread as SIGSTOP would."""
    served = lab.serve()
    client = lab.attach()
    served.publish(5)
    lab.wait_live(client, served)
    with client.view.lock:
        for _ in range(60):
            served.publish(100)
            served.drain()
    lab.wait_live(client, served)
    assert client.view.state == served.stream.state
    assert client.view.findings == []


def test_socket_files_are_private(lab) -> None:
    previous = os.umask(0)
    try:
        lab.serve()
    finally:
        os.umask(previous)
    for name in ("events.sock", "control.sock"):
        assert stat.S_IMODE((lab.directory / name).stat().st_mode) == 0o600


def test_a_socket_file_that_cannot_be_made_private_is_refused(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    previous = os.umask(0o022)
    try:
        with pytest.raises(EndpointError, match="has mode 755 although it was made 600"):
            Publisher(lab.endpoints.events)
    finally:
        os.umask(previous)


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EndpointError, match="is in use; listen on another port"):
            Publisher(address)


def test_an_address_that_cannot_be_bound(tmp_path: Path) -> None:
    for address in (f"ipc://{tmp_path}/nowhere/events.sock", "nonsense", "tcp://256.1.1.1:5"):
        with pytest.raises(EndpointError, match="cannot listen on"):
            Publisher(address)
    with pytest.raises(EndpointError, match="107"):
        Publisher(f"ipc://{tmp_path}/{'x' * 108}")


def test_nobody_listens() -> None:
    sink = NullPublisher()
    batch = Batch(epoch=b"", step=0, phase="plan", time_ns=0, events=())
    assert (sink.publish(batch), sink.needs_full_state, sink.take_dropped()) == (True, False, 0)


def test_the_recorder_gets_every_batch(lab) -> None:
    kept: list[tuple[int, int, bytes]] = []

    class Keeper:
        error: str | None = None

        def record(self, seq: int, log_time_ns: int, payload: bytes, *_: object) -> None:
            kept.append((seq, log_time_ns, payload))

        def record_keyframe(self, seq: int, log_time_ns: int, state: bytes) -> None:
            kept.append((seq, log_time_ns, state))

    served = lab.serve(recorder=Keeper())
    served.publish(40)
    served.publisher.close()
    assert [seq for seq, _, _ in kept] == list(range(40))
    assert kept[3][1] == 10**18 + served.stream.batches[3].time_ns
    assert [decode_batch(payload).batch for _, _, payload in kept] == served.stream.batches
    assert msgpack.unpackb(kept[0][2])[0] == served.stream.epoch
