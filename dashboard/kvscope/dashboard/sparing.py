"""Output on a slow line: an app that sends changed cells only, and no picture before the last one has gone.

What is wanted is kept as a picture. While the line is busy with a frame the next ones only change the picture; what
differs by the time there is room goes out as one frame.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textual import events
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver

from kvscope.dashboard.canvas import Canvas, colors_of
from kvscope.dashboard.terminal_driver import TerminalDriver

if TYPE_CHECKING:
    from rich.console import Console
    from textual.driver import Driver

HURRY_S = 0.25  # after a key nothing is held back


class _Changes(CompositorUpdate):
    """A frame: what has changed by the time it is rendered."""

    def __init__(self, canvas: Canvas) -> None:
        self._canvas = canvas

    def render_segments(self, console: "Console") -> str:
        return self._canvas.take_changes()


class SparingApp(App[None]):
    """An app that is sparing with its terminal. Headless, and on terminals of another kind, it is any app.

    `max_frames_per_second` is for a line to somewhere else: no more are sent, except for what a key causes, and
    none before the terminal has received the last ones.
    """

    max_frames_per_second: int | None = None

    def __init__(self, *, ansi_color: bool | None = None, color_system: str = "auto") -> None:
        super().__init__(ansi_color=ansi_color)
        self._canvas = Canvas(colors_of(self.console.color_system if color_system == "auto" else color_system))
        self._num_starts = 0
        self._cursor_sent: tuple[int, int] | None = None
        self._next_frame_s = self._hurry_until_s = 0.0
        self._sending_later: asyncio.TimerHandle | None = None

    def get_driver_class(self) -> "type[Driver]":
        usual = super().get_driver_class()
        return TerminalDriver if usual is LinuxDriver else usual

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Resize):
            self._canvas.forget()
        elif isinstance(event, events.Key | events.Paste | events.MouseDown):
            self._hurry_until_s = time.monotonic() + HURRY_S
        await super().on_event(event)

    def action_redraw(self) -> None:
        """Send everything again: what another program has written over cells that do not change would stay."""
        self._canvas.forget()
        self.screen.refresh()

    def when_there_is_room(self, callback: Callable[[], None]) -> None:
        """Call back when another picture makes sense: the line is free, or nobody knows."""
        if isinstance(self._driver, TerminalDriver):
            self._driver.when_there_is_room(callback)
        else:
            callback()

    def _display(self, screen: Any, renderable: Any) -> None:
        """Where Textual hands over what it has rendered; there is no public place for it."""
        driver = self._driver
        if not (isinstance(driver, TerminalDriver) and isinstance(renderable, LayoutUpdate | ChopsUpdate)):
            super()._display(screen, renderable)
            return
        if driver.num_starts != self._num_starts:
            self._num_starts = driver.num_starts
            self._canvas.forget()
        self._paint(renderable)
        self._send()

    def _paint(self, update: LayoutUpdate | ChopsUpdate) -> None:
        canvas = self._canvas
        if isinstance(update, LayoutUpdate):
            region = update.region
            canvas.resize(region.right, region.bottom)
            for y, strips in enumerate(update.strips, region.y):
                x = region.x
                for strip in strips:
                    canvas.paint(x, y, strip)
                    x += strip.cell_length
            return
        if canvas.resize(update.chop_ends[0][-1], len(update.chops)):
            self.screen.refresh()  # the lines that are not in the update
        for y, start, stop in update.spans:
            for end, (x, chop) in zip(update.chop_ends[y], update.chops[y].items(), strict=False):
                if chop is not None and x < stop and end > start:
                    canvas.paint(x, y, chop)

    def _send(self) -> None:
        """One frame: now, when it is time, or when there is room."""
        driver, now = self._driver, time.monotonic()
        if not isinstance(driver, TerminalDriver) or not self.screen_stack:
            return
        if not self._canvas.differs() and self._cursor_sent == self.cursor_position:
            self.post_display_hook()
        elif self._hurry_until_s < now < self._next_frame_s:
            self._send_at(self._next_frame_s - now)
        elif not driver.has_room:
            driver.when_there_is_room(self._send)
        else:
            self._cursor_sent = self.cursor_position
            super()._display(self.screen, _Changes(self._canvas))
            if self.max_frames_per_second is not None:
                driver.ask_for_receipt()
                self._next_frame_s = max(self._next_frame_s, now - 0.02) + 1 / self.max_frames_per_second

    def _send_at(self, delay_s: float) -> None:
        if self._sending_later is not None:
            self._sending_later.cancel()
        self._sending_later = asyncio.get_running_loop().call_later(delay_s, self._send)
