"""The prompt line: text with trailing options, checked before it leaves, with a history."""

import os.path
import re
from collections.abc import Callable
from typing import ClassVar

import msgspec
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.suggester import Suggester
from textual.widgets import Input, Static
from textual.widgets.input import Selection

from kvscope.dashboard.prompt_history import PromptHistory
from kvscope.events.options import OPTION_NAMES, OptionError, split_prompt
from kvscope.events.text import make_printable
from kvscope.events.types import SamplingParams

HINT = "type a prompt; Enter sends it"
READ_ONLY_HINT = "read-only: this view has no engine to send prompts to"


_WORD = re.compile(r"(?:^|\s)([a-z][a-z_]{2,})$")


def complete_option(line: str) -> str | None:
    """The line with its last word, three letters or more of an option's name, completed as far as it is clear."""
    found = _WORD.search(line)
    names = [f"{name}=" for name in OPTION_NAMES if found is not None and name.startswith(found[1])]
    completed = os.path.commonprefix(names)  # noqa: RUF071 - character by character is what is wanted
    return line + completed[len(found[1]) :] if found is not None and len(completed) > len(found[1]) else None


class _OptionSuggester(Suggester):
    """Shows, faintly, what Tab would complete."""

    async def get_suggestion(self, value: str) -> str | None:
        return complete_option(value)


class PromptInput(Input):
    """A one-line input: up and down recall what was submitted, now and in earlier sessions; Tab completes an option.

    Keys act in the order they arrive, also when a terminal delivers many at once: the line is handed to `submit`, which
    takes it or leaves it, before the key after Enter is looked at.
    """

    BINDINGS: ClassVar = [
        Binding("up", "recall(-1)", "earlier prompt"),
        Binding("down", "recall(1)", "later prompt"),
        Binding("tab", "complete", "complete an option; else the next pane"),
        Binding("escape", "app.leave_prompt", "to the grid"),
    ]

    def __init__(self, placeholder: str, submit: Callable[[str], None]) -> None:
        super().__init__(placeholder=placeholder, id="prompt", compact=True, select_on_focus=False)
        self._submit = submit
        self.suggester = _OptionSuggester(case_sensitive=True)
        self._kept: PromptHistory | None = None
        self.history: list[str] = []
        self._place = 0
        self._draft = ""

    def keep_in(self, kept: PromptHistory) -> None:
        """Recall from, and add to, what is kept between sessions."""
        self._kept = kept
        self.history = [*kept.load(), *self.history]
        self._place = len(self.history)

    def remember(self, line: str) -> None:
        if self._kept is not None:
            self._kept.add(line)
        if not self.history or self.history[-1] != line:
            self.history.append(line)
        self._place, self._draft = len(self.history), ""

    async def on_key(self, event: events.Key) -> None:
        """Run a key of this input here and now: the app would get to it only after the letters that follow it."""
        bound = None if event.is_printable else self.screen.active_bindings.get(event.key)
        if bound is not None and bound.node is self:
            event.stop()
            await self.run_action(bound.binding.action)

    async def action_submit(self) -> None:
        self._submit(self.value)

    def action_recall(self, step: int) -> None:
        if self._place == len(self.history):
            self._draft = self.value
        self._place = min(max(self._place + step, 0), len(self.history))
        self.value = self.history[self._place] if self._place < len(self.history) else self._draft
        self.cursor_position = len(self.value)

    def action_complete(self) -> None:
        completed = complete_option(self.value) if self.cursor_position == len(self.value) else None
        if completed is None:
            self.screen.focus_next()
            return
        self.value = completed
        self.cursor_position = len(completed)

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
        self._noted = ""  # the line that the note is about

    def compose(self) -> ComposeResult:
        yield Static("", id="prompt-note", markup=False)
        with Horizontal(id="prompt-row"):
            yield Static(" > ", id="prompt-mark", markup=False)
            yield PromptInput(self._read_only or HINT, self.submit)
            yield Static(Content("" if self._read_only else describe_params(self._defaults)), id="prompt-defaults")

    def on_mount(self) -> None:
        self.note(None)
        self.input.disabled = self._read_only is not None

    @property
    def input(self) -> PromptInput:
        return self.query_one(PromptInput)

    def note(self, message: str | None) -> None:
        """Show one line about the prompt as it stands, or take it away."""
        self._noted = self.input.value
        line = self.query_one("#prompt-note", Static)
        line.update(Content(f"   {make_printable(message)}" if message else ""))
        line.display = message is not None

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.input.value != self._noted:  # else the news is older than the note
            self.note(None)
        if event.value:
            self.post_message(self.Typed())

    def submit(self, line: str, *, is_typed: bool = True) -> None:
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
        if is_typed:
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
