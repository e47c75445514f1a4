"""The prompt line: text with trailing options, checked before it leaves, with a history."""

from typing import ClassVar

import msgspec
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static
from textual.widgets.input import Selection

from kvscope.events.options import OptionError, split_prompt
from kvscope.events.text import make_printable
from kvscope.events.types import SamplingParams

HINT = "type a prompt; Enter sends it"
READ_ONLY_HINT = "read-only: this view has no engine to send prompts to"


class PromptInput(Input):
    """A one-line input whose up and down keys recall what was submitted in this session."""

    BINDINGS: ClassVar = [
        Binding("up", "recall(-1)", "earlier prompt"),
        Binding("down", "recall(1)", "later prompt"),
        Binding("escape", "app.leave_prompt", "to the grid"),
    ]

    def __init__(self, placeholder: str) -> None:
        super().__init__(placeholder=placeholder, id="prompt", compact=True, select_on_focus=False)
        self.history: list[str] = []
        self._place = 0
        self._draft = ""

    def remember(self, line: str) -> None:
        if not self.history or self.history[-1] != line:
            self.history.append(line)
        self._place, self._draft = len(self.history), ""

    def action_recall(self, step: int) -> None:
        if self._place == len(self.history):
            self._draft = self.value
        self._place = min(max(self._place + step, 0), len(self.history))
        self.value = self.history[self._place] if self._place < len(self.history) else self._draft
        self.cursor_position = len(self.value)

    def on_paste(self, event: events.Paste) -> None:
        """Keep every pasted line: line breaks become spaces, what a terminal would obey becomes visible."""
        event.prevent_default()
        event.stop()
        text = make_printable(" ".join(event.text.splitlines()))
        self.replace(text, *sorted(self.selection))


class PromptBar(Vertical):
    """The input, the defaults it starts from, and a line for what is wrong with it."""

    class Submitted(Message):
        """A prompt with valid options, ready for the engine."""

        def __init__(self, line: str, text: str, params: SamplingParams) -> None:
            super().__init__()
            self.line, self.text, self.params = line, text, params

    class Typed(Message):
        """The user has started to write."""

    def __init__(self, defaults: SamplingParams, *, read_only: str | None) -> None:
        """`read_only` is why nothing can be sent, if so."""
        super().__init__(id="prompt-bar")
        self._defaults, self._read_only = defaults, read_only

    def compose(self) -> ComposeResult:
        yield Static("", id="prompt-note", markup=False)
        with Horizontal(id="prompt-row"):
            yield Static(" > ", id="prompt-mark", markup=False)
            yield PromptInput(self._read_only or HINT)
            yield Static(Content("" if self._read_only else describe_params(self._defaults)), id="prompt-defaults")

    def on_mount(self) -> None:
        self.note(None)
        self.input.disabled = self._read_only is not None

    @property
    def input(self) -> PromptInput:
        return self.query_one(PromptInput)

    def note(self, message: str | None) -> None:
        """Show one line about the prompt, or take it away."""
        line = self.query_one("#prompt-note", Static)
        line.update(Content(f"   {make_printable(message)}" if message else ""))
        line.display = message is not None

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.note(None)
        if event.value:
            self.post_message(self.Typed())

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.submit(event.value)

    def submit(self, line: str) -> None:
        """Check the line; a good one is posted as `Submitted`, a bad one is explained and its word selected."""
        try:
            text, params = split_prompt(line, self._defaults)
        except OptionError as error:
            self._point_at(error.word)
            self.note(str(error))
            return
        if not text:
            self.note("the prompt is empty" if line.strip() else None)
            return
        self.input.remember(line)
        with self.prevent(Input.Changed):
            self.input.value = ""
        self.note(None)
        self.post_message(self.Submitted(line, text, params))

    def _point_at(self, word: str) -> None:
        start = self.input.value.rfind(word) if word else -1
        if start >= 0:
            self.input.focus()
            self.input.selection = Selection(start, start + len(word))


def describe_params(params: SamplingParams) -> str:
    """The options a plain prompt gets, as a person would type them."""
    shown = {name: value for name, value in msgspec.structs.asdict(params).items() if value != _BASE[name]}
    words = {"n": params.n, "max_tokens": params.max_tokens, "temperature": params.temperature} | shown
    return "  ".join(f"{name}={value}" for name, value in words.items()) + " "


_BASE = msgspec.structs.asdict(SamplingParams())
