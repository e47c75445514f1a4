"""Output on a slow line: an app that sends changed cells only, and no picture before the last one has gone.

What is wanted is kept as a picture. While the line is busy with a frame the next ones only change the picture; what
differs by the time there is room goes out as one frame.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from textual import events
from textual._compositor import ChopsUpdate, CompositorUpdate, LayoutUpdate
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Region
from textual.strip import Strip

from kvscope.dashboard.canvas import Canvas, Sgrs, colors_of
from kvscope.dashboard.terminal_driver import TerminalDriver

if TYPE_CHECKING:
    from rich.console import Console
    from textual.driver import Driver
    from textual.widget import Widget

HURRY_S = 0.25  # after a key nothing is held back


class _Changes(CompositorUpdate):
    """A frame: what has changed by the time it is rendered."""

    def __init__(self, canvas: Canvas) -> None:
        self._canvas = canvas

    def render_segments(self, console: "Console") -> str:
        return self._canvas.take_changes()


class Opening(NamedTuple):
    """Where a widget's content is in the picture, for the widget to draw there."""

    canvas: Canvas
    region: Region

    def paint(self, row: int, strip: Strip, sgrs: Sgrs | None = None) -> None:
        width, length = self.region.width, strip.cell_length
        if row < self.region.height:
            whole = strip if length <= width else strip.adjust_cell_length(width)
            self.canvas.paint(self.region.x, self.region.y + row, whole, sgrs, max(width - length, 0))

    def lay(self, row: int, cells: Sequence[str], styles: Sequence[str]) -> None:
        """The same with cells, as many as there is room for."""
        if row < self.region.height:
            self.canvas.lay(self.region.x, self.region.y + row, cells, styles)

    def put(self, row: int, column: int, cells: Sequence[tuple[int, str, str]]) -> None:
        """The same with single cells, each as many columns after this one as it says."""
        if row < self.region.height:
            self.canvas.put(self.region.x + column, self.region.y + row, cells)


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
        self._sending_soon: asyncio.Handle | None = None
        self._arranged: object = None
        self._openings: dict[tuple[Widget, int | None], Opening | None] = {}  # as the screen is arranged now

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

    def has_room(self, callback: Callable[[], None]) -> bool:
        """From any thread: whether another picture makes sense, as the line is free, or nobody knows. Else call back
        when it does: to do so always would wake the event loop after each frame.
        """
        driver = self._driver
        if not isinstance(driver, TerminalDriver) or driver.is_idle:
            return True
        driver.tell_of_room(callback)
        return False

    def _display(self, screen: Any, renderable: Any) -> None:
        """Where Textual hands over what it has rendered; there is no public place for it."""
        driver = self._driver
        if not (isinstance(driver, TerminalDriver) and isinstance(renderable, LayoutUpdate | ChopsUpdate)):
            super()._display(screen, renderable)
            return
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

    def find_opening(self, widget: "Widget", border_row: int | None = None) -> Opening | None:
        """Where a widget's content, or a row of its border, is in the picture, if it may be drawn there at once.

        None where Textual must put the picture together: something lies over it, or soon it will be elsewhere.
        """
        stack, canvas = self.screen_stack, self._canvas
        if len(stack) != 1 or self._batch_count or not isinstance(self._driver, TerminalDriver):
            return None
        if stack[0]._layout_required or (canvas.width, canvas.height) != self.size:
            return None
        arranged = stack[0]._compositor.visible_widgets
        if arranged is not self._arranged:
            self._arranged, self._openings = arranged, {}
        place = widget, border_row
        if place not in self._openings:
            region = widget.scrollable_content_region if border_row is None else _row_of(widget, border_row)
            is_open = widget in arranged and _is_open(widget, region, arranged)
            self._openings[place] = Opening(canvas, region) if is_open else None
        return self._openings[place]

    def send_soon(self) -> None:
        """The picture has changed; more may be on the way."""
        if self._sending_soon is None:
            self._sending_soon = asyncio.get_running_loop().call_soon(self._send)

    def send_now(self) -> None:
        """If it has, no more is on the way: another turn of the event loop is spared."""
        soon, self._sending_soon = self._sending_soon, None
        if soon is not None:
            soon.cancel()
            self._send()

    def _send(self) -> None:
        """One frame: now, when it is time, or when there is room."""
        driver, now = self._driver, time.monotonic()
        if not isinstance(driver, TerminalDriver) or not self.screen_stack:
            return
        self._sending_soon = None
        if driver.num_starts != self._num_starts:
            self._num_starts = driver.num_starts
            self._canvas.forget()
        if not self._canvas.differs() and self._cursor_sent == self.cursor_position:
            self.post_display_hook()
        elif self._hurry_until_s < now < self._next_frame_s:
            self._send_at(self._next_frame_s - now)
        elif not driver.has_room:
            driver.when_there_is_room(self._send)
        else:
            self._cursor_sent = self.cursor_position
            with driver.as_one():
                super()._display(self.screen, _Changes(self._canvas))  # type: ignore[arg-type]  # as Textual does
            if self.max_frames_per_second is not None:
                driver.ask_for_receipt()
                self._next_frame_s = max(self._next_frame_s, now - 0.02) + 1 / self.max_frames_per_second

    def _send_at(self, delay_s: float) -> None:
        if self._sending_later is not None:
            self._sending_later.cancel()
        self._sending_later = asyncio.get_running_loop().call_later(delay_s, self._send)


def _row_of(widget: "Widget", row: int) -> Region:
    x, y, width, _ = widget.region
    return Region(x, y + row, width, 1)


def _is_open(widget: "Widget", part: Region, arranged: "dict[Widget, tuple[Region, Region]]") -> bool:
    """Whether a part of a widget is all there, and uncovered; `arranged` are regions and clips, front to back."""
    in_front = takewhile(lambda other: other is not widget, arranged)
    covered = any(region.intersection(clip).overlaps(part) for region, clip in map(arranged.__getitem__, in_front))
    return bool(part) and not covered and arranged[widget][1].contains_region(part)
