"""`kvscope status`: one line per running engine, from its snapshot and the stream that follows it."""

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvscope.dashboard.output import write_lines
from kvscope.dashboard.record import wait_until_synced
from kvscope.dashboard.terminal import handling
from kvscope.dashboard.viewer import CONNECT_TIMEOUT_S
from kvscope.events.text import make_printable
from kvscope.transport.client import EngineClient
from kvscope.transport.discovery import START_HINT, list_engines, resolve
from kvscope.transport.endpoints import EndpointError, Endpoints
from kvscope.transport.source import Status

INTERVAL_S = 1.0


class EngineStatus(NamedTuple):
    """One engine at one moment; the rate is over the time since it was last looked at."""

    name: str
    model: str
    connection: str  # LIVE, STALE, ...
    state: str  # running, paused, stopped
    step: int
    num_blocks: int
    free: int
    held: int
    cached: int
    running: int
    waiting: int
    tokens_per_s: float | None


class Watched:
    """An engine that is looked at again and again."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._last: tuple[float, int] | None = None  # (monotonic seconds, generated tokens)

    def look(self) -> EngineStatus:
        view = self.client.view
        with view.lock:
            state, connection, now = view.state, view.status, time.monotonic()
            cached = state.num_cached_blocks()
            free = state.num_free_blocks()
            statuses = [request.status for request in state.requests.values()]
            generated, last = state.counters.generated_tokens, self._last
            self._last = (now, generated)
            return EngineStatus(
                name=make_printable(self.client.endpoints.label),
                model=state.info.model if state.info is not None else "",
                connection=connection.value,
                state=state.status,
                step=state.step,
                num_blocks=len(state.ref_counts),
                free=free,
                held=len(state.ref_counts) - free - cached,
                cached=cached,
                running=statuses.count("running"),
                waiting=statuses.count("waiting") + statuses.count("preempted"),
                tokens_per_s=max(generated - last[1], 0) / (now - last[0]) if last is not None else None,
            )


def status(
    endpoint: str | None, *, once: bool, as_json: bool, key: Path | None = None, server_key: Path | None = None
) -> int:
    """Print a line per engine, every second until interrupted or until all have ended. The exit code.

    Raises:
        EndpointError, CommandError: nobody is there, or an engine does not answer.
    """
    stop = threading.Event()
    with handling(lambda *_: stop.set()), contextlib.ExitStack() as stack:
        found = [resolve(name, key=key, server_key=server_key) for name in _names(endpoint)]
        engines = [Watched(_connect(endpoints, stack, stop)) for endpoints in found]
        while not stop.is_set():
            seen = [engine.look() for engine in engines]
            write_lines(_lines(seen, as_json=as_json))
            if once or all(one.connection == Status.ENDED.value for one in seen):
                break
            stop.wait(INTERVAL_S)
    return 0


def _names(endpoint: str | None) -> list[str]:
    if endpoint is not None:
        return [endpoint]
    names = [entry.name for entry in list_engines()]
    if not names:
        raise EndpointError(f"no engine is running; {START_HINT}")
    return names


def _connect(endpoints: Endpoints, stack: contextlib.ExitStack, stop: threading.Event) -> EngineClient:
    client = EngineClient(endpoints).connect(CONNECT_TIMEOUT_S)
    stack.callback(client.close)
    wait_until_synced(client.view, client.endpoints.label, stop)
    return client


def _lines(seen: Sequence[EngineStatus], *, as_json: bool) -> list[str]:
    if as_json:
        return [json.dumps(one._asdict()) for one in seen]
    width = max(len(one.name) for one in seen)
    return [f"{one.name:<{width}}  {_line(one)}" for one in seen]


def _line(one: EngineStatus) -> str:
    connection = "" if one.connection == Status.LIVE.value else f" ({one.connection})"
    rate = f"  {one.tokens_per_s:.1f} tok/s" if one.tokens_per_s is not None else ""
    return (
        f"{one.model}  {one.state}{connection}  step {one.step:,}  "
        f"blocks {one.free:,} free {one.held:,} held {one.cached:,} cached of {one.num_blocks:,}  "
        f"requests {one.running:,} running {one.waiting:,} waiting{rate}"
    )
