"""`attach` and `replay`: a source, and the dashboard on it."""

import time
from collections.abc import Callable
from pathlib import Path

from kvscope.dashboard.errors import CommandError
from kvscope.dashboard.terminal import require_terminal, run_screen, wants_ascii
from kvscope.transport.source import Control, Source, Status, View

CONNECT_TIMEOUT_S = 2.5
POLL_S = 0.02
_ANSWERED = (Status.LIVE, Status.GAP, Status.ENDED)


class ReadOnly:
    """A source without its control channel: the dashboard can watch, and nothing else."""

    control: Control | None = None

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def view(self) -> View:
        return self._source.view

    def start(self) -> None:
        self._source.start()

    def close(self) -> None:
        self._source.close()


def attach(endpoint: str | None, *, read_only: bool, ascii_only: bool) -> int:
    """Watch a live engine until the user leaves. Raises EndpointError, or CommandError when it does not answer."""
    from kvscope.dashboard.app import DashboardApp
    from kvscope.transport.client import EngineClient
    from kvscope.transport.discovery import resolve

    endpoints = resolve(endpoint)
    require_terminal("attach", "a headless run is: kvscope run --prompt TEXT")
    client = EngineClient(endpoints)
    client.start()
    try:
        wait_until_live(client, endpoints.label)
        source: Source = ReadOnly(client) if read_only else client
        return run_screen(DashboardApp(source, title=endpoints.label, ascii_only=ascii_only or wants_ascii()))
    finally:
        client.close()


def replay(recording: Path, *, ascii_only: bool) -> int:
    """Watch a recording. Raises RecordingError for a file that cannot be read, or CommandError."""
    from kvscope.dashboard.app import DashboardApp
    from kvscope.transport.recording import ReplaySource, read_recording

    batches = read_recording(recording)
    require_terminal("replay", "the recording is an MCAP file that any MCAP reader opens")
    source = ReplaySource(batches)
    return run_screen(DashboardApp(source, title=recording.name, ascii_only=ascii_only or wants_ascii()))


def wait_until_live(
    source: Source, label: str, *, is_alive: Callable[[], bool] = lambda: True, timeout_s: float = CONNECT_TIMEOUT_S
) -> None:
    """Block until the engine's state has arrived, so that the first picture is a whole one.

    Raises:
        CommandError: nobody answered in time, or `is_alive` turned false.
    """
    deadline = time.monotonic() + timeout_s
    while source.view.status not in _ANSWERED:
        if time.monotonic() > deadline or not is_alive():
            raise CommandError(f"no engine answers at {label} (waited {timeout_s:.1f} s); is it running? kvscope list")
        time.sleep(POLL_S)


def engine_lines() -> list[str]:
    """One line for each running engine of this user: name, process, model."""
    from kvscope.transport.discovery import list_engines

    engines = list_engines()
    width = max((len(engine.name) for engine in engines), default=0)
    return [f"{engine.name:<{width}}  pid {engine.pid:<8}{engine.model}" for engine in engines]
