"""What keys do with the past: a recording's, or that of a live engine, whose view can be frozen to walk back in it."""

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvscope.dashboard.dialogue import open_dialogue
from kvscope.dashboard.frames import Behind, Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.go_to import Destination, GoToScreen
from kvscope.dashboard.playback import next_speed
from kvscope.dashboard.themed import Look, ThemedApp
from kvscope.events.text import make_printable
from kvscope.transport.source import Source, Status
from kvscope.transport.timetravel import History, Player, ReplaySource

if TYPE_CHECKING:
    from kvscope.dashboard.timeline_bar import TimelineBar

JUMPS = 20  # how many jumps from one end to the other


class TimeTravelApp(ThemedApp):
    """States: LIVE (no player) <-> HISTORY (a player over the engine's past); a recording has a player throughout."""

    def __init__(self, source: Source, glyphs: Glyphs, look: Look | None = None) -> None:
        super().__init__(look, no_color="NO_COLOR" in os.environ)
        self._source, self._glyphs = source, glyphs
        self._player: Player | None = getattr(source, "player", None)
        self._history: History | None = getattr(source, "history", None)
        self._past: ReplaySource | None = None
        self._moving = asyncio.Lock()

    def watch_source(self, source: Source) -> None:
        """Show another source's view; the dashboard knows how."""
        raise NotImplementedError

    def draw_top(self) -> None:
        """Draw the lines above the panes again; the dashboard knows how."""
        raise NotImplementedError

    # --- moving ---------------------------------------------------------------------------------------------------

    def action_play(self) -> None:
        """Play or pause; at the end of a recording, play again from its start."""
        if (player := self._player) is None:
            return
        ended = not player.playing and player.position >= player.length
        if ended and self._past is not None:
            self.notify(self._say_missing("play"), timeout=2, markup=False)
        else:
            self._travel(player.seek_start if ended else player.toggle, player.toggle if ended else None)

    def action_move(self, how: str) -> None:
        """Call a move of the player by name."""
        if self._player is not None:
            self._travel(getattr(self._player, how), missing=self._say_missing(how))

    def _say_missing(self, how: str) -> str:
        if how.endswith("notable"):
            return f"no notable event {'after' if how.startswith('next') else 'before'} this one"
        is_back = how.endswith("back")
        if self._past is not None and not is_back:
            return f"this is where the view was frozen: {self.key_names['live']} goes to the live engine"
        return "this is the start" if is_back else "this is the end"

    def look_back(self, what: str, subject: int | str, name: str) -> None:
        """Call one of the player's reverse watchpoints."""
        if (player := self._player) is not None:
            call = getattr(player, f"back_to_{what}")
            self._travel(lambda: call(subject), missing=f"no {what.replace('_', ' ')} of {name} before this moment")

    def action_step_back(self) -> None:
        self.action_move("step_back")

    def action_rewind(self) -> None:
        if self._player is not None:
            self._travel(self._player.pause, self._player.seek_start)

    def action_end(self) -> None:
        if self._past is not None:
            self.action_live()
        elif self._player is not None:
            self._travel(self._player.pause, self._player.seek_end)

    def action_jump(self, direction: int) -> None:
        if (player := self._player) is not None:
            distance = direction * max(player.length // JUMPS, 1)
            missing = self._say_missing("jump" if direction > 0 else "jump_back")
            self._travel(player.pause, lambda: player.seek(player.position + distance), missing=missing)

    def go_to_seq(self, seq: int) -> None:
        """To just after a batch; of a live engine, the view is frozen first."""
        self.run_worker(self._go_to_seq(seq), exit_on_error=False)

    async def _go_to_seq(self, seq: int) -> None:
        if self._player is None:
            await self._freeze()
        if (player := self._player) is not None:
            await self._travel_in_turn([player.pause, lambda: player.seek_seq(seq)], "")

    async def action_go_to(self) -> None:
        await open_dialogue(self, GoToScreen(), self._go_to)

    def _go_to(self, destination: Destination | None) -> None:
        player = self._player
        if player is None or destination is None:
            return
        if destination.step is not None:
            step = destination.step
            self._travel(player.pause, lambda: player.seek_step(step))
        elif destination.time_ns is not None:
            time_ns = destination.time_ns
            self._travel(player.pause, lambda: player.seek_time(time_ns))

    def on_timeline_bar_pointed(self, message: "TimelineBar.Pointed") -> None:
        if (player := self._player) is not None:
            position = message.position
            self._travel(player.pause, lambda: player.seek(position))

    def on_timeline_bar_ended(self) -> None:
        keys = self.key_names
        self.notify(f"the end: {keys['play']} plays it again, {keys['back']} steps back", markup=False)

    def action_speed(self, step: int) -> None:
        if (player := self._player) is not None:
            self._travel(lambda: setattr(player, "speed", next_speed(player.speed, step)))

    def _travel(self, *calls: Callable[[], object] | None, missing: str = "") -> None:
        """A far move may fold for a while: off the UI thread, in the order of the keys."""
        self.run_worker(
            self._travel_in_turn([call for call in calls if call is not None], missing), exit_on_error=False
        )

    async def _travel_in_turn(self, calls: list[Callable[[], object]], missing: str) -> None:
        async with self._moving:
            moved = True
            for call in calls:
                moved = await asyncio.to_thread(call) is not False
        if not moved and missing:
            self.notify(make_printable(missing), timeout=2, markup=False)
        self.draw_top()

    # --- a live engine's past ---------------------------------------------------------------------------------------

    def action_freeze(self) -> None:
        """LIVE -> HISTORY, standing at the moment of the key."""
        self.run_worker(self._freeze(), exit_on_error=False)

    async def _freeze(self) -> None:
        async with self._moving:
            if self._history is None or self._player is not None:
                return
            past = await asyncio.to_thread(_open_past, self._history)
            if past.player.length == 0:
                past.close()
                self.notify("nothing has happened yet since this dashboard was opened", timeout=3)
                return
            self._past, self._player = past, past.player
            self.watch_source(past)

    def action_live(self) -> None:
        """HISTORY -> LIVE."""
        self.run_worker(self._go_live(), exit_on_error=False)

    async def _go_live(self) -> None:
        async with self._moving:
            past, self._past = self._past, None
            if past is not None:
                self._player = None
                self.watch_source(self._source)
                await asyncio.to_thread(past.close)

    def with_distance(self, frame: Frame) -> Frame:
        """A picture of the past, with how far it is behind the engine and what that warns of; any other as it is."""
        past = self._past
        if frame.status is not Status.HISTORY or past is None:
            return frame
        view = self._source.view
        with view.lock:
            state, seq, status, warning = view.state, view.last_seq, view.status, view.engine_warning
            same_life = state.epoch == past.view.state.epoch
            elapsed_ns = state.time_ns - frame.time_ns if same_life else None
            num_batches = seq - frame.seq if same_life and seq is not None and frame.seq is not None else None
        return frame._replace(behind=Behind(elapsed_ns, num_batches, status), engine_warning=warning)


def _open_past(history: History) -> ReplaySource:
    past = ReplaySource(history.freeze(), status=Status.HISTORY)
    past.start()
    return past
