"""Control requests that wait for their answer."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from kvscope.events.text import make_printable
from kvscope.transport.source import Reply

ANSWER_TIMEOUT_S = 10.0


class Call(NamedTuple):
    """One request: its encoded form, and the future that its answer resolves."""

    request_id: int
    frame: bytes
    future: "Future[Reply]"


class PendingCalls:
    """Owned by the reader thread; every call that enters is resolved exactly once."""

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._clock = label, clock
        self._waiting: dict[int, tuple[float, Future[Reply]]] = {}

    def add(self, call: Call) -> None:
        self._waiting[call.request_id] = (self._clock() + ANSWER_TIMEOUT_S, call.future)

    def on_reply(self, fields: dict[str, Any]) -> None:
        """Resolve the call that this answers, if any."""
        request_id = fields.get("id")
        if not isinstance(request_id, int) or request_id not in self._waiting:
            return
        _, future = self._waiting.pop(request_id)
        error = "" if fields.get("ok") is True else make_printable(str(fields.get("error"))[:500])
        answer_id = fields.get("request_id")
        answer_text = make_printable(answer_id) if isinstance(answer_id, str) else ""
        resolve(future, Reply(fields.get("ok") is True, error, answer_text))

    def expire(self) -> None:
        """Resolve the calls that waited too long."""
        now = self._clock()
        for request_id in [key for key, (deadline, _) in self._waiting.items() if deadline <= now]:
            _, future = self._waiting.pop(request_id)
            resolve(future, Reply(False, f"no answer from {self._label} in {ANSWER_TIMEOUT_S:.0f} s"))

    def close(self) -> None:
        for _, future in self._waiting.values():
            resolve(future, Reply(False, "the connection was closed"))
        self._waiting.clear()


def resolve(future: "Future[Reply]", reply: Reply) -> None:
    """Set the result, unless the caller cancelled the future meanwhile."""
    if future.set_running_or_notify_cancel():
        future.set_result(reply)


def resolved(reply: Reply) -> "Future[Reply]":
    future: Future[Reply] = Future()
    resolve(future, reply)
    return future
