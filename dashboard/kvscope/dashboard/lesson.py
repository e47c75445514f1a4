"""`kvscope demo --lesson`: six moments of a paged KV cache, one after the other, on a live engine that waits at each.

The engine is paused; each moment submits and steps until it is reached. Back shows an earlier one from the history.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar, NamedTuple

import msgspec
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.dom import DOMNode
from textual.widget import Widget
from textual.widgets import Input, Static

from kvscope.dashboard.app import DashboardApp
from kvscope.dashboard.keys import app_bindings
from kvscope.dashboard.replies import ask
from kvscope.events.options import split_prompt
from kvscope.events.state import EngineState, SequenceState
from kvscope.transport.source import PendingReply

REACH_TIMEOUT_S = 30.0
POLL_S = 0.02
KEYS = "n next, p back, Esc leave"
FIRST_PROMPT = "To be or not to be max_tokens=5 temperature=0 ignore_eos=true"
SECOND_PROMPT = "To be or not to be max_tokens=4 temperature=0 ignore_eos=true"
TWO_CANDIDATES = "To be or not to be n=2 max_tokens=6 temperature=0.8 seed=3 ignore_eos=true"


class LessonMoment(NamedTuple):
    """`script` leads to the moment: a str is submitted, an int is that many steps.

    It is reached when the open sequences have `written` positions each; the `selected`-th of them is then on show.
    """

    title: str
    caption: str
    script: tuple[str | int, ...]
    written: tuple[int, ...]
    selected: int = 0


MOMENTS = (
    LessonMoment(
        "Blocks as needed",
        "Two requests have 7 and 6 positions written in four blocks of 4 slots: 3 reserved slots are empty, 8 free. "
        "Had the first one reserved 20 of the 24 slots at once, the second would still be waiting.",
        (FIRST_PROMPT, 1, SECOND_PROMPT, 1),
        (7, 6),
    ),
    LessonMoment(
        "The block table",
        "The table of the first request maps its logical blocks to physical ones. "
        "Position 6 is in L1, since 6 // 4 = 1, at slot 2, since 6 % 4 = 2; the table says which block L1 is.",
        (),
        (7, 6),
    ),
    LessonMoment(
        "Growth",
        "Position 7 went into the empty slot of L1, and position 8 took one free block, L2. "
        "Nothing written before was moved, and the other request kept its blocks.",
        (2,),
        (9, 8),
    ),
    LessonMoment(
        "Attention over scattered blocks",
        "To process position 8, attention read exactly 9 positions through the table: 4 of L0, 4 of L1, 1 of L2. "
        "The empty slots of L2 and the blocks of the other request were not read.",
        (),
        (9, 8),
    ),
    LessonMoment(
        "Two candidates share",
        "Both requests ended and their blocks came back; a new prompt of 6 tokens has two candidates. "
        "Both tables point at the same two blocks, each with ref count 2, where copies would take four.",
        (1, TWO_CANDIDATES, 1),
        (6, 6),
    ),
    LessonMoment(
        "Copy on write",
        "The first candidate wrote position 6, so the shared last block was copied and its table changed. "
        "The second then was the only holder and wrote in place; L0 is still shared: three blocks in all.",
        (1,),
        (7, 7),
    ),
)


def open_sequences(state: EngineState) -> list[SequenceState]:
    return [seq for request in state.requests.values() if request.status != "finished" for seq in request.sequences]


class LessonApp(DashboardApp):
    """The dashboard with a strip of captions. States: lesson -> left; in it, `_index` of the moment on show."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "lesson_next", "next", priority=True, show=False),
        Binding("p", "lesson_back", "back", priority=True, show=False),
        Binding("escape", "lesson_leave", "leave", priority=True, show=False),
        *app_bindings(),  # again: a key bound here hides what the base class gave it, also after the lesson
    ]
    _index = -1
    _in_lesson = True

    def on_mount(self) -> None:
        self.deck.mount(Static(id="lesson"), before="KeyFooter")
        self._seqs: list[int] = []  # of the moments reached so far
        self._turn = asyncio.Lock()
        self.action_lesson_next()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "lesson" and self._in_lesson:
            return False
        if action.startswith("lesson_"):
            return self._in_lesson and len(self.screen_stack) == 1 and not isinstance(self.focused, Input)
        return super().check_action(action, parameters)

    def palette_entries(self, focused: Widget | None) -> Iterable[tuple[str, str, DOMNode]]:
        yield from super().palette_entries(focused)
        if self._in_lesson:
            for what, key in (("next", "n"), ("back", "p"), ("leave", "Esc")):
                yield f"Lesson: {what}  ({key})", f"lesson_{what}", self

    def action_live(self) -> None:
        """In the lesson, the newest moment: there the engine stands."""
        if self._in_lesson:
            self.run_worker(self._show_earlier(len(self._seqs) - 1 - self._index), exit_on_error=False)
        else:
            super().action_live()

    def action_lesson_next(self) -> None:
        self.run_worker(self._next(), exit_on_error=False)

    def action_lesson_back(self) -> None:
        self.run_worker(self._show_earlier(-1), exit_on_error=False)

    def action_lesson_leave(self) -> None:
        self.run_worker(self._leave(), exit_on_error=False)

    async def _next(self) -> None:
        if self._index + 1 < len(self._seqs):
            await self._show_earlier(1)
            return
        async with self._turn:
            if not self._in_lesson:
                return
            if self._index + 1 < len(MOMENTS):
                await self._reach(MOMENTS[self._index + 1])
                return
        await self._leave()

    async def _reach(self, moment: LessonMoment) -> None:
        """Let the engine come to the moment. On a refusal or a timeout the lesson stays where it is and says why."""
        view, control = self._source.view, self._source.control
        if control is None:
            return
        try:
            if not self._seqs:
                await self._ask_engine(control.pause())
            for item in moment.script:
                step = view.state.step
                if isinstance(item, str):
                    prompt, params = split_prompt(item)
                    options = msgspec.structs.asdict(params) | {"stop": list(params.stop)}
                    await self._ask_engine(control.submit(prompt, options))
                else:
                    await self._ask_engine(control.step(item))
                    await self._until(partial(self._has_stepped_to, step + item))
            await self._until(lambda: tuple(seq.num_written for seq in open_sequences(view.state)) == moment.written)
        except (RuntimeError, TimeoutError) as error:
            self.tell(f"lesson: {error}", severity="error")
            return
        with view.lock:
            selected = open_sequences(view.state)[moment.selected].sequence_id
            self._seqs.append(view.last_seq or 0)
        self._index += 1
        self._show_moment(selected)

    def _has_stepped_to(self, step: int) -> bool:
        return self._source.view.state.step >= step

    async def _ask_engine(self, pending: PendingReply) -> None:
        reply = await ask(lambda: pending)
        if not reply.ok:
            raise RuntimeError(reply.error or "the engine refused")

    async def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + REACH_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine did not come to this moment within {REACH_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def _show_earlier(self, direction: int) -> None:
        """To a moment that was reached before; the newest of them is where the engine stands."""
        async with self._turn:
            if not self._in_lesson or not 0 <= self._index + direction < len(self._seqs):
                return
            self._index += direction
            if self._index + 1 == len(self._seqs):
                await self._go_live()
            else:
                await self._go_to_seq(self._seqs[self._index])
            view = self._source.view if self._past is None else self._past.view
            with view.lock:
                selected = open_sequences(view.state)[MOMENTS[self._index].selected].sequence_id
            self._show_moment(selected)

    def _show_moment(self, sequence_id: str) -> None:
        moment = MOMENTS[self._index]
        title = f"Lesson {self._index + 1} of {len(MOMENTS)}: {moment.title}"
        strip = self.screen_stack[0].query_one("#lesson", Static)
        strip.update(Content.assemble((title, "bold $primary"), (f"  {KEYS}", "$secondary"), f"\n{moment.caption}"))
        self.action_pane("table")
        self.select(sequence_id)

    async def _leave(self) -> None:
        """The strip goes, the engine runs on, and the keyboard is the user's."""
        async with self._turn:
            if not self._in_lesson:
                return
            self._in_lesson = False
            self.screen_stack[0].query_one("#lesson").remove()
            await self._go_live()
            if (control := self._source.control) is not None:
                self._ask(control.resume, "resume")
            self.refresh_bindings()
            keys = self.key_names
            self.tell(
                f"The engine runs on and the keyboard is yours: {keys['prompt']} writes a prompt, "
                f"{keys['help']} lists the keys"
            )
