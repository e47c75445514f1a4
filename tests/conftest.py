"""Running the real command, with and without a terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

TIMEOUT_S = 120.0
COMMAND = (sys.executable, "-m", "kvscope.dashboard")


# Said by whichever command comes first where nothing has been compiled yet.
FIRST_RUN = "kvscope: compiling attention for this machine, once; this takes some seconds\n"


class Finished(NamedTuple):
    code: int
    output: str
    errors: str


class TerminalSession:
    """A command on a pseudo-terminal of a fixed size; what it writes is collected by a thread."""

    def __init__(self, command: tuple[str, ...], env: dict[str, str], columns: int, rows: int) -> None:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.settings_before = termios.tcgetattr(follower)
        self._leader, self._follower = leader, follower
        self.process = subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, env=env, start_new_session=True
        )
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._leader, 65536)
            except OSError:
                return
            if not chunk:
                return
            self._written += chunk

    @property
    def text(self) -> str:
        return self._written.decode(errors="replace")

    def settings(self) -> list[object]:
        """The terminal's modes (echo, line discipline), as the next program would find them."""
        return termios.tcgetattr(self._follower)

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def wait_for(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        wait_until(lambda: text in self.text or self.process.poll() is not None, timeout_s)
        assert text in self.text, f"{text!r} never appeared; the screen was: {self.text[-2000:]!r}"

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._follower)
        self._reader.join(5)
        os.close(self._leader)


class Kvscope:
    """The command line under test, with its own runtime directory so that no engine of the user's is in sight."""

    def __init__(self, runtime_dir: Path) -> None:
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime_dir), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
        self.env.pop("COLUMNS", None)
        self.env.pop("LINES", None)
        self._sessions: list[TerminalSession] = []

    def __call__(self, *arguments: str, timeout_s: float = TIMEOUT_S, **env: str) -> Finished:
        """Run to the end without a terminal and without input."""
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**self.env, **env},
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr.replace(FIRST_RUN, ""))

    def in_terminal(self, *arguments: str, columns: int = 120, rows: int = 36, **env: str) -> TerminalSession:
        session = TerminalSession((*COMMAND, *arguments), {**self.env, **env}, columns, rows)
        self._sessions.append(session)
        return session

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start in the background with pipes; the caller ends it."""
        return subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env,
        )

    def close(self) -> None:
        for session in self._sessions:
            session.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Poll a condition; fails when it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened within {timeout_s} s"
        time.sleep(0.02)


def children_of(parent: int) -> list[int]:
    """Processes that were started by `parent`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def kvscope(tmp_path: Path) -> Iterator[Kvscope]:
    command = Kvscope(tmp_path)
    yield command
    command.close()
