#!/usr/bin/env python3
"""A viewer process for the campaigns: a client, and a log of what it shows.

`D EPOCH TIME_NS DIGEST` after each batch, `R ...` after each snapshot, and every 10 ms, and whenever the state of the
connection changes, `S MONOTONIC_NS STATUS EPOCH TIME_NS`; `L` when it was too far behind and skipped to the present.
SIGUSR1 makes it slow, SIGUSR2 quick again.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from lab import digest

from kvscope.events.state import EngineState
from kvscope.events.types import Batch
from kvscope.transport.client import EngineClient
from kvscope.transport.endpoints import Endpoints
from kvscope.transport.keys import client_keys
from kvscope.transport.source import Status, View

SLOW_S = 0.02  # per batch, several times what the engine's pace allows


class Log:
    """A view's keeper that writes everything down."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.is_slow = False

    def write(self, line: str) -> None:
        os.write(self._file, line.encode())

    def restart(self, state: EngineState, seq: int | None) -> None:
        self.write(f"R {state.epoch.hex()} {state.time_ns} {digest(state)}\n")

    def append(self, seq: int, batch: Batch, state: EngineState, payload: bytes | None) -> None:
        self.write(f"D {state.epoch.hex()} {state.time_ns} {digest(state)}\n")
        if self.is_slow:
            time.sleep(SLOW_S)


def main() -> int:
    events, control, path, keys = sys.argv[1:5]
    log = Log(Path(path))
    signal.signal(signal.SIGUSR1, lambda *_: setattr(log, "is_slow", True))
    signal.signal(signal.SIGUSR2, lambda *_: setattr(log, "is_slow", False))
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    pair = client_keys(Path(keys) / "client.key_secret", Path(keys) / "engine.key") if keys else None
    view = View(log)
    show = view.set_status

    def tell() -> None:
        state = view.state
        log.write(f"S {time.monotonic_ns()} {view.status.value} {state.epoch.hex() or '-'} {state.time_ns}\n")

    def set_status(status: Status, detail: str = "") -> None:
        is_news = status is not view.status
        show(status, detail)
        if is_news:
            tell()
        if is_news and "skips to the present" in detail:
            log.write("L\n")

    view.set_status = set_status  # type: ignore[method-assign]
    client = EngineClient(Endpoints(events, control, "lab", pair), view)
    client.start()
    while not done.wait(0.01):
        tell()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
