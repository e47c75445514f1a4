"""Output on a slow line: an app that sends changed cells only, and no picture before the last one has been taken.

Textual queues thirty writes and then blocks its event loop, keystrokes and all. Here what is wanted is kept as a
picture; while the terminal is still busy with the last frame the next ones only change the picture, and what has
become different by the time there is room goes out as one frame.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from textual import events
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver

from kvscope.dashboard.canvas import Canvas, color_system

if TYPE_CHECKING:
    from rich.console import Console
    from textual.driver import Driver


class TerminalDriver(LinuxDriver):
    """Textual's driver, which knows whether the terminal has taken everything it was given."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file: Any = _Told(self._file, self._take)
        self._num_given = self._num_taken = 0  # texts; the second is the writer thread's
        self._waiting: list[Callable[[], None]] = []
        self.num_starts = 0  # of application mode: the terminal's screen is blank after each

    def start_application_mode(self) -> None:
        self.num_starts += 1
        super().start_application_mode()

    def write(self, data: str) -> None:
        self._num_given += 1
        super().write(data)

    @property
    def has_room(self) -> bool:
        return self._num_given == self._num_taken

    def when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Call back once, on the event loop, when everything given so far has been taken."""
        if callback not in self._waiting:
            self._waiting.append(callback)
        if self.has_room:
            self._loop.call_soon(self._wake)

    def _take(self) -> None:
        self._num_taken += 1
        if self._waiting and self.has_room:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        callbacks, self._waiting = self._waiting, []
        for callback in callbacks:
            callback()


class _Told:
    """A file that tells when the operating system has taken a text."""

    def __init__(self, file: IO[str], taken: Callable[[], None]) -> None:
        self._file, self._taken = file, taken

    def write(self, text: str) -> None:
        with suppress(OSError):  # the terminal has gone; a signal tells the app
            self._file.write(text)
            self._file.flush()
        self._taken()

    def flush(self) -> None:
        """Every text has been flushed."""

    def fileno(self) -> int:
        return self._file.fileno()


class _Changes(CompositorUpdate):
    """A frame: what has changed by the time it is rendered."""

    def __init__(self, canvas: Canvas) -> None:
        self._canvas = canvas

    def render_segments(self, console: "Console") -> str:
        return self._canvas.take_changes()


class SparingApp(App[None]):
    """An app that is sparing with its terminal. Headless, and on terminals of another kind, it is any app."""

    def __init__(self, *, ansi_color: bool | None = None) -> None:
        self._canvas = Canvas()
        self._num_starts = 0
        self._cursor_sent: tuple[int, int] | None = None
        super().__init__(ansi_color=ansi_color)

    def get_driver_class(self) -> "type[Driver]":
        usual = super().get_driver_class()
        return TerminalDriver if usual is LinuxDriver else usual

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Resize):
            self._canvas.forget()
        await super().on_event(event)

    def _display(self, screen: Any, renderable: Any) -> None:
        """Where Textual hands over what it has rendered; there is no public place for it."""
        if not (isinstance(self._driver, TerminalDriver) and isinstance(renderable, LayoutUpdate | ChopsUpdate)):
            super()._display(screen, renderable)
            return
        self._paint(renderable)
        self._send()

    def _paint(self, update: LayoutUpdate | ChopsUpdate) -> None:
        canvas, colors = self._canvas, color_system(self.console.color_system)
        if isinstance(update, LayoutUpdate):
            region = update.region
            if (canvas.width, canvas.height) != (region.right, region.bottom):
                canvas.resize(region.right, region.bottom)
            for y, strips in enumerate(update.strips, region.y):
                x = region.x
                for strip in strips:
                    canvas.paint(x, y, strip, colors)
                    x += strip.cell_length
            return
        for y, start, stop in update.spans:
            for end, (x, chop) in zip(update.chop_ends[y], update.chops[y].items(), strict=False):
                if chop is not None and x < stop and end > start:
                    canvas.paint(x, y, chop, colors)

    def _send(self) -> None:
        """One frame, now or as soon as there is room."""
        driver = self._driver
        if not isinstance(driver, TerminalDriver) or not self.screen_stack:
            return
        if driver.num_starts != self._num_starts:
            self._num_starts = driver.num_starts
            self._canvas.forget()
        if not self._canvas.differs() and self._cursor_sent == self.cursor_position:
            self.post_display_hook()
        elif driver.has_room:
            self._cursor_sent = self.cursor_position
            super()._display(self.screen, _Changes(self._canvas))
        else:
            driver.when_there_is_room(self._send)

    def when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Call back when another picture makes sense: the terminal has taken the last one, or nobody knows."""
        if isinstance(self._driver, TerminalDriver):
            self._driver.when_there_is_room(callback)
        else:
            callback()
