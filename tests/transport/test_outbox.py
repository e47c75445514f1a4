"""Replies to a client that does not read: kept in order, bounded, given up in the end."""

import pytest

from kvscope.transport import outbox
from kvscope.transport.outbox import Delivery, Outbox


class Pipe:
    """A client that takes `room` more frames."""

    def __init__(self, room: int = 0) -> None:
        self.room, self.taken, self.gone = room, [], False

    def send(self, client: tuple[bytes, ...], frame: bytes) -> Delivery:
        if self.gone:
            return Delivery.GONE
        if self.room == 0:
            return Delivery.FULL
        self.room -= 1
        self.taken.append(frame)
        return Delivery.SENT


def test_replies_wait_for_room_and_keep_their_order() -> None:
    pipe = Pipe(room=2)
    box = Outbox(pipe.send)
    for number in range(6):
        box.put((b"c",), bytes([number]))
    assert box
    pipe.room = 1
    box.flush()
    pipe.room = 9
    box.put((b"c",), b"late")  # may not overtake what waits, although there is room now
    box.flush()
    assert pipe.taken == [bytes([n]) for n in range(6)] + [b"late"]
    assert not box
    assert box.num_given_up == 0


def test_a_client_that_left_is_forgotten() -> None:
    pipe = Pipe()
    box = Outbox(pipe.send)
    box.put((b"c",), b"1")
    pipe.gone = True
    box.flush()
    assert not box
    assert box.num_given_up == 1


def test_a_deaf_client_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PATIENCE_S", 0.0)
    box = Outbox(Pipe().send)
    box.put((b"c",), b"1")
    box.flush()
    assert not box


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_REPLIES", 3)
    monkeypatch.setattr(outbox, "MAX_BYTES", 100)
    box = Outbox(Pipe().send)
    for _ in range(5):
        box.put((b"few",), b"1")
    box.put((b"large",), b"x" * 101)
    assert box.num_given_up == 3
