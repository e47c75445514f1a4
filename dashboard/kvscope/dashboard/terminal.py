"""What the dashboard needs from a terminal, and how it leaves it."""

import asyncio
import gc
import os
import shutil
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from kvscope.dashboard.errors import CommandError

if TYPE_CHECKING:
    from textual.app import App

MIN_COLUMNS, MIN_ROWS = 60, 20
YOUNG_OBJECTS = 10_000  # so many more than there were, and the cycle collector looks at them; Python's own limit is 700
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def has_terminal() -> bool:
    """Whether somebody can both see the dashboard and press keys."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def keys_unheard() -> Iterator[None]:
    """Within the block keys are not echoed, and what was typed is dropped at its end: nobody could see what it did."""
    fd = sys.stdin.fileno() if sys.stdin.isatty() else None
    if fd is None:
        yield
        return
    before = termios.tcgetattr(fd)
    quiet = [*before]
    quiet[3] = before[3] & ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)


def require_terminal(command: str, instead: str) -> None:
    """Raises CommandError when the dashboard cannot be drawn here; `instead` names what works without a terminal."""
    for stream, name in ((sys.stdout, "output"), (sys.stdin, "input")):
        if not stream.isatty():
            raise CommandError(f"{command} needs a terminal, and its {name} is not one; {instead}")
    require_screen(command)


def require_screen(command: str) -> None:
    """Raises CommandError for a terminal that cannot place text, or is too small to begin with."""
    term = os.environ.get("TERM", "")
    if term in ("dumb", "unknown"):
        raise CommandError(
            f"{command} cannot draw with TERM={term}; set TERM to what your terminal is (xterm-256color)"
        )
    columns, rows = shutil.get_terminal_size()
    if columns < MIN_COLUMNS or rows < MIN_ROWS:
        raise CommandError(
            f"{command} needs a terminal of at least {MIN_COLUMNS}x{MIN_ROWS} characters, this one is {columns}x{rows}"
        )


def wants_ascii() -> bool:
    """Whether the terminal's encoding lacks the glyphs the dashboard draws with."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return not encoding.startswith("utf")


def run_screen(app: "App[None]", *, mouse: bool = True) -> int:
    """Run the application until it ends or a signal ends it; the terminal is restored either way. The exit code."""
    # What has been loaded stays. Looking through millions of entries of block tables and logs for cycles, of which
    # they have none, takes an eighth of a busy viewer's time, and 50 ms at once: a key would have to wait for it.
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS // 2, 4, 6)  # few at a time, and seldom at all of them
    with _signals_end(app):
        app.run(mouse=mouse)
    return app.return_code or 0


@contextmanager
def _signals_end(app: "App[None]") -> Iterator[None]:
    """A signal asks the application to leave, so that it puts the terminal back itself."""

    def leave(signum: int, _frame: FrameType | None) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise SystemExit(128 + signum) from None
        # Through the loop: the handler may have interrupted the application anywhere.
        loop.call_soon_threadsafe(lambda: app.exit(return_code=128 + signum))

    with handling(leave):
        yield


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that whatever was started is stopped."""

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    with handling(leave):
        yield


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """For heavy imports: an interrupt inside a C extension's import would surface as that module's ImportError."""
    with handling(lambda signum, _frame: os._exit(128 + signum)):
        yield


@contextmanager
def handling(handler: "signal._HANDLER") -> Iterator[None]:
    """`handler` answers the signals that end a program, within the block; ignored ones (nohup) stay ignored."""
    signals = [signum for signum in _ENDING_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, old in previous.items():
            signal.signal(signum, old)
