"""What keys and the palette do beyond looking around: steer the engine, the recording, and the screen."""

import asyncio
import re
from collections.abc import Callable, Iterable

from textual import actions
from textual.app import App, SystemCommand
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.widgets import Input

from kvscope.dashboard.frames import Frame, FrameBuilder, build_frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.help import HelpScreen
from kvscope.dashboard.keys import KEYS
from kvscope.dashboard.playback import Player, next_speed
from kvscope.dashboard.replies import ask
from kvscope.dashboard.selection import find_selected
from kvscope.events.text import make_printable
from kvscope.transport.source import PendingReply, Source

_REMOTE_FONT = re.compile(r',\s*url\("https?://[^"]*"\) format\("\w+"\)')
_MOVING = ("pane", "focus_prompt")  # actions whose keys are text while the user writes


class ActionsApp(App[None]):
    """An app on a source, with the actions that do not depend on how the panes are arranged."""

    def __init__(self, source: Source, glyphs: Glyphs) -> None:
        super().__init__()
        self._source, self._glyphs = source, glyphs
        self._player: Player | None = getattr(source, "player", None)
        self._frame: Frame = build_frame(source.view, FrameBuilder())
        self._selected: str | None = None
        self._replaying = asyncio.Lock()

    def draw_top(self) -> None:
        """Draw the lines above the panes again; the dashboard knows how."""
        raise NotImplementedError

    # --- the engine -----------------------------------------------------------------------------------------------

    def action_toggle_pause(self) -> None:
        if (control := self._source.control) is not None:
            paused = self._frame.engine_status == "paused"
            self._ask(control.resume if paused else control.pause, "resume" if paused else "pause")

    def action_step(self) -> None:
        if self._player is not None:
            self._replay(self._player.step_forward)
        elif (control := self._source.control) is not None:
            self._ask(control.step, "step")

    def action_cancel(self) -> None:
        control, chosen = self._source.control, find_selected(self._frame, self._selected)
        if control is None:
            return
        if chosen is None:
            self.tell("select a request first: 2, then up or down", severity="warning")
            return
        request_id = chosen[0].request_id
        self._ask(lambda: control.cancel(request_id), f"cancel {request_id}")

    def _ask(self, call: Callable[[], PendingReply], what: str) -> None:
        self.run_worker(self._ask_and_tell(call, what), exit_on_error=False)

    async def _ask_and_tell(self, call: Callable[[], PendingReply], what: str) -> None:
        reply = await ask(call)
        if not reply.ok:
            self.tell(f"{what}: {reply.error or 'refused without a reason'}", severity="error")

    def tell(self, message: str, *, severity: SeverityLevel = "information") -> None:
        """A notification; the text is never read as markup."""
        self.notify(make_printable(message), severity=severity, markup=False)

    # --- the recording --------------------------------------------------------------------------------------------

    def action_play(self) -> None:
        """Play or pause; at the end, play again from the start."""
        if (player := self._player) is not None:
            ended = not player.playing and player.position >= player.length
            self._replay(player.seek_start if ended else player.toggle, player.toggle if ended else None)

    def action_rewind(self) -> None:
        if self._player is not None:
            self._replay(self._player.seek_start)

    def action_step_back(self) -> None:
        if self._player is not None:
            self._replay(self._player.step_back)

    def _replay(self, *calls: Callable[[], object] | None) -> None:
        """Seeking folds the recording from its start: off the UI thread, in the order of the keys."""
        self.run_worker(self._replay_in_turn([call for call in calls if call is not None]), exit_on_error=False)

    async def _replay_in_turn(self, calls: list[Callable[[], object]]) -> None:
        async with self._replaying:
            for call in calls:
                await asyncio.to_thread(call)
        self.draw_top()

    def action_speed(self, step: int) -> None:
        if self._player is not None:
            self._player.speed = next_speed(self._player.speed, step)
            self.draw_top()

    # --- the rest -------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that cannot work here are neither offered nor caught; what is typed into a line is text."""
        if action in _MOVING and (len(self.screen_stack) > 1 or isinstance(self.focused, Input)):
            return False
        return self._can(next((key.needs for key in KEYS if key.action.split("(")[0] == action), ""))

    def _can(self, needs: str) -> bool:
        live, recorded = self._source.control is not None, self._player is not None
        return {"engine": live, "recording": recorded, "steps": live or recorded}.get(needs, True)

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self._glyphs))

    def action_save_picture(self) -> None:
        try:
            path = self.save_screenshot(path=".")
        except OSError as error:
            self.tell(f"no picture saved: {error}", severity="error")
            return
        self.tell(f"picture saved: {path}")

    def export_screenshot(self, *, title: str | None = None, simplify: bool = False) -> str:
        """The screen as SVG, without references to fonts on the network."""
        return _REMOTE_FONT.sub("", super().export_screenshot(title=title, simplify=simplify))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every action of the key table, and Textual's themes."""
        named = {key.action: key for key in reversed(KEYS) if self._can(key.needs)}
        for action, key in reversed(named.items()):
            yield SystemCommand(key.label.capitalize(), key.about, self._runner(action))
        yield SystemCommand("Theme", "Change the colours around the cells", self.action_change_theme)

    def _runner(self, action: str) -> Callable[[], object]:
        _, name, parameters = actions.parse(action)
        return lambda: getattr(self, f"action_{name}")(*parameters)
