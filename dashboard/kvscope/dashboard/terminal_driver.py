"""Textual's driver for a terminal, which knows whether there is room on the line for another frame.

Textual queues thirty writes and then blocks its event loop, keystrokes and all. Whoever asks for room first never
fills that queue. The operating system tells what it has taken; behind ssh that says little, for daemons and sockets
on the way hold megabytes. There every frame ends with a question that terminals answer, and the answer says that
everything before it has arrived.
"""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.drivers.linux_driver import LinuxDriver
from textual.keys import Keys
from textual.message import Message
from textual.messages import TerminalSupportsSynchronizedOutput

# Alt+Enter, from terminals that have no other way to say it: another line of a prompt.
cast("dict[str, tuple[Keys, ...]]", ANSI_SEQUENCES_KEYS)["\x1b\r"] = (Keys.ControlJ,)
QUESTION = "\x1b[?2026$p"  # do you know synchronised updates? Textual asks the same once
MAX_ON_THE_WAY = 16_000  # characters for which no receipt has come: 64 ms at 250 kB/s
PATIENCE_S = 2.0  # for a receipt; terminals come and go under tmux and the like
LATE_S = 6.0  # after so long an answer that did not come is lost; until then it may come yet, before those to come
GOODBYE_S = 0.5  # ... when leaving: an answer that came later would be typed into the shell


class TerminalDriver(LinuxDriver):
    """`has_room` and `when_there_is_room` are for the event loop's thread."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file: Any = _Told(self._file, self._take, self._lose)
        self._num_given = self._num_taken = 0  # texts; the second is the writer thread's
        self._size_given = self._size_received = 0  # characters
        self._asked: deque[tuple[float, int]] = deque()  # when, and how much had been given by then
        self._late: deque[float] = deque()  # when that was asked which is waited for no longer
        self._answers = False
        self._held: list[str] | None = None  # texts that will be written as one
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.num_starts = 0  # of application mode: the terminal's screen is blank after each

    # --- Textual's ------------------------------------------------------------------------------------------------

    def start_application_mode(self) -> None:
        self.num_starts += 1
        super().start_application_mode()  # type: ignore[no-untyped-call]  # Textual ships it without annotations

    def stop_application_mode(self) -> None:
        deadline = time.monotonic() + GOODBYE_S
        while (self._asked or self._owes()) and time.monotonic() < deadline:
            time.sleep(0.005)
        self._asked.clear()
        self._late.clear()
        super().stop_application_mode()

    def write(self, data: str) -> None:
        if self._held is None:
            self._give(data)
        else:
            self._held.append(data)

    def process_message(self, message: Message) -> None:
        """On the thread that reads: an answer is a receipt, unless it is the first one, or too late to be one."""
        if isinstance(message, TerminalSupportsSynchronizedOutput):
            self._answers = True
            if self._owes():
                self._late.popleft()
                return
            with suppress(IndexError):
                self._size_received = self._asked.popleft()[1]
                self._tell()
                return
        super().process_message(message)

    # --- ours -----------------------------------------------------------------------------------------------------

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """What is written within is one text: each wakes the writer's thread, and the event loop waits for it."""
        held: list[str] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
            self._give("".join(held))

    def _give(self, text: str) -> None:
        """To the writer's thread."""
        self._num_given += 1
        self._size_given += len(text)
        super().write(text)

    def ask_for_receipt(self) -> None:
        """Of everything written so far, where the terminal answers at all."""
        if self._answers:
            self.write(QUESTION)
            self._asked.append((time.monotonic(), self._size_given))

    @property
    def has_room(self) -> bool:
        if self._num_given != self._num_taken:
            return False
        try:
            asked_s, _ = self._asked[0]
        except IndexError:
            return True
        if asked_s + PATIENCE_S < time.monotonic():
            self._late.extend(asked_s for asked_s, _ in self._asked)
            self._asked.clear()
            return True
        return self._size_given - self._size_received <= MAX_ON_THE_WAY

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way, as far as any thread can tell."""
        return self._num_given == self._num_taken and not self._asked

    def tell_of_room(self, callback: Callable[[], None]) -> None:
        """`when_there_is_room`, from any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.when_there_is_room, callback)

    def _owes(self) -> bool:
        """Answers may come that belong to what was asked before a stall: they say nothing about later frames."""
        with suppress(IndexError):  # the other thread may take one
            while self._late[0] + LATE_S < time.monotonic():
                self._late.popleft()
        return bool(self._late)

    def when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Call back once, on the event loop, when there is."""
        if callback not in self._waiting:
            self._waiting.append(callback)
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        if self.has_room:
            callbacks, self._waiting = self._waiting, []
            for callback in callbacks:
                callback()
        elif self._waiting and self._asked and self._timer is None:
            self._timer = self._loop.call_later(PATIENCE_S, self._look_for_the_lost)

    def _look_for_the_lost(self) -> None:
        self._timer = None
        self._look()

    def _take(self) -> None:
        self._num_taken += 1
        self._tell()

    def _lose(self) -> None:
        """The terminal has gone. Whoever has no controlling terminal gets no SIGHUP, and would go on for ever."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self._app.exit(return_code=128 + signal.SIGHUP))

    def _tell(self) -> None:
        """From another thread: there may be room."""
        if self._waiting:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._look)


class _Told:
    """A file that tells when the operating system has taken a text, or never will."""

    def __init__(self, file: IO[str], taken: Callable[[], None], lost: Callable[[], None]) -> None:
        self._file, self._taken, self._lost = file, taken, lost

    def write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:
            self._lost()
        self._taken()

    def flush(self) -> None:
        """Every text has been flushed."""

    def fileno(self) -> int:
        return self._file.fileno()
