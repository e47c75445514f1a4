"""`attach` and `replay`: a source, and the dashboard on it."""

import contextlib
import importlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvscope.dashboard.opening import ScreenFlags, open_dashboard
from kvscope.dashboard.reading import open_files
from kvscope.dashboard.terminal import exiting_on_signals, require_terminal
from kvscope.transport.endpoints import Endpoints
from kvscope.transport.recording.tap import Tap
from kvscope.transport.source import Control, View
from kvscope.transport.timetravel import History

if TYPE_CHECKING:
    from kvscope.transport.client import EngineClient

CONNECT_TIMEOUT_S = 2.0
BRIEF_S = 10.0  # a recording that is over before one has looked around waits at its start
SSH_CONNECT_TIMEOUT_S = 10.0  # the far end may be far


class Connected:
    """A client that has been connected already: the dashboard must not start it again. Read-only hides its control.

    `no_control` is why there is none, for who presses its keys. `history` is what the client's view has shown lately,
    for walking back, and `tap` can record it.
    """

    def __init__(
        self,
        client: "EngineClient",
        history: History | None = None,
        tap: Tap | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        self._client, self.history, self.tap = client, history, tap
        self.view: View = client.view
        self.control: Control | None = None if read_only or client.is_read_only else client.control
        self.no_control = _why_no_control(client.is_read_only, read_only)

    def start(self) -> None:
        """Nothing to do: see the class."""

    def close(self) -> None:
        self._client.close()


def _why_no_control(is_closed: bool, read_only: bool) -> str:
    if is_closed:
        return "read-only: this engine takes no prompts (serve --no-control)"
    return "read-only: attached with --read-only, which sends no prompts" if read_only else ""


def attach_over_ssh(address: str, flags: ScreenFlags, *, key: Path | None, read_only: bool) -> int:
    """Watch an engine behind ssh:// until the user leaves. Raises CommandError, also for what ssh cannot do."""
    from kvscope.dashboard.ssh_tunnel import parse_ssh, tunnel

    target = parse_ssh(address)
    require_terminal("attach", f"a headless look is: ssh {target.destination} kvscope status --once")
    with exiting_on_signals(), tunnel(target, key) as endpoints:
        return attach(endpoints, flags, read_only=read_only, connect_timeout_s=SSH_CONNECT_TIMEOUT_S)


def attach(
    endpoints: Endpoints, flags: ScreenFlags, *, read_only: bool, connect_timeout_s: float = CONNECT_TIMEOUT_S
) -> int:
    """Watch a live engine until the user leaves. Raises EndpointError, or CommandError without a terminal."""
    from kvscope.transport.client import EngineClient

    require_terminal("attach", "a headless run is: kvscope run --prompt TEXT")
    # What draws loads while the engine answers: each takes a tenth of a second or more, and one of them only waits.
    threading.Thread(target=importlib.import_module, args=("kvscope.dashboard.app",), daemon=True).start()
    # Before the screen is taken over, so that a dead endpoint is one line and not an empty dashboard.
    history, tap = History(), Tap()
    client = EngineClient(endpoints, View(history, tap)).connect(connect_timeout_s)
    with contextlib.closing(Connected(client, history, tap, read_only=read_only)) as source:
        return open_dashboard(source, endpoints.label, flags)


def replay(files: Sequence[Path], flags: ScreenFlags) -> int:
    """Watch a recording. Raises RecordingError for a file that cannot be read, or CommandError."""
    from kvscope.transport.recording import ReplaySource

    require_terminal("replay", "one screen without a terminal is: kvscope export FILE --at end")
    track = open_files(files)
    return open_dashboard(ReplaySource(track, min_play_s=BRIEF_S), files[0].name, flags)


def engine_lines() -> list[str]:
    """One line for each running engine of this user: name, process, model."""
    from kvscope.transport.discovery import list_engines

    engines = list_engines()
    width = max((len(engine.name) for engine in engines), default=0)
    return [f"{engine.name:<{width}}  pid {engine.pid:<8}{engine.model}" for engine in engines]
