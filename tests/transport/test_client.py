"""The client's picture equals the engine's, or says that it does not."""

import fcntl
import random
import re
import resource
import socket
import threading
import time

import msgpack
import pytest
import zmq

from kvscope.events.types import EngineStopped, SamplingParams
from kvscope.transport.client import EngineClient
from kvscope.transport.endpoints import EndpointError
from kvscope.transport.source import Reply, Status
from kvscope.transport.wire import EVENTS_TOPIC, HEARTBEAT_TOPIC, encode_seq


class LossySocket:
    """In place of the publisher's socket: loses the batches it is told to lose."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.lose = lambda seq: False

    def send_multipart(self, frames) -> None:
        if frames[0] != EVENTS_TOPIC or not self.lose(int.from_bytes(frames[1], "big")):
            self.inner.send_multipart(frames)

    def close(self) -> None:
        self.inner.close()


def make_lossy(served) -> LossySocket:
    served.publisher._socket = LossySocket(served.publisher._socket)
    return served.publisher._socket


def statuses_of(client: EngineClient) -> list[tuple[Status, str]]:
    """Every status that the client will show, in order."""
    seen: list[tuple[Status, str]] = []
    original = client.view.set_status

    def record(status: Status, detail: str = "") -> None:
        if not seen or seen[-1] != (status, detail):
            seen.append((status, detail))
        original(status, detail)

    client.view.set_status = record
    return seen


def test_from_the_start(lab) -> None:
    served = lab.serve()
    client = lab.attach()
    served.publish(200)
    lab.wait_live(client, served)
    assert client.view.state == served.stream.state
    assert (client.view.findings, client.view.num_refused_events) == ([], 0)


def test_fifty_late_joiners_end_equal_to_the_first(lab) -> None:
    """Nobody sees an empty pool for having come late (vLLM 40363 and 50134, SGLang 23256)."""
    served = lab.serve()
    clients = [lab.attach()]
    moments = sorted(random.Random(5).sample(range(1, 500), 50))
    done = threading.Event()

    def publish() -> None:
        while not done.is_set() or len(served.stream.batches) < 600:
            served.publish()
            time.sleep(0.001)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for moment in moments:
            lab.wait_until(lambda moment=moment: (served.publisher.last_seq or 0) >= moment)
            clients.append(lab.attach())
    finally:
        done.set()
        publisher.join()
    served.drain()
    for client in clients:
        lab.wait_live(client, served)
        assert client.view.state == served.stream.state
        assert (client.view.num_gaps, client.view.findings) == (0, [])


def test_in_a_process_with_thousands_of_open_files(lab, monkeypatch) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    pair = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", lambda: tuple(map(with_high_descriptor, pair())))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    try:
        served, client = lab.serve(), lab.attach()
        served.publish(3)
        lab.wait_live(client, served)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert client.view.state == served.stream.state


def with_high_descriptor(end: socket.socket) -> socket.socket:
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD, 2000))


def test_a_gap_is_healed_by_replay(lab) -> None:
    """Consumers that never look for gaps were seen elsewhere (llm-d-router 1737)."""
    served = lab.serve()
    lossy = make_lossy(served)
    client = lab.attach()
    served.publish(10)
    lab.wait_live(client, served)
    seen = statuses_of(client)
    lossy.lose = lambda seq: 20 <= seq < 50
    served.publish(60)
    lab.wait_live(client, served)
    assert client.view.state == served.stream.state
    assert client.view.num_gaps == 1
    assert (Status.GAP, "batches 20 to 49 are missing") in seen
    assert [entry.seq for entry in client.view.log] == sorted(entry.seq for entry in client.view.log)
    assert {20, 35, 49} <= {entry.seq for entry in client.view.log}, "replayed batches are in the log"


def test_a_gap_at_the_end_is_found_by_the_heartbeat(lab) -> None:
    served = lab.serve(heartbeat_interval_s=0.02)
    lossy = make_lossy(served)
    client = lab.attach()
    served.publish(10)
    lab.wait_live(client, served)
    lossy.lose = lambda seq: True
    served.publish(5)
    served.drain()
    lab.wait_until(lambda: client.view.last_seq == 14)
    lab.wait_live(client, served)
    assert client.view.state == served.stream.state


def test_a_gap_that_left_the_ring_is_healed_by_a_snapshot(lab) -> None:
    served = lab.serve(ring_batches=5)
    lossy = make_lossy(served)
    client = lab.attach()
    served.publish(10)
    lab.wait_live(client, served)
    lossy.lose = lambda seq: 20 <= seq < 50
    served.publish(60)
    lab.wait_live(client, served)
    assert client.view.state == served.stream.state
    assert client.view.num_gaps == 1
    assert not {entry.seq for entry in client.view.log} & set(range(20, 50)), "nobody saw these"


@pytest.mark.parametrize("loss", [0.01, 0.1, 0.5])
def test_random_loss(loss: float, lab) -> None:
    served = lab.serve(heartbeat_interval_s=0.02)
    lossy = make_lossy(served)
    source = random.Random(3)
    client = lab.attach()
    lossy.lose = lambda seq: source.random() < loss
    for _ in range(40):
        served.publish(10)
        served.drain()
    lab.wait_live(client, served)
    assert client.view.state == served.stream.state
    assert client.view.findings == []


def test_another_life_whose_numbers_overtake(lab) -> None:
    """Without an epoch a restarted publisher passes for the one before once its numbers are higher."""
    first = lab.serve(lab.Stream(1))
    client = lab.attach()
    first.publish(30)
    lab.wait_live(client, first)
    first.close()
    second = lab.serve(lab.Stream(2))
    second.publish(100)
    lab.wait_until(lambda: client.view.state.epoch == second.stream.epoch)
    lab.wait_live(client, second)
    assert client.view.state == second.stream.state
    assert client.view.findings == []
    assert all(entry.seq > 0 for entry in client.view.log)


def test_silence_is_stale_and_keeps_the_last_picture(lab) -> None:
    first = lab.serve(lab.Stream(1))
    client = lab.attach()
    first.publish(30)
    lab.wait_live(client, first)
    first.close()
    lab.wait_until(lambda: client.view.status is Status.STALE)
    assert re.fullmatch(r"no heartbeat since \d\d:\d\d:\d\d", client.view.status_detail)
    assert client.view.state == first.stream.state
    reply = client.submit("hello", {}).result(5)
    assert (reply.ok, reply.error) == (False, "no engine is connected at lab")
    second = lab.serve(lab.Stream(2))
    second.publish(10)
    lab.wait_until(lambda: client.view.state.epoch == second.stream.epoch)
    lab.wait_live(client, second)
    assert client.view.state == second.stream.state
    assert second.engine.calls == [], "what was asked of the dead engine never reaches the next one"


def test_goodbye_then_another_life(lab) -> None:
    first = lab.serve(lab.Stream(1))
    client = lab.attach()
    first.publish(10)
    lab.wait_live(client, first)
    first.publish_batch(first.stream.stop())
    lab.wait_until(lambda: client.view.status is Status.ENDED)
    assert isinstance(client.view.log[-1].event, EngineStopped)
    first.close()
    second = lab.serve(lab.Stream(2))
    second.publish(10)
    lab.wait_until(lambda: client.view.state.epoch == second.stream.epoch)
    lab.wait_live(client, second)


def test_control(lab) -> None:
    served = lab.serve()
    client = lab.attach()
    served.publish(3)
    lab.wait_live(client, served)
    assert client.control is client
    assert client.submit("hi", {"n": 2}).result(10) == Reply(True, "", "r1")
    assert client.submit("refuse", {}).result(10) == Reply(False, "no room for this")
    assert not client.submit("hi", {"m": 2}).result(10).ok
    for future in (client.cancel("r1"), client.pause(), client.resume(), client.step(2)):
        assert future.result(10) == Reply(True)
    assert served.engine.calls == [
        ("submit", "hi", SamplingParams(n=2), None),
        ("cancel", "r1"),
        ("pause",),
        ("resume",),
        ("step", 2),
    ]


def test_what_cannot_be_sent_is_refused_at_once(lab) -> None:
    client = EngineClient(lab.endpoints)
    assert client.pause().result(0) == Reply(False, "not connected")
    assert "cannot be sent" in client.submit("\udcff", {}).result(0).error
    assert "limit" in client.submit("x" * (1 << 20), {}).result(0).error
    client.close()
    client.close()


def test_close_resolves_what_waits(lab) -> None:
    served = lab.serve()
    served.publish(1)
    client = lab.attach()
    lab.wait_live(client)
    block = threading.Event()
    served.engine.pause = lambda: block.wait(20)
    future = client.pause()
    client.close()
    block.set()
    assert future.result(10).error == "the connection was closed"
    assert client.pause().result(0) == Reply(False, "not connected")


def test_connect(lab) -> None:
    served = lab.serve()
    client = EngineClient(lab.endpoints)
    assert client.connect() is client
    client.close()
    served.close()
    with pytest.raises(EndpointError, match="no engine answers at lab; start one with"):
        EngineClient(lab.endpoints).connect(0.2)


def test_an_address_that_cannot_be(lab) -> None:
    with pytest.raises(EndpointError, match="cannot connect"):
        EngineClient(lab.endpoints._replace(events="nonsense")).start()


class HostileEngine:
    """A publisher and control server that say anything at all."""

    def __init__(self, endpoints) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events = self.context.socket(zmq.PUB)
        self.events.bind(endpoints.events)
        self.control = self.context.socket(zmq.ROUTER)
        self.control.bind(endpoints.control)

    def answer(self, reply: dict[str, object]) -> None:
        client, request = self.control.recv_multipart()
        frame = msgpack.packb({"id": msgpack.unpackb(request)["id"], **reply})
        self.control.send_multipart([client, frame])

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_hostile_engine(lab) -> None:
    """After every hostile frame the thread lives on, and a sound engine at the same address heals the picture."""
    client = lab.attach()
    hostile = HostileEngine(lab.endpoints)
    answers: list[dict[str, object]] = [
        {},
        {"ok": True},
        {"ok": True, "seq": "x", "state": 5},
        {"ok": True, "seq": 1, "state": b"\xc1"},
        {"ok": True, "seq": 1, "state": b"\x91" * 1_000},
        {"ok": True, "seq": 1, "state": msgpack.packb({"ref_counts": [1] * 5})},
        {"ok": False, "error": "\x1b]0;title\x07" * 1_000},
        {"ok": False, "error": [1]},
        {"end": True},
    ]
    for answer in answers:
        hostile.answer(answer)
    assert "\x1b" not in client.view.status_detail
    epoch = bytes(16)
    batches: list[object] = [
        None,
        [epoch, 1, "plan", 1, [{"type": "nothing"}, 5, {"type": "engine_stopped", "reason": "\x1b"}]],
        [epoch, 1, "plan", 1, [{"type": "request_finished", "request_id": "r"}]],
        [epoch, -1, "plan", 1, []],
        [b"other", 1, "plan", 1, []],
    ]
    frames = [
        [EVENTS_TOPIC],
        [EVENTS_TOPIC, b"short", b""],
        [EVENTS_TOPIC, encode_seq(0), b"\xdd\xff\xff\xff\xff"],
        [EVENTS_TOPIC, encode_seq(0), b"\x91" * 1_000],
        [EVENTS_TOPIC, encode_seq(0), b"", b"more"],
        [HEARTBEAT_TOPIC, encode_seq(0), b"\xc1"],
        [HEARTBEAT_TOPIC, encode_seq(0), msgpack.packb([epoch, -5, "x", None])],
        [HEARTBEAT_TOPIC, encode_seq(0), msgpack.packb([epoch, 1 << 62, 0, 0])],
        [EVENTS_TOPIC + b".other", encode_seq(0), b""],
        *([EVENTS_TOPIC, encode_seq((1 << 64) - 1), msgpack.packb(batch)] for batch in batches),
    ]

    def bombard() -> bool:
        for frame in frames:
            hostile.events.send_multipart(frame)
        return client.view.num_refused_events >= 50

    lab.wait_until(bombard)
    assert client.view.status is not Status.LIVE
    hostile.close()
    served = lab.serve()
    served.publish(30)
    lab.wait_until(lambda: client.view.state.epoch == served.stream.epoch)
    lab.wait_live(client, served)
    assert client.view.state == served.stream.state


def test_a_batch_that_cannot_be_read_is_replaced_by_a_snapshot(lab) -> None:
    served = lab.serve()
    client = lab.attach()
    served.publish(10)
    lab.wait_live(client, served)
    lossy = make_lossy(served)
    send = lossy.send_multipart
    lossy.send_multipart = lambda frames: send((*frames[:2], b"\xc1") if frames[0] == EVENTS_TOPIC else frames)
    served.publish(10)
    served.drain()
    del lossy.send_multipart
    lab.wait_until(lambda: client.view.last_seq == 19)
    lab.wait_live(client, served)
    assert client.view.num_refused_events >= 1
    assert client.view.state == served.stream.state
