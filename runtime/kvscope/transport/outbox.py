"""Replies that a client has not made room for yet. Bounded, and given up when the client stays deaf."""

import time
from collections import deque
from collections.abc import Callable
from enum import Enum

MAX_REPLIES = 16_384  # per client
MAX_BYTES = 32 * 1024 * 1024  # per client
PATIENCE_S = 30.0


Route = tuple[bytes, ...]  # the frames before a reply: the client's identity; for a REQ client an empty one too


class Delivery(Enum):
    """What became of a frame: on its way, no room in the client's pipe now, or nobody there."""

    SENT = "sent"
    FULL = "full"
    GONE = "gone"


class _Unsent:
    """What waits for one client; `moved_at` is when it last took something."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.num_bytes = 0
        self.moved_at = time.monotonic()


class Outbox:
    """Sends in order, per client; a reply never overtakes an earlier one. One thread."""

    def __init__(self, send: Callable[[Route, bytes], Delivery]) -> None:
        self.num_given_up = 0
        self._send = send
        self._unsent: dict[Route, _Unsent] = {}

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._unsent)

    def put(self, client: Route, frame: bytes) -> None:
        """Send a reply now, or as soon as the client takes it. Beyond the bounds it is given up and counted."""
        waiting = self._unsent.get(client)
        if waiting is None:
            if self._send(client, frame) is not Delivery.FULL:
                return
            waiting = self._unsent[client] = _Unsent()
        if len(waiting.frames) >= MAX_REPLIES or waiting.num_bytes + len(frame) > MAX_BYTES:
            self.num_given_up += 1
            return
        waiting.frames.append(frame)
        waiting.num_bytes += len(frame)

    def flush(self) -> None:
        """Try again what waits."""
        for client in list(self._unsent):
            self._flush(client, self._unsent[client])

    def _flush(self, client: Route, waiting: _Unsent) -> None:
        while waiting.frames:
            delivery = self._send(client, waiting.frames[0])
            if delivery is Delivery.FULL and time.monotonic() - waiting.moved_at < PATIENCE_S:
                return
            if delivery is not Delivery.SENT:
                self.num_given_up += len(waiting.frames)
                break
            waiting.num_bytes -= len(waiting.frames.popleft())
            waiting.moved_at = time.monotonic()
        del self._unsent[client]
