"""A small choice of what the engine pauses at: what is set is marked, Enter sets, x clears."""

from typing import ClassVar

from rich.segment import Segment
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widgets import Input, SelectionList

from kvscope.events.notable import BREAKPOINTS
from kvscope.events.state import Breakpoints

MARKED, UNMARKED = "[x]", "[ ]"
HINT = "free blocks below: a number, or nothing"


class MarkList(SelectionList[str]):
    """Tells what is marked by its sign; Textual's own list does it by colour alone."""

    def render_line(self, y: int) -> Strip:
        strip = super().render_line(y)
        place = self.scroll_offset.y + y
        if place >= self.option_count:
            return strip
        sign = MARKED if self.get_option_at_index(place).value in self.selected else UNMARKED
        rest = list(strip)[len(sign) :]  # its button has a segment to each character
        return Strip([Segment(sign, rest[0].style), *rest])


class BreakpointsScreen(ModalScreen[Breakpoints | None]):
    """Enter sets what is marked, Esc leaves things as they are."""

    BINDINGS: ClassVar = [
        Binding("enter", "set", "set", show=False, priority=True),
        Binding("x", "clear", "clear", show=False, priority=True),  # no digit: the number's line can spare it
        Binding("escape", "leave", "close", show=False),
    ]

    def __init__(self, current: Breakpoints) -> None:
        super().__init__()
        self._current = current

    def compose(self) -> ComposeResult:
        free_below = self._current.free_below
        with Vertical(id="breakpoints") as box:
            yield MarkList(*((name, name, name in self._current.events) for name in BREAKPOINTS))
            yield Input("" if free_below is None else str(free_below), placeholder=HINT, type="integer", max_length=8)
        box.border_title = "Pause the engine at the next"
        box.border_subtitle = "Space marks  Tab number  Enter sets  x clears"

    def action_set(self) -> None:
        text = self.query_one(Input).value
        if text and not (text.isdecimal() and int(text) > 0):
            self.query_one("#breakpoints").border_subtitle = "free blocks below: a whole number from 1"
            return
        marked = frozenset(self.query_one(SelectionList).selected)
        events = tuple(name for name in BREAKPOINTS if name in marked)
        self.dismiss(Breakpoints(events=events, free_below=int(text) if text else None))

    def action_clear(self) -> None:
        self.dismiss(Breakpoints())

    def action_leave(self) -> None:
        self.dismiss(None)
