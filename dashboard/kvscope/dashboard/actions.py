"""What keys and the palette do beyond looking around: steer the engine and the screen."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterable

from textual.actions import parse
from textual.app import SuspendNotSupported, SystemCommand
from textual.binding import Binding
from textual.command import CommandPalette
from textual.dom import DOMNode
from textual.events import Key as KeyPress
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input, TextArea

from kvscope.dashboard.bookmarking import BookmarkingApp
from kvscope.dashboard.breakpoints_screen import BreakpointsScreen
from kvscope.dashboard.frames import Frame, FrameBuilder, build_frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.help import HelpScreen
from kvscope.dashboard.keys import KEYS, key_names
from kvscope.dashboard.pane import StripPane, own_bindings
from kvscope.dashboard.replies import ask
from kvscope.dashboard.selection import Selection, find_selected
from kvscope.dashboard.themed import Look
from kvscope.dashboard.view_recorder import ViewRecorder
from kvscope.events.describe import describe_breakpoints
from kvscope.events.state import Breakpoints
from kvscope.events.text import make_printable
from kvscope.transport.recording.format import RecordingError
from kvscope.transport.recording.tap import Tap
from kvscope.transport.source import PendingReply, Source

_REMOTE_FONT = re.compile(r',\s*url\("https?://[^"]*"\) format\("\w+"\)')
READ_ONLY_HINT = "read-only: this view has no engine to send prompts to"
MAX_COPIED = 100_000  # characters; terminals drop much longer ones
# Actions whose keys have another meaning in a line of text; and those that must not reach below a dialogue.
_MOVING = ("pane", "focus_prompt", "filter", "rewind", "end")
_BELOW = (*_MOVING, "go", "go_to", "bookmark", "edit_prompt")
_NEEDS = {parse(key.action)[1:]: key.needs for key in KEYS}  # by action and its parameters
_NEEDS_OF_ALL = {name: needs for (name, _), needs in reversed(_NEEDS.items())}


class ActionsApp(BookmarkingApp):
    """An app on a source, with the actions that do not depend on how the panes are arranged."""

    def __init__(self, source: Source, glyphs: Glyphs, look: Look | None = None) -> None:
        super().__init__(source, glyphs, look)
        self._frame: Frame = build_frame(source.view, FrameBuilder())
        self.chosen = Selection()
        tap: Tap | None = getattr(source, "tap", None)
        self._recording = ViewRecorder(source.view, tap, self.key_names) if tap is not None else None
        self._starting = asyncio.Lock()  # one start or end of a recording at a time
        # Why nothing can be sent, where that is so.
        self.no_control: str = getattr(source, "no_control", "") or READ_ONLY_HINT

    # --- the engine -----------------------------------------------------------------------------------------------

    def action_toggle_pause(self) -> None:
        if (control := self._source.control) is not None:
            paused = self._source.view.state.status == "paused"  # now, also while the past is on show
            self._ask(control.resume if paused else control.pause, "resume" if paused else "pause")

    def action_step(self) -> None:
        if self._player is not None:
            self.action_move("step_forward")
        elif (control := self._source.control) is not None:
            self._ask(control.step, "step")

    def action_breakpoints(self) -> None:
        """Choose what the engine pauses at; what is set is what it says itself, whoever set it."""
        if self._source.control is not None:
            self.push_screen(BreakpointsScreen(self._source.view.state.breakpoints), self._set_breakpoints)

    def _set_breakpoints(self, wanted: Breakpoints | None) -> None:
        control = self._source.control
        if wanted is None or control is None:
            return
        self._ask(lambda: control.set_breakpoints(wanted), "breakpoints")
        words = describe_breakpoints(wanted.events, wanted.free_below)
        self.tell(f"the engine pauses at: {words}" if words else "no breakpoints")

    def action_cancel(self) -> None:
        control, shown = self._source.control, find_selected(self._frame, self.chosen.key)
        if control is None:
            return
        if self._past is not None:
            self.tell(f"this is the past: {self.key_names['live']} goes to the live engine", severity="warning")
            return
        if shown is None:
            self.tell(f"select a request first: {self.key_names['requests']}, then up or down", severity="warning")
            return
        request_id = shown[0].request_id
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

    def tell_notices(self) -> None:
        for notice in self.notices:
            self.tell(notice, severity="warning")

    # --- recording ------------------------------------------------------------------------------------------------

    def action_record(self) -> None:
        """Start a recording of what is watched, or end the one that runs."""
        self.run_worker(self._toggle_recording(), exit_on_error=False)

    def end_broken_recording(self) -> None:
        if self._recording is not None and self._recording.broken and not self._starting.locked():
            self.run_worker(self._toggle_recording(only_end=True), exit_on_error=False)

    async def _toggle_recording(self, *, only_end: bool = False) -> None:
        recording = self._recording
        if recording is None:
            return
        async with self._starting:
            broken = recording.broken
            if only_end and not broken:
                return  # somebody was faster
            try:
                message = await asyncio.to_thread(recording.stop if recording.name else recording.start)
            except (RecordingError, OSError) as error:
                self.tell(f"no recording: {error}", severity="error")
                return
        self.tell(message, severity="error" if broken else "information")
        self.draw_top()

    # --- the rest -------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that cannot work here are neither offered nor caught; what is typed into a line is text."""
        if action in _BELOW and len(self.screen_stack) > 1:
            return False
        if action in _MOVING and isinstance(self.focused, Input | TextArea):
            return False
        name = "pane" if action == "go" else action  # the function keys'
        return self._can(_NEEDS.get((name, parameters), _NEEDS_OF_ALL.get(name, "")))

    def on_key(self, event: KeyPress) -> None:
        """Say what is missing for a key that does nothing here."""
        if len(self.screen_stack) > 1 or event.key in self.screen.active_bindings:
            return
        keymap = self._look.keymap
        needs = next((key.needs for key in KEYS if event.key in keymap.get(key.name, key.keys).split(",")), "")
        if needs == "engine":
            self.tell(self.no_control, severity="warning")
        elif needs == "recording" and self._can("live"):
            self.tell(f"freeze the view first: {key_names(keymap.get('freeze', 'space'))}", severity="warning")

    def _can(self, needs: str) -> bool:
        live, moving = self._source.control is not None, self._player is not None
        can = {
            "engine": live,
            "recording": moving,
            "steps": live or moving,
            "live": self._history is not None and not moving,
            "history": self._past is not None,
            "tap": self._recording is not None,
            "host": self._frame.host.num_blocks > 0,
        }
        return can.get(needs, True)

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(CommandPalette(placeholder="an action, by words of its name", id="--command-palette"))

    def get_key_display(self, binding: Binding) -> str:
        """At the bottom; Textual's has a sign for Enter that is not ASCII."""
        return key_names(binding.key) if self._glyphs.ascii_borders else super().get_key_display(binding)

    def action_help(self) -> None:
        """About the focused pane first, then about everything."""
        focused = self.screen.focused
        self.push_screen(HelpScreen(self._glyphs, focused.id if focused is not None else None))

    def action_lesson(self) -> None:
        """The terminal is the lesson's until it ends; the engine that is watched goes on, and so does the intake."""
        asked = {"--ascii": self._glyphs.ascii_borders, "--no-mouse": not getattr(self._driver, "_mouse", True)}
        flags = [flag for flag, is_on in asked.items() if is_on]
        command = [sys.executable, "-m", "kvscope.dashboard", "demo", "--lesson", "--theme", self.theme, *flags]
        try:
            with self.suspend():
                status = subprocess.run(command, check=False).returncode  # noqa: S603 - our own
        except SuspendNotSupported:
            self.tell("no lesson here: this terminal cannot be handed over", severity="warning")
            return
        if status:
            self.tell("there was no lesson: in a shell, kvscope demo --lesson says why", severity="error")

    def action_copy(self) -> None:
        """The focused pane's text, by OSC 52; only this key does it, never what arrives from an engine."""
        pane = self.screen.focused
        text = pane.copied_text() if isinstance(pane, StripPane) else ""
        if not text.strip():
            self.tell("nothing to copy here: go to a pane first", severity="warning")
            return
        self.copy_to_clipboard(text[:MAX_COPIED])
        self.tell(f"copied {min(len(text), MAX_COPIED):,} characters, if your terminal allows it: kvscope doctor")

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
        """Every action of the key table, then those of the focused pane, and the themes."""
        for title, action, target in self.palette_entries(screen.focused):
            yield SystemCommand(title, "", self._runner(action, target))
        yield SystemCommand("Theme: light or dark", "", self.action_change_theme)

    def palette_entries(self, focused: Widget | None) -> Iterable[tuple[str, str, DOMNode]]:
        """What each is called, its action, and whose it is."""
        named = {key.action: key for key in reversed(KEYS) if self._can(key.needs)}
        for action, key in reversed(named.items()):
            yield f"{key.about}  ({self.key_names.all(key)})", action, self
        if focused is not None:
            for binding in own_bindings(focused):
                yield f"{focused.id}: {binding.description}  ({key_names(binding.key)})", binding.action, focused

    def _runner(self, action: str, target: DOMNode) -> Callable[[], object]:
        return lambda: self.call_later(self.run_action, action, target)
