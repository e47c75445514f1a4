"""What the dashboard does with prompts: typed, edited elsewhere, or scripted; and what becomes of them."""

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from textual.app import SuspendNotSupported

from kvscope.dashboard.actions import ActionsApp
from kvscope.dashboard.editor import EditorError, edit_text
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.prompt import PromptBar
from kvscope.dashboard.prompt_history import PromptHistory
from kvscope.dashboard.replies import ask
from kvscope.dashboard.requests_pane import RequestsPane
from kvscope.dashboard.themed import Look
from kvscope.events.types import RequestRefused
from kvscope.transport.source import PendingReply, Source

MAX_REMEMBERED = 1_000


class PromptingApp(ActionsApp):
    """An app with a prompt bar and a list of requests."""

    def __init__(self, source: Source, glyphs: Glyphs, look: Look | None = None) -> None:
        super().__init__(source, glyphs, look)
        self._script: list[str] = []
        self._script_delay_s = 0.0
        self._sent: deque[str] = deque(maxlen=MAX_REMEMBERED)  # requests from here, the last ones

    def script(self, prompts: Sequence[str], delay_s: float) -> None:
        """Prompts to send one after the other, until the user types."""
        self._script, self._script_delay_s = list(prompts), delay_s

    def begin_prompting(self) -> None:
        """The bar is there: recall earlier prompts, begin the script."""
        if self._look.prompts is not None:
            self.query_one(PromptBar).input.keep_in(PromptHistory(self._look.prompts))
        if self._script and self._source.control is not None:
            self.set_timer(self._script_delay_s, self._next_scripted)

    def action_focus_prompt(self) -> None:
        self.screen.set_focus(self.query_one(PromptBar).input)

    def action_edit_prompt(self) -> None:
        """The terminal is the editor's until it ends; the engine goes on."""
        prompt = self.query_one(PromptBar).input
        try:
            with self.suspend():
                text = edit_text(prompt.value)
        except SuspendNotSupported:
            self.tell("no editor here: this terminal cannot be handed over", severity="warning")
        except EditorError as error:
            self.tell(str(error), severity="error")
        else:
            prompt.value = text
            self.action_focus_prompt()

    def action_leave_prompt(self) -> None:
        self.query_one("#grid").focus()

    def on_prompt_bar_typed(self) -> None:
        self._script.clear()

    def on_prompt_bar_submitted(self, message: PromptBar.Submitted) -> None:
        control = self._source.control
        if control is None:
            self.query_one(PromptBar).note(self.no_control)
            return
        options = msgspec.structs.asdict(message.params) | {"stop": list(message.params.stop)}
        self.run_worker(self._submit(lambda: control.submit(message.text, options)), exit_on_error=False)

    async def _submit(self, call: Callable[[], PendingReply]) -> None:
        """What is wrong with a prompt is said where it was typed: by the answer, or by the engine's events later."""
        reply = await ask(call)
        if not reply.ok:
            self.query_one(PromptBar).note(f"prompt refused: {reply.error or 'without a reason'}")
            return
        self._sent.append(reply.request_id)
        self.tell_refused()

    def tell_refused(self) -> None:
        """The engine's refusals of prompts from here, each once."""
        for entry in self.screen_stack[0].query_one(RequestsPane).refused:
            if isinstance(entry.event, RequestRefused) and entry.event.request_id in self._sent:
                self._sent.remove(entry.event.request_id)
                self.screen_stack[0].query_one(PromptBar).note(f"prompt refused: {entry.event.reason}")

    def _next_scripted(self) -> None:
        if self._script:
            self.query_one(PromptBar).submit(self._script.pop(0), is_typed=False)
            self.set_timer(self._script_delay_s, self._next_scripted)
