"""An engine as a child process: `kvscope serve`, started, waited for, and always stopped.

    starting -> ready -> stopped;   starting -> failed

The child watches its standard input, a pipe whose other end only this process holds: however this process dies, the
pipe closes and the child stops.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from kvscope.dashboard.errors import CommandError, ExitCode

READY_TIMEOUT_S = 180.0  # a cold disk reads torch slowly
STOP_TIMEOUT_S = 10.0  # a recording is closed on the way out
POLL_S = 0.05
NOTICED_S = 0.5  # a longer wait wants a word
NUM_LOG_LINES = 20


class EngineProcess:
    """A context manager around the child; its output goes to a file without a name, which ends with this process."""

    def __init__(self, name: str, serve_arguments: Sequence[str]) -> None:
        self.name = name
        self._arguments = [*serve_arguments, "--name", name, "--until-stdin-closes"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "kvscope.dashboard.cli", "serve", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for the dashboard, which stops the child in order
        )
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()

    def wait_until_ready(self, on_wait: Callable[[float], None], timeout_s: float = READY_TIMEOUT_S) -> None:
        """Block until the sockets answer, calling `on_wait` with the seconds so far.

        Raises:
            CommandError: the child ended, or took too long; the message carries what it said last.
        """
        started = time.monotonic()
        ready_line = f"kvscope: engine {self.name} ready"
        while ready_line not in self._read_log():
            elapsed_s = time.monotonic() - started
            if not self.is_running():
                raise self._failure("the engine did not start")
            if elapsed_s > timeout_s:
                raise self._failure(f"the engine was not ready after {timeout_s:.0f} s")
            on_wait(elapsed_s)
            time.sleep(POLL_S)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def failure(self) -> CommandError:
        """The error to raise when the engine has gone away by itself."""
        return self._failure("the engine ended by itself")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; returns when the child is gone."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with _said_if_slow(process):
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self._process = None

    def _read_log(self) -> str:
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode("utf-8", "replace")

    def _failure(self, what: str) -> CommandError:
        """One line when the child gave one; the end of its log otherwise, on stderr before the line."""
        lines = [line for line in self._read_log().splitlines() if line.strip()]
        code = self._process.poll() if self._process is not None else None
        last = lines[-1] if lines else "it said nothing"
        if last.startswith("kvscope: "):
            return CommandError(last.removeprefix("kvscope: "), code or ExitCode.USAGE)
        print(*lines[-NUM_LOG_LINES:], sep="\n", file=sys.stderr)  # noqa: T201 - the child's own words
        return CommandError(f"{what} (exit code {code})", ExitCode.FAILURE)


@contextmanager
def _said_if_slow(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """On a terminal, a line for as long as the block waits for a child that takes its time."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(NOTICED_S)
    is_shown = process.poll() is None and sys.stderr.isatty()
    if is_shown:
        print("kvscope: stopping the engine", end="", file=sys.stderr, flush=True)  # noqa: T201 - taken away below
    try:
        yield
    finally:
        if is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # noqa: T201
