"""Which engines run here: one private directory per engine, and how a viewer finds the one that was meant.

$XDG_RUNTIME_DIR/kvscope/NAME/   events.sock  control.sock  engine.json
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from kvscope.events.text import make_printable
from kvscope.transport.directory import make_private, runtime_root
from kvscope.transport.endpoints import (
    CONTROL_SOCKET,
    EVENTS_SOCKET,
    EndpointError,
    Endpoints,
    directory_endpoints,
    parse_tcp,
    reachable_here,
)
from kvscope.transport.keys import client_keys

ENGINE_FILE = "engine.json"
START_HINT = "start one with: kvscope serve"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")  # `.` and `..` are other directories, `-x` is an option
_MAX_ENGINE_FILE_BYTES = 1 << 16


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What engine.json says. `started` is wall-clock seconds; `pid_ticks` tells a recycled pid from the engine.

    `listen` is the TCP address of an engine that uses no sockets in its directory, `server_key` its public key.
    """

    pid: int
    name: str
    model: str = ""
    started: float = 0.0
    pid_ticks: int | None = None
    listen: str | None = None
    server_key: str | None = None


class EngineDirectory:
    """The directory of an engine that runs in this process; removed by `close`."""

    def __init__(self, path: Path, entry: EngineEntry) -> None:
        self.path = path
        self.entry = entry
        self.endpoints = directory_endpoints(path, entry.name)

    @classmethod
    def create(
        cls,
        name: str,
        *,
        model: str = "",
        started: float = 0.0,
        listen: str | None = None,
        server_key: str | None = None,
    ) -> Self:
        """Claim a name; what dead engines of any name left behind is removed first.

        Raises:
            EndpointError: a bad name, a live engine of that name, or a path no socket can have.
        """
        check_name(name)
        root = runtime_root()
        directory_endpoints(root / name)
        pid = os.getpid()
        entry = EngineEntry(
            pid=pid,
            name=name,
            model=model,
            started=started,
            pid_ticks=_pid_ticks(pid),
            listen=listen,
            server_key=server_key,
        )
        with _creation_lock(root):
            _remove_dead(root / name)
            _sweep(root)
            make_private(root / name)
            _write_entry(root / name, entry)
        return cls(root / name, entry)

    def close(self) -> None:
        """Remove the directory, unless another engine has claimed it since."""
        if _read_entry(self.path) == self.entry:
            shutil.rmtree(self.path, ignore_errors=True)


def check_name(name: str) -> None:
    """Raises EndpointError for a name that cannot be a directory's."""
    if _NAME.fullmatch(name) is None:
        allowed = "use 1 to 64 of A-Z a-z 0-9 . _ -, no leading dot or dash"
        raise EndpointError(f"engine name {make_printable(name)!r}: {allowed}")


def check_unclaimed(name: str) -> None:
    """Raises EndpointError for a bad name, or one that a live engine has."""
    check_name(name)
    _refuse_live(runtime_root() / name)


def list_engines() -> list[EngineEntry]:
    """The live engines of this user, by name. Raises EndpointError when the runtime directory is not private."""
    paths = sorted(path for path in runtime_root().iterdir() if path.is_dir())
    return [entry for path in paths if (entry := _read_entry(path)) is not None and _is_live(path, entry)]


def resolve(endpoint: str | None, *, key: Path | None = None, server_key: Path | None = None) -> Endpoints:
    """What a person typed, as two addresses: nothing, a name, a directory, a socket's path, or tcp://host:port.

    The keys are for an engine on TCP that wants some; of an engine on this machine the public key is known.

    Raises:
        EndpointError: nothing runs, several run, there is no such engine, or a key cannot be used.
    """
    if endpoint is None:
        entry = _only_engine()
    elif (addresses := _addresses(endpoint)) is not None:
        return addresses._replace(keys=client_keys(key, server_key))
    else:
        entry = _named_engine(endpoint)
    known_key = entry.server_key.encode() if entry.server_key is not None else None
    return _endpoints_of(entry)._replace(keys=client_keys(key, server_key or known_key))


def _addresses(endpoint: str) -> Endpoints | None:
    """Of something other than a name."""
    if endpoint.startswith("tcp://"):
        return parse_tcp(endpoint)
    path = Path(endpoint.removeprefix("ipc://")).expanduser()
    if path.is_socket() and path.name in (EVENTS_SOCKET, CONTROL_SOCKET):
        return directory_endpoints(path.absolute().parent)
    if path.is_dir() and (path / EVENTS_SOCKET).is_socket() and (path / CONTROL_SOCKET).is_socket():
        return directory_endpoints(path.absolute())
    return None


def _only_engine() -> EngineEntry:
    engines = list_engines()
    if not engines:
        raise EndpointError(f"no engine is running; {START_HINT}")
    if len(engines) > 1:
        raise EndpointError(f"several engines are running: {', '.join(entry.name for entry in engines)}; name one")
    return engines[0]


def _named_engine(endpoint: str) -> EngineEntry:
    engines = list_engines()
    for entry in engines:
        if entry.name == endpoint:
            return entry
    running = f"running: {', '.join(entry.name for entry in engines)}" if engines else START_HINT
    shown = make_printable(endpoint)
    if "/" in endpoint:
        raise EndpointError(f"{shown} is no engine's socket, nor a directory with {EVENTS_SOCKET} and {CONTROL_SOCKET}")
    raise EndpointError(f"no engine named {shown}; {running}")


def _endpoints_of(entry: EngineEntry) -> Endpoints:
    if entry.listen is not None:
        return reachable_here(parse_tcp(entry.listen))._replace(label=entry.name)
    return directory_endpoints(runtime_root() / entry.name, entry.name)


@contextlib.contextmanager
def _creation_lock(root: Path) -> Iterator[None]:
    # Two engines that start at once must not both find the name free.
    with (root / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_dead(path: Path) -> None:
    if not path.exists():
        return
    _refuse_live(path)
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise EndpointError(f"cannot remove what a dead engine left at {path}: {error.strerror}") from None


def _refuse_live(path: Path) -> None:
    entry = _read_entry(path)
    if entry is not None and _is_live(path, entry):
        raise EndpointError(f"an engine named {path.name} is already running (pid {entry.pid}); choose --name")
    if entry is None and _answers(path / CONTROL_SOCKET):
        raise EndpointError(f"somebody answers at {path / CONTROL_SOCKET}; choose --name")


def _sweep(root: Path) -> None:
    """Remove what killed engines of other names left behind; what is not certainly theirs stays."""
    for path in root.iterdir():
        entry = _read_entry(path) if path.is_dir() else None
        if entry is not None and not _is_live(path, entry):
            shutil.rmtree(path, ignore_errors=True)


def _is_live(path: Path, entry: EngineEntry) -> bool:
    same_process = entry.pid > 0 and _is_alive(entry.pid) and _pid_ticks(entry.pid) == entry.pid_ticks
    return same_process or _answers(path / CONTROL_SOCKET)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _pid_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where /proc does not tell."""
    try:
        after_command = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if after_command[0] == "Z" else int(after_command[19])
    except (OSError, ValueError, IndexError):
        return None


def _answers(path: Path) -> bool:
    """Whether a process accepts connections on the socket file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _write_entry(path: Path, entry: EngineEntry) -> None:
    draft = path / f"{ENGINE_FILE}.{os.getpid()}"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123 - the mode
        file.write(msgspec.json.encode(entry))
    draft.replace(path / ENGINE_FILE)


def _read_entry(path: Path) -> EngineEntry | None:
    try:
        with (path / ENGINE_FILE).open("rb") as file:
            entry = msgspec.json.decode(file.read(_MAX_ENGINE_FILE_BYTES), type=EngineEntry)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    # The directory's name is what counts: it is what a viewer connects to.
    return msgspec.structs.replace(entry, name=path.name, model=make_printable(entry.model))
