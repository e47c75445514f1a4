"""The control server answers whatever comes, and nothing that comes ends it."""

import random
from collections.abc import Iterator

import msgpack
import pytest
import zmq

from kvscope.events.codec import decode_batch, decode_state
from kvscope.events.state import Breakpoints
from kvscope.events.types import SamplingParams
from kvscope.transport.control import REPLAY_CHUNK_BATCHES, ControlServer
from kvscope.transport.endpoints import EndpointError


class Dealer:
    """A raw client."""

    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.address = address
        self.socket = self._connect()

    def _connect(self) -> "zmq.Socket[bytes]":
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, 20_000)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self.address)
        return dealer

    def ask(self, op: object, **fields: object) -> dict[str, object]:
        self.send({"id": 1, "op": op, **fields})
        return self.receive()

    def send(self, value: object) -> None:
        self.socket.send(msgpack.packb(value))

    def receive(self) -> dict[str, object]:
        reply = msgpack.unpackb(self.socket.recv())
        assert isinstance(reply, dict)
        return reply

    def reconnect(self) -> None:
        self.socket.close(linger=0)
        self.socket = self._connect()

    def replay(self, seq: int) -> tuple[list[tuple[int, bytes]], dict[str, object]]:
        self.send({"id": 5, "op": "replay", "seq": seq})
        got = []
        while "end" not in (reply := self.receive()):
            assert reply["id"] == 5
            got.append((reply["seq"], reply["payload"]))
        return got, reply

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def dealer(lab) -> Iterator[Dealer]:
    made = Dealer(lab.endpoints.control)
    yield made
    made.close()


@pytest.fixture
def req(dealer: Dealer) -> "zmq.Socket[bytes]":
    """A REQ socket as other tools use it; closed with the dealer's context."""
    socket = dealer.context.socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    socket.connect(dealer.address)
    return socket


def test_ping_and_snapshot(lab, dealer: Dealer) -> None:
    served = lab.serve()
    assert dealer.ask("ping")["last_seq"] is None
    assert dealer.ask("snapshot") == {"id": 1, "ok": False, "error": "the engine has not published anything yet"}
    served.publish(30)
    served.drain()
    assert (dealer.ask("ping")["last_seq"], dealer.ask("ping")["epoch"]) == (29, served.stream.epoch)
    reply = dealer.ask("snapshot")
    assert (reply["ok"], reply["seq"]) == (True, 29)
    assert decode_state(reply["state"]) == served.stream.state


def test_what_the_engine_is_asked(lab, dealer: Dealer) -> None:
    served = lab.serve()
    assert dealer.ask("submit", prompt="hi", options={"n": 2, "stop": ["."]})["request_id"] == "r1"
    assert dealer.ask("submit", prompt="", request_id="mine")["request_id"] == "mine"
    breakpoints = {"events": ["refusal", "copy-on-write"], "free_below": 5}
    moves = (("cancel", {"request_id": "r1"}), ("pause", {}), ("resume", {}), ("step", {"num_steps": 3}))
    for op, fields in (*moves, ("break", breakpoints)):
        assert dealer.ask(op, **fields) == {"id": 1, "ok": True}
    assert dealer.ask("stats")["stats"] == {"steps": 3}
    assert served.engine.calls == [
        ("submit", "hi", SamplingParams(n=2, stop=(".",)), None),
        ("submit", "", SamplingParams(), "mine"),
        ("cancel", "r1"),
        ("pause",),
        ("resume",),
        ("step", 3),
        ("break", Breakpoints(events=("copy-on-write", "refusal"), free_below=5)),
    ]


REFUSED = {
    "unknown op": ("explode", {}, "unknown op 'explode'"),
    "op is not text": (7, {}, "unknown op"),
    "op is a list": ([], {}, "unknown op"),
    "no op": (None, {}, "unknown op"),
    "prompt missing": ("submit", {}, "prompt must be a string"),
    "prompt is bytes": ("submit", {"prompt": b"x"}, "prompt must be a string"),
    "options are a list": ("submit", {"prompt": "x", "options": [1]}, "options must be a map"),
    "unknown option": ("submit", {"prompt": "x", "options": {"temprature": 1}}, "did you mean temperature"),
    "option of a wrong type": ("submit", {"prompt": "x", "options": {"n": "2"}}, "whole number"),
    "option out of range": ("submit", {"prompt": "x", "options": {"top_p": 0}}, "above 0"),
    "float for a whole number": ("submit", {"prompt": "x", "options": {"n": 1.5}}, "sampling options"),
    "boolean for a number": ("submit", {"prompt": "x", "options": {"seed": True}}, "whole number"),
    "stop is a map": ("submit", {"prompt": "x", "options": {"stop": {}}}, "stop takes"),
    "id too long": ("submit", {"prompt": "x", "request_id": "r" * 65}, "limit is 64"),
    "id is a number": ("cancel", {"request_id": 5}, "request_id must be a string"),
    "no steps": ("step", {}, "num_steps must be"),
    "negative steps": ("step", {"num_steps": -1}, "num_steps must be"),
    "boolean steps": ("step", {"num_steps": True}, "num_steps must be"),
    "too many steps": ("step", {"num_steps": 10_001}, "from 1 to 10000"),
    "no breakpoints": ("break", {}, "events must be a list of copy-on-write, preemption"),
    "unknown breakpoint": ("break", {"events": ["lunch"]}, "events must be a list of"),
    "breakpoint is a list": ("break", {"events": [[]]}, "events must be a list of"),
    "free below nothing": ("break", {"events": [], "free_below": 0}, "free_below must be"),
    "boolean free below": ("break", {"events": [], "free_below": True}, "free_below must be"),
    "replay from nowhere": ("replay", {}, "seq must be"),
    "replay from before the start": ("replay", {"seq": -1}, "seq must be"),
    "replay from text": ("replay", {"seq": "0"}, "seq must be"),
    "the engine refuses": ("submit", {"prompt": "refuse"}, "no room for this"),
    "the engine fails": ("submit", {"prompt": "break"}, "the engine failed to answer: a bug"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_of_refusal(name: str, lab, dealer: Dealer) -> None:
    op, fields, words = REFUSED[name]
    lab.serve()
    reply = dealer.ask(op, **fields)
    assert reply["ok"] is False
    assert words in str(reply["error"])
    assert str(reply["error"]).isprintable()
    assert dealer.ask("ping")["ok"] is True


def test_frames_that_are_no_request_are_refused_and_counted(lab, dealer: Dealer) -> None:
    served = lab.serve()
    frames = [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        msgpack.packb([1, 2]),
        msgpack.packb({"op": "ping"}),
        msgpack.packb({"id": True, "op": "ping"}),
        msgpack.packb({"id": -1, "op": "ping"}),
        msgpack.packb({"id": "1", "op": "ping"}),
        msgpack.packb({"id": 1 << 63, "op": "ping"}),
        msgpack.packb({1: 2}),
    ]
    for frame in frames:
        dealer.socket.send(frame)
    dealer.socket.send_multipart([b"x", msgpack.packb({"id": 1, "op": "ping"})])
    for _ in range(len(frames) + 1):
        reply = dealer.receive()
        assert (reply["id"], reply["ok"]) == (None, False)
        assert str(reply["error"]).isprintable()
    assert dealer.ask("ping")["ok"] is True
    assert served.control.num_refused_frames == len(frames) + 1


def test_a_req_client_gets_one_answer_to_each_request(lab, req: "zmq.Socket[bytes]") -> None:
    """A REQ socket that gets no answer, or more than one, can never be used again (vLLM 45174)."""
    served = lab.serve()
    served.publish(10)
    served.drain()

    def ask(frame: bytes) -> dict[str, object]:
        req.send(frame)
        return msgpack.unpackb(req.recv())

    assert ask(msgpack.packb({"id": 1, "op": "snapshot"}))["seq"] == 9
    reply = ask(msgpack.packb({"id": 2, "op": "replay", "seq": 0}))
    assert (reply["ok"], "DEALER" in str(reply["error"])) == (False, True)
    assert ask(b"\xc1")["ok"] is False
    req.send_multipart([b"two", b"frames"])
    assert "one frame, not 2" in msgpack.unpackb(req.recv())["error"]
    assert ask(msgpack.packb({"id": 3, "op": "ping"}))["last_seq"] == 9


def test_random_frames(lab, dealer: Dealer) -> None:
    served = lab.serve()
    served.publish(3)
    source = random.Random(1)
    valid = msgpack.packb({"id": 1, "op": "submit", "prompt": "x", "options": {"n": 1}})
    for _ in range(2_000):
        frame = bytearray(valid)
        for _ in range(source.randint(1, 6)):
            frame[source.randrange(len(frame))] = source.randrange(256)
        dealer.socket.send(bytes(frame) if source.random() < 0.5 else source.randbytes(source.randint(0, 60)))
    dealer.send({"id": 77, "op": "ping"})
    while dealer.receive()["id"] != 77:
        pass


def test_a_huge_frame_costs_the_sender_its_connection(lab, dealer: Dealer) -> None:
    lab.serve()
    assert dealer.ask("ping")["ok"] is True
    monitor = dealer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.socket.send(bytes(2 << 20))
    assert monitor.poll(20_000), "the server hangs up"
    dealer.socket.disable_monitor()
    dealer.reconnect()
    assert dealer.ask("ping")["ok"] is True


def test_replay_of_everything(lab, dealer: Dealer) -> None:
    """Every batch with its number, and an end that says so; frames were lost on this way (vLLM 45174)."""
    served = lab.serve()
    served.publish(5 * REPLAY_CHUNK_BATCHES + 3)
    served.drain()
    got, end = dealer.replay(0)
    assert end == {"id": 5, "ok": True, "end": True, "next_seq": len(served.stream.batches), "complete": True}
    assert [seq for seq, _ in got] == list(range(len(served.stream.batches)))
    assert [decode_batch(payload).batch for _, payload in got] == served.stream.batches
    assert dealer.replay(320)[0] == got[320:]
    assert dealer.replay(10**9) == ([], {"id": 5, "ok": True, "end": True, "next_seq": 10**9, "complete": True})


def test_replay_of_what_has_left_the_ring(lab, dealer: Dealer) -> None:
    served = lab.serve(ring_batches=10)
    assert dealer.replay(0)[1]["complete"] is False
    served.publish(30)
    served.drain()
    got, end = dealer.replay(19)
    assert (got, end["complete"], end["next_seq"]) == ([], False, 19)
    got, end = dealer.replay(20)
    assert ([seq for seq, _ in got], end["complete"]) == (list(range(20, 30)), True)


def test_the_ring_is_bounded_in_bytes(lab, dealer: Dealer) -> None:
    served = lab.serve(ring_bytes=1)
    served.publish(5)
    served.drain()
    assert [seq for seq, _ in dealer.replay(4)[0]] == [4]
    assert dealer.replay(3)[1]["complete"] is False


def test_a_slow_replay_does_not_delay_others(lab, dealer: Dealer) -> None:
    """The slow one asks for more than its pipe holds and reads nothing until the other one has its answers."""
    served = lab.serve()
    for _ in range(6):
        served.publish(1_000)
        served.drain()
    slow = Dealer(lab.endpoints.control)
    slow.send({"id": 5, "op": "replay", "seq": 0})
    for _ in range(20):
        assert dealer.ask("ping")["ok"] is True
    assert len(dealer.replay(5_000)[0]) == 1_000
    replies = [slow.receive()]
    while "end" not in replies[-1]:
        replies.append(slow.receive())
    assert [reply.get("seq") for reply in replies[:-1]] == list(range(6_000))
    slow.close()


def test_replays_for_five_do_not_hold_up_the_stream(lab) -> None:
    served = lab.serve()
    for _ in range(3):
        served.publish(1_000)
        served.drain()
    five = [Dealer(lab.endpoints.control) for _ in range(5)]
    for one in five:
        one.send({"id": 5, "op": "replay", "seq": 0})
    for _ in range(10):
        served.publish(100)
        served.drain()
    assert not served.publisher.needs_full_state
    for one in five:
        seqs = []
        while "end" not in (reply := one.receive()):
            seqs.append(reply["seq"])
        assert seqs == list(range(len(seqs)))
        assert len(seqs) >= 3_000
        one.close()


def test_a_client_that_leaves_in_the_middle_of_its_replay(lab, dealer: Dealer) -> None:
    served = lab.serve()
    served.publish(3_000)
    served.drain()
    leaver = Dealer(lab.endpoints.control)
    leaver.send({"id": 5, "op": "replay", "seq": 0})
    leaver.receive()
    leaver.close()
    lab.wait_until(lambda: not served.control._replays)
    assert dealer.ask("ping")["ok"] is True


def test_read_only(lab, dealer: Dealer) -> None:
    served = lab.serve(read_only=True)
    served.publish(3)
    served.drain()
    for op in ("submit", "cancel", "pause", "resume", "step", "break"):
        assert "takes no control" in str(dealer.ask(op, prompt="x", request_id="r1", num_steps=1)["error"])
    for op in ("snapshot", "stats", "ping"):
        assert [dealer.ask(op)[field] for field in ("ok", "read_only")] == [True, True]
    assert len(dealer.replay(0)[0]) == 3
    assert served.engine.calls == []


def test_an_address_that_cannot_be_bound(lab) -> None:
    served = lab.serve()
    with pytest.raises(EndpointError, match="cannot listen on"):
        ControlServer("ipc:///nowhere/at/all.sock", served.publisher, served.engine)
