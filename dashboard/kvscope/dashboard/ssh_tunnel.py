"""`ssh://[user@]host[:port][/engine]`: the engine's two sockets here, through the user's own ssh.

One ssh process for everything: it logs in (asking on the terminal what it must), runs a small shell script that says
which engines there are, then carries two forwarded sockets. It reads its standard input to the end, so it cannot
outlive this process, however that ends. Nothing has to be installed at the far end but a shell.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvscope.dashboard.errors import CommandError
from kvscope.events.text import make_printable
from kvscope.transport.discovery import START_HINT, EngineEntry
from kvscope.transport.endpoints import CONTROL_SOCKET, EVENTS_SOCKET, Endpoints, directory_endpoints, parse_tcp
from kvscope.transport.keys import client_keys

SCHEME = "ssh://"
CONNECT_TIMEOUT_S, FORWARD_TIMEOUT_S, END_TIMEOUT_S = 20, 20.0, 3.0
MAX_LINES, MAX_LINE_BYTES = 1000, 1 << 16
_MARK, _END = "kvscope-engine ", "kvscope-end"
# No part may begin with a dash (an option of ssh) nor hold what a shell or ssh would expand.
_URL = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9._-]*)@)?"
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(?::(?P<port>[0-9]{1,5}))?(?:/(?P<engine>[A-Za-z0-9_-][A-Za-z0-9._-]{0,63})?)?"
)
_FAR_PATH = re.compile(r"/[A-Za-z0-9._/+@=-]+")
_SCRIPT = f"""
if [ -n "$XDG_RUNTIME_DIR" ]; then set -- "$XDG_RUNTIME_DIR"
else set -- "/run/user/$(id -u)" "${{TMPDIR:-/tmp}}/runtime-$(id -u)"; fi
for root in "$@"; do
  for file in "$root"/kvscope/*/engine.json; do
    pid=$(sed -n 's/.*"pid":\\([0-9]*\\).*/\\1/p' "$file" 2> /dev/null)
    [ -n "$pid" ] && kill -0 "$pid" 2> /dev/null || continue
    echo "{_MARK}${{file%/engine.json}} $(head -c {MAX_LINE_BYTES // 2} "$file" | tr '\\n' ' ')"
  done
done
echo {_END}
exec cat > /dev/null
"""


class SshTarget(NamedTuple):
    """Where to log in, and which engine there; None is the only one."""

    destination: str
    port: int | None
    engine: str | None


class FarEngine(NamedTuple):
    directory: str
    entry: EngineEntry


def parse_ssh(text: str) -> SshTarget:
    """Raises CommandError for anything that is not exactly such an address."""
    found = _URL.fullmatch(text)
    port = int(found["port"]) if found is not None and found["port"] else None
    if found is None or (port is not None and not 1 <= port <= 65535):
        raise CommandError(f"{make_printable(text)!r} is not ssh://[user@]host[:port][/engine]")
    user = f"{found['user']}@" if found["user"] else ""
    return SshTarget(user + found["host"].strip("[]"), port, found["engine"])


@contextlib.contextmanager
def tunnel(target: SshTarget, key: Path | None = None) -> Iterator[Endpoints]:
    """The far engine's endpoints, as sockets in a private directory that lives as long as the context.

    Raises:
        CommandError: no ssh, it cannot log in (its own last line says why), no such engine, or it cannot forward.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvscope-", ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        ssh = [*ssh_command(), "-S", str(folder / "c"), *(["-p", str(target.port)] if target.port else [])]
        errors = stack.enter_context((folder / "errors").open("w+b"))
        process = subprocess.Popen(  # noqa: S603 - no shell; every part of the address was checked
            [*ssh, *_OPTIONS, "--", target.destination, "exec sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        stack.callback(_end, process)
        engine = choose(read_engines(process), target) if _send(process) else None
        if engine is None:
            raise CommandError(_failure(process, target, folder / "errors"))
        near = directory_endpoints(folder, f"{target.destination}/{engine.entry.name}")
        _forward([*ssh, "-O", "forward"], target, forwards(folder, engine))
        server_key = engine.entry.server_key.encode() if engine.entry.server_key is not None else None
        yield near._replace(keys=client_keys(key, server_key))


_OPTIONS = (
    *("-M", "-T", "-a", "-x"),
    *("-o", "ControlPersist=no", "-o", "ClearAllForwardings=yes", "-o", "RequestTTY=no", "-o", "RemoteCommand=none"),
    *("-o", "PermitLocalCommand=no", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=15"),
)


def ssh_command() -> list[str]:
    """The user's ssh, or what KVSCOPE_SSH says (`ssh -F my_config`). Raises CommandError when it is not there."""
    try:
        command = shlex.split(os.environ.get("KVSCOPE_SSH", "")) or ["ssh"]
    except ValueError as error:
        raise CommandError(f"KVSCOPE_SSH: {error}") from None
    if shutil.which(command[0]) is None:
        raise CommandError(f"attach ssh:// needs the ssh client, and there is no {command[0]} here")
    return command


def _send(process: "subprocess.Popen[bytes]") -> bool:
    """Hand the script over; standard input stays open after it. False when ssh has gone already."""
    assert process.stdin is not None
    try:
        process.stdin.write(_SCRIPT.encode())
        process.stdin.flush()
    except BrokenPipeError:
        return False
    return True


def read_engines(process: "subprocess.Popen[bytes]") -> list[FarEngine] | None:
    """What the script says; None when ssh ended before it was through. Whatever else a login prints is skipped."""
    assert process.stdout is not None
    engines: list[FarEngine] = []
    for _ in range(MAX_LINES):
        raw = process.stdout.readline(MAX_LINE_BYTES)
        line = raw.decode(errors="replace").rstrip("\n")
        if not raw:
            return None
        if line == _END:
            return engines
        engine = parse_engine(line)
        if engine is not None and engine.directory not in [other.directory for other in engines]:
            engines.append(engine)
    return None


def parse_engine(line: str) -> FarEngine | None:
    """`kvscope-engine DIRECTORY {json}`; None for anything else, also for a directory that ssh cannot be given."""
    directory, _, text = line.removeprefix(_MARK).partition(" ")
    if not line.startswith(_MARK) or _FAR_PATH.fullmatch(directory) is None:
        return None
    try:
        entry = msgspec.json.decode(text, type=EngineEntry)
    except msgspec.DecodeError:
        return None
    return FarEngine(directory, msgspec.structs.replace(entry, name=Path(directory).name))


def choose(engines: Sequence[FarEngine] | None, target: SshTarget) -> FarEngine | None:
    """The engine that was meant. Raises CommandError when there is none, or more than one."""
    if engines is None:
        return None
    names = ", ".join(engine.entry.name for engine in engines)
    if target.engine is not None:
        found = next((engine for engine in engines if engine.entry.name == target.engine), None)
        if found is None:
            there = f"running there: {names}" if engines else f"{START_HINT} there"
            raise CommandError(f"no engine named {target.engine} on {target.destination}; {there}")
        return found
    if not engines:
        raise CommandError(f"no engine is running on {target.destination}; {START_HINT} there")
    if len(engines) > 1:
        raise CommandError(f"several engines are running on {target.destination}: {names}; name one: ssh://HOST/NAME")
    return engines[0]


def forwards(folder: Path, engine: FarEngine) -> list[str]:
    """What ssh's -L takes: a socket here, and the far socket or loopback port behind it."""
    if engine.entry.listen is None:
        far = [f"{engine.directory}/{name}" for name in (EVENTS_SOCKET, CONTROL_SOCKET)]
    else:
        addresses = parse_tcp(engine.entry.listen)
        far = [address.removeprefix("tcp://") for address in (addresses.events, addresses.control)]
    return [f"{folder / name}:{there}" for name, there in zip((EVENTS_SOCKET, CONTROL_SOCKET), far, strict=True)]


def _forward(command: Sequence[str], target: SshTarget, pairs: Sequence[str]) -> None:
    words = [word for pair in pairs for word in ("-L", pair)]
    try:
        done = subprocess.run(  # noqa: S603 - the same
            [*command, *words, "--", target.destination],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FORWARD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"ssh to {target.destination} does not answer; its sockets could not be forwarded") from None
    if done.returncode:
        raise CommandError(f"ssh to {target.destination} cannot forward sockets: {_last_line(done.stderr)}")


def _failure(process: "subprocess.Popen[bytes]", target: SshTarget, errors: Path) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    reason = _last_line(errors.read_bytes()[-MAX_LINE_BYTES:])
    return f"ssh to {target.destination} failed: {reason}; try first: {by_hand(target)}"


def _last_line(output: bytes) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith("Warning:")]
    return (telling or lines or ["it said nothing"])[-1].strip()


def _end(process: "subprocess.Popen[bytes]") -> None:
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def by_hand(target: SshTarget) -> str:
    """The command that shows whether one gets in at all."""
    port = f"-p {target.port} " if target.port is not None else ""
    return f"ssh {port}{target.destination} true"
