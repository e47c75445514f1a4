"""The prompt: text with trailing options, checked before it leaves, with a history."""

import os.path
import re
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import msgspec
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static, TextArea
from textual.widgets.text_area import Selection

from kvscope.dashboard.editor import printable_lines
from kvscope.dashboard.prompt_history import MAX_PROMPTS, PromptHistory
from kvscope.events.options import OPTION_NAMES, OptionError, split_prompt
from kvscope.events.text import make_printable
from kvscope.events.types import SamplingParams

HINT = "type a prompt; Enter sends it"
_WORD = re.compile(r"(?:^|\s)([a-z][a-z_]{2,})$")


def complete_option(line: str) -> str | None:
    """The line with its last word, three letters or more of an option's name, completed as far as it is clear."""
    found = _WORD.search(line)
    names = [f"{name}=" for name in OPTION_NAMES if found is not None and name.startswith(found[1])]
    completed = os.path.commonprefix(names)  # noqa: RUF071 - character by character is what is wanted
    return line + completed[len(found[1]) :] if found is not None and len(completed) > len(found[1]) else None


class PromptInput(TextArea):
    """Up and down recall what was submitted, now and in earlier sessions; Tab completes an option; it grows by lines.

    Keys act in the order they arrive, also when a terminal delivers many at once: the text is handed to `submit`, which
    takes it or leaves it, before the key after Enter is looked at.
    """

    BINDINGS: ClassVar = [
        Binding("enter", "submit", "send"),
        Binding("ctrl+j,alt+enter,shift+enter", "newline", "new line"),
        Binding("up", "recall(-1)", "earlier prompt", show=False),
        Binding("down", "recall(1)", "later prompt", show=False),
        Binding("tab", "complete", "complete option"),
        Binding("escape", "app.leave_prompt", "back"),
    ]

    def __init__(self, placeholder: str, submit: Callable[[str], None]) -> None:
        super().__init__(
            id="prompt", compact=True, placeholder=placeholder, highlight_cursor_line=False, tab_behavior="focus"
        )
        self._submit = submit
        self._kept: PromptHistory | None = None
        self.earlier: list[str] = []
        self._place = 0
        self._draft = ""

    @property
    def value(self) -> str:
        return self.text

    @value.setter
    def value(self, text: str) -> None:
        """With the cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def keep_in(self, kept: PromptHistory) -> None:
        """Recall from, and add to, what is kept between sessions."""
        self._kept = kept
        self.earlier = [*kept.load(), *self.earlier]
        self._place = len(self.earlier)

    def remember(self, line: str) -> None:
        if self._kept is not None:
            self._kept.add(line)
        if not self.earlier or self.earlier[-1] != line:
            self.earlier = [*self.earlier, line][-MAX_PROMPTS:]
        self._place, self._draft = len(self.earlier), ""

    def update_suggestion(self) -> None:
        """Shows, faintly, what Tab would complete."""
        completed = self._completed()
        self.suggestion = completed[len(self.value) :] if completed is not None else ""

    async def on_key(self, event: events.Key) -> None:
        """Run a key of this input here and now: the app would get to it only after the letters that follow it."""
        bound = None if event.is_printable else self.screen.active_bindings.get(event.key)
        if bound is not None and bound.node is self:
            event.stop()
            event.prevent_default()
            await self.run_action(bound.binding.action)

    def action_submit(self) -> None:
        self._submit(self.value)

    def action_newline(self) -> None:
        self.replace("\n", *self.selection)

    def action_recall(self, step: int) -> None:
        """In a text of several lines the arrow keys move in it first."""
        is_last = self.navigator.is_first_wrapped_line if step < 0 else self.navigator.is_last_wrapped_line
        if not is_last(self.cursor_location):
            (self.action_cursor_up if step < 0 else self.action_cursor_down)()
            return
        if self._place == len(self.earlier):
            self._draft = self.value
        self._place = min(max(self._place + step, 0), len(self.earlier))
        self.value = self.earlier[self._place] if self._place < len(self.earlier) else self._draft

    def action_complete(self) -> None:
        completed = self._completed()
        if completed is None:
            self.screen.focus_next()
        else:
            self.value = completed

    def _completed(self) -> str | None:
        return complete_option(self.value) if self.cursor_location == self.document.end else None

    def on_paste(self, event: events.Paste) -> None:
        """Keep every pasted line; what a terminal would obey becomes visible."""
        event.prevent_default()
        event.stop()
        self.replace(printable_lines(event.text), *sorted(self.selection))

    def point_at(self, word: str) -> None:
        """Select its last occurrence."""
        start = self.value.rfind(word) if word else -1
        if start >= 0:
            self.focus()
            at = self.document.get_location_from_index  # type: ignore[attr-defined]  # every document has it
            self.selection = Selection(at(start), at(start + len(word)))


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
        self._shown = defaults  # beside the line
        self.max_model_len: int | None = None  # positions, where it is known

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
        if message is not None:  # else the screen would be laid out again for every key
            line.update(Content(make_printable(message)))
        line.display = message is not None

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        event.stop()
        if self.input.value != self._noted:  # else the news is older than the note
            self.note(None)
        self._show_options(self.input.value)
        if self.input.value:
            self.post_message(self.Typed())

    def _show_options(self, line: str) -> None:
        """The options in force for the line as it stands, but for one that is being written."""
        for known in (line, line.rstrip().rpartition(" ")[0]):
            with suppress(OptionError):
                _, params = split_prompt(known, self._defaults)
                break
        else:
            return
        if params != self._shown:
            self._shown = params
            self.query_one("#prompt-defaults", Static).update(Content(describe_params(params)))

    def submit(self, line: str, *, is_typed: bool = True) -> None:
        """Check the line; a good one is posted as `Submitted`, a bad one is explained and its word selected."""
        try:
            text, params = split_prompt(line, self._defaults)
        except OptionError as error:
            self.input.point_at(error.word)
            self.note(str(error))
            return
        if not text:
            self.note("the prompt is empty" if line.strip() else None)
            return
        if is_typed:
            self.input.remember(line)
        with self.prevent(TextArea.Changed):
            self.input.value = ""
        self._show_options("")
        longest = self.max_model_len
        self.note(
            f"max_tokens={params.max_tokens}: the model's length ends it at {longest} positions, prompt included"
            if longest is not None and params.max_tokens >= longest
            else None
        )
        self.post_message(self.Submitted(line, text, params))


def describe_params(params: SamplingParams) -> str:
    """The options a plain prompt gets, as a person would type them."""
    shown = {name: value for name, value in msgspec.structs.asdict(params).items() if value != _BASE[name]}
    words = {"n": params.n, "max_tokens": params.max_tokens, "temperature": params.temperature} | shown
    return "  ".join(f"{name}={value}" for name, value in words.items()) + " "


_BASE = msgspec.structs.asdict(SamplingParams())
