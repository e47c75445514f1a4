"""One line that filters the list behind it while it is typed."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input

from kvscope.dashboard.filters import HINT, FilterError, Query, parse_query


class FilterChanged(Message):
    """The text so far, and what it means."""

    def __init__(self, pane: str, text: str, query: Query) -> None:
        super().__init__()
        self.pane, self.text, self.query = pane, text, query


class FilterScreen(ModalScreen[None]):
    """Enter keeps the filter, Esc clears it."""

    BINDINGS: ClassVar = [
        Binding("escape", "clear", "clear", show=False),
        Binding("ctrl+u", "empty", "empty", show=False, priority=True),  # the line's own comes after what is typed next
    ]

    def __init__(self, pane: str, text: str) -> None:
        super().__init__()
        self._pane, self._text = pane, text

    def compose(self) -> ComposeResult:
        line = Input(self._text, placeholder=HINT, id="filter")
        line.border_title = f"Filter the {self._pane}: Enter keeps, Esc clears"
        yield line

    def on_input_changed(self, event: Input.Changed) -> None:
        try:
            query = parse_query(event.value)
        except FilterError as error:
            event.input.border_subtitle = Content(str(error))  # what was typed is not markup
            return
        event.input.border_subtitle = Content("")
        self.app.post_message(FilterChanged(self._pane, event.value.strip(), query))

    def on_input_submitted(self) -> None:
        self.dismiss()

    def action_empty(self) -> None:
        self.query_one(Input).value = ""

    def action_clear(self) -> None:
        self.app.post_message(FilterChanged(self._pane, "", Query()))
        self.dismiss()
