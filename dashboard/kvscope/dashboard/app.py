"""The dashboard: composes the panes, receives frames, and keeps what the user has selected."""

import asyncio
import time
from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.message import Message

from kvscope.dashboard.block_grid import BlockGrid
from kvscope.dashboard.cadence import Cadence
from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.copies import DEVICE, HOST
from kvscope.dashboard.dialogue import open_dialogue
from kvscope.dashboard.events_pane import EventsPane
from kvscope.dashboard.filter_screen import FilterChanged, FilterScreen
from kvscope.dashboard.filters import blocks_of, request_of, sequence_of
from kvscope.dashboard.footer import KeyFooter
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import ASCII, UNICODE
from kvscope.dashboard.header import draw_banner, draw_gauge, draw_header
from kvscope.dashboard.insight_pane import InsightPane
from kvscope.dashboard.keys import PANES, app_bindings
from kvscope.dashboard.pane import StripPane, StripWidget
from kvscope.dashboard.panes import BlockPane, TextPane
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.pools import Pools, host_title
from kvscope.dashboard.prompt import PromptBar
from kvscope.dashboard.prompting import PromptingApp
from kvscope.dashboard.pump import FramePump
from kvscope.dashboard.requests_pane import RequestsPane
from kvscope.dashboard.screen_size import Arrangement, arrange, draw_too_small
from kvscope.dashboard.selection import Shown, latest_block, shown_sequence
from kvscope.dashboard.table_pane import TablePane
from kvscope.dashboard.themed import Look
from kvscope.dashboard.timeline_bar import TimelineBar
from kvscope.events.text import make_printable
from kvscope.events.types import SamplingParams
from kvscope.transport.source import Source

MEDIUM_HEIGHT, TALL_HEIGHT = 30, 42  # from here on a narrow screen shows the events, and the other lists, for good


POOLS = ("grid", "host")  # panes with blocks


class FrameReady(Message):
    """A new picture from the reader thread, or why there will be none; a newer one replaces it."""

    def __init__(self, frame: Frame | Exception) -> None:
        super().__init__()
        self.frame = frame

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, FrameReady)


class DashboardApp(PromptingApp):
    """Watches one source. `scripted_prompts` are sent one after the other until the user types."""

    CSS_PATH = "dashboard.tcss"
    TITLE = "kvscope"
    BINDINGS: ClassVar[list[BindingType]] = [*app_bindings()]
    ENABLE_COMMAND_PALETTE = True

    def __init__(
        self,
        source: Source,
        *,
        title: str,
        ascii_only: bool = False,
        look: Look | None = None,
        scripted_prompts: Sequence[str] = (),
        scripted_delay_s: float = 3.0,
        fps: int = 15,
        defaults: SamplingParams | None = None,
    ) -> None:
        super().__init__(source, ASCII if ascii_only else UNICODE, look)
        self._source_title = make_printable(title)
        self.script(scripted_prompts, scripted_delay_s)
        self._defaults = defaults if defaults is not None else SamplingParams()
        self._pump = FramePump(source.view, lambda frame: self.post_message(FrameReady(frame)), fps)
        self._cadence = Cadence(fps)
        self._words_later: asyncio.TimerHandle | None = None
        self._shown_revision = 0
        self._cursor: int | None = None  # a block of the pool, or one of the host pool: never both
        self._host_cursor: int | None = None
        self._colour_by = ColourBy.OWNER
        self._bar_height = 0  # rows of the timeline; with none it shares a line with the player's numbers
        self._front = "requests"  # the pane below the grid in the compact arrangement

    # --- life -----------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        glyphs = self._glyphs
        yield StripWidget(id="small")
        with Vertical(id="deck"):
            yield from (StripWidget(id=name) for name in ("header", "gauge"))
            yield TimelineBar(glyphs, id="playback")
            yield StripWidget(id="banner")
            with Horizontal(id="main"):
                with Vertical(id="left"):
                    yield Pools(glyphs, id="pools")
                    yield BlockPane(glyphs, id="block")
                with Vertical(id="right"):
                    hint = "no requests yet" + (
                        "" if self._source.control is None else f": press {self.key_names['prompt']} and type a prompt"
                    )
                    yield RequestsPane(glyphs, id="requests", hint=hint)
                    yield TablePane(glyphs, id="table")
                    yield TextPane(glyphs, id="text")
            yield EventsPane(glyphs, id="events")
            yield InsightPane(glyphs, id="insight")
            yield PromptBar(self._defaults, read_only=self.no_control if self._source.control is None else None)
            yield KeyFooter()

    def on_mount(self) -> None:
        self.mark_places()
        self._source.start()
        self._arrange()
        self.query_one("#grid").focus()
        self.call_after_refresh(self._pump.start)  # the first picture needs to know its room
        self.set_interval(0.5, self.draw_top)
        self.tell_notices()
        if getattr(self._source, "is_brief", False):
            self.tell(f"a short recording: {self.key_names['play']} plays it")
        self.begin_prompting()

    def on_unmount(self) -> None:
        self._pump.close()
        if self._past is not None:
            self._past.close()
        if self._recording is not None:
            self._recording.stop()
        self._source.close()

    def watch_source(self, source: Source) -> None:
        """The panes follow another source: the past of the engine, or the engine again."""
        self._pump.watch(source.view)
        self.mark_places()
        self.screen_stack[0].set_class(source is not self._source, "-history")
        self.refresh_bindings()

    # --- pictures -------------------------------------------------------------------------------------------------

    @property
    def shown_revision(self) -> int:
        """The view's revision that all panes show."""
        return self._shown_revision

    def on_frame_ready(self, message: FrameReady) -> None:
        if isinstance(message.frame, Exception):
            raise message.frame
        before, self._frame = self._frame, message.frame
        if (self._frame.host.num_blocks > 0) != (before.host.num_blocks > 0):
            self.refresh_bindings()
        wait_s = self._cadence.wait_s(time.monotonic())
        if not wait_s:
            self._draw()
        elif self.is_running:
            self._draw_cells()
            if self._words_later is None:
                self._words_later = asyncio.get_running_loop().call_later(wait_s, self.call_next, self._draw)
        self.when_there_is_room(self._pump.shown)

    def on_resize(self, event: Resize) -> None:
        self._arrange(event.size.width, event.size.height)

    def _arrange(self, width: int | None = None, height: int | None = None) -> None:
        width, height = width or self.size.width, height or self.size.height
        arrangement = arrange(width, height)
        base = self.screen_stack[0]
        for candidate in Arrangement:
            base.set_class(candidate is arrangement, candidate.value)
        self._bar_height = (height >= MEDIUM_HEIGHT) + (height >= TALL_HEIGHT)
        base.set_class(height >= TALL_HEIGHT, "-tall")
        base.set_class(height >= MEDIUM_HEIGHT, "-medium")
        base.set_class(self._glyphs.ascii_borders, "-ascii")
        message = draw_too_small(width, height) if arrangement is Arrangement.SMALL else []
        base.query_one("#small", StripWidget).show(message)
        self._show_front()
        self.call_after_refresh(self._draw)

    def _draw_cells(self) -> None:
        """The part of the picture that is seen at a glance."""
        frame, base = self._frame, self.screen_stack[0]
        base.query_one(Pools).show(frame, self._selected, self._cursor, self._host_cursor, self._colour_by)
        base.query_one(InsightPane).observe(frame)

    def _draw(self) -> None:
        """Everything."""
        if self._words_later is not None:
            self._words_later.cancel()
            self._words_later = None
        if not self.is_running:
            return  # the screen is being taken down, some panes are gone
        frame, base = self._frame, self.screen_stack[0]
        self._cadence.drawn(time.monotonic())
        self._shown_revision = frame.revision
        self.draw_top()
        shown = shown_sequence(frame, self._selected)
        self._draw_cells()
        base.query_one(BlockPane).show(frame, *self._block_on_show())
        requests = base.query_one(RequestsPane)
        self._selected = requests.followed(frame) or self._selected
        requests.show(frame, self._selected, self._holders_of_cursor())
        self.tell_refused()
        whole = shown is not None and self._selected == shown[0].request_id and len(shown[0].sequences) > 1
        base.query_one(TablePane).show(frame, shown, whole=whole)
        base.query_one(TextPane).show(shown)
        base.query_one(EventsPane).show(frame.log)
        base.query_one(InsightPane).redraw()
        if frame.info is not None:
            base.query_one(PromptBar).max_model_len = frame.info.max_model_len
        self._draw_titles(shown, whole=whole)

    def draw_top(self) -> None:
        if not self.is_running:
            return  # as above
        frame, base, width = self.with_distance(self._frame), self.screen_stack[0], self.size.width
        keys = self.key_names
        self.end_broken_recording()
        recording = self._recording.name if self._recording is not None else ""
        age_s = max(time.monotonic() - frame.status_since, 0.0)
        strips = {
            "#header": [
                draw_header(frame, self._source_title, self._glyphs, width, age_s, recording=recording, keys=keys)
            ],
            "#gauge": draw_gauge(frame, self._glyphs, width),
            "#banner": draw_banner(frame, self._glyphs, width, age_s, keys=keys),
        }
        for selector, lines in strips.items():
            base.query_one(selector, StripWidget).show(lines)
        base.query_one(TimelineBar).draw(self._player, frame.seq, width, self._bar_height, self.note_here())

    def _draw_titles(self, shown: Shown | None, *, whole: bool) -> None:
        base = self.screen_stack[0]
        titles = dict(PANES)
        of_sequence = f" of {shown[1].sequence_id}" if shown is not None else ""
        for name in ("requests", "events"):
            titles[name] = f"{titles[name]}  {base.query_one(f'#{name}', StripPane).note}".rstrip()
        of_sequence += " (swapped out)" if shown is not None and shown[1].host_table else ""
        titles["table"], titles["text"] = f"Block table{of_sequence}", f"Text{of_sequence}"
        if whole and shown is not None:
            what = "Beams" if shown[0].params.beam_width > 1 else "Candidates"
            titles["table"] = f"{what} of {shown[0].request_id}, side by side"
        titles["grid"] += f"  by {self._colour_by.value}"
        titles["host"] = host_title(self._frame.host, base.query_one("#host").size.width)
        block_id, pool = self._block_on_show()
        if block_id is not None:
            is_chosen = self._cursor is not None or pool is self._frame.host
            titles["block"] = f"Block {pool.name(block_id)}" + ("" if is_chosen else ", touched last")
        one_at_a_time = base.has_class(Arrangement.COMPACT.value) and not base.has_class("-tall")
        key_of = self.key_names.pane
        others = [f"{key_of(name)} {PANES[name]}" for name in PANES if name not in (*POOLS, self._front)]
        for name, title in titles.items():
            pane = base.query_one(f"#{name}", StripPane)
            pane.set_title(f"{key_of(name)} {title}")
            if name not in POOLS:
                pane.set_subtitle("  ".join(others) if one_at_a_time and name == self._front else "")

    def action_watch(self, what: str) -> None:
        """Look back from the block on show, or from the selected request."""
        if what.startswith("block"):
            block_id, pool = self._block_on_show()
            if pool is self._frame.host:
                self.tell("one can look back from a block of the pool, not of the host pool", severity="warning")
            elif block_id is not None:
                self._cursor = block_id  # the next look back is at the same block
                self.look_back(what, block_id, pool.name(block_id))
            return
        chosen = shown_sequence(self._frame, self._selected)
        if chosen is not None:
            self.look_back(what, chosen[0].request_id, chosen[0].request_id)

    def _block_on_show(self) -> tuple[int | None, PoolFrame]:
        """The one under the cursor, else the one that was touched last; and its pool."""
        if self._host_cursor is not None and self._frame.host.num_blocks:
            return self._host_cursor, self._frame.host
        return self._cursor if self._cursor is not None else latest_block(self._frame), self._frame.pool

    def _show_front(self) -> None:
        for name in PANES:
            if name not in (*POOLS, "insight"):
                self.screen_stack[0].query_one(f"#{name}").set_class(name == self._front, "-front")

    # --- what the user looks at -----------------------------------------------------------------------------------

    def on_block_grid_cursor_moved(self, message: BlockGrid.CursorMoved) -> None:
        self._put_cursor(message.block_id, message.letter)
        self._draw()

    def _put_cursor(self, block_id: int | None, letter: str = DEVICE) -> None:
        self._cursor, self._host_cursor = (block_id, None) if letter == DEVICE else (None, block_id)

    def on_block_grid_picked(self, message: BlockGrid.Picked) -> None:
        frame = self._frame
        holders = frame.holders(message.block_id, frame.host if message.letter == HOST else frame.pool)
        if holders:
            names = [name for name, _ in holders]
            following = names.index(self._selected) + 1 if self._selected in names else 0
            self.select(names[following % len(names)])

    def _holders_of_cursor(self) -> frozenset[str]:
        block_id, pool = self._block_on_show()
        is_chosen = block_id in (self._cursor, self._host_cursor)
        holders = self._frame.holders(block_id, pool) if block_id is not None and is_chosen else []
        return frozenset(name for name, _ in holders)

    def on_table_pane_token_pointed(self, message: TablePane.TokenPointed) -> None:
        self._put_cursor(message.block_id)
        self._draw()

    def on_requests_pane_rearranged(self) -> None:
        self._draw()

    def on_events_pane_jumped(self, message: EventsPane.Jumped) -> None:
        """To the event's block and request, and to its moment: of a live engine, the view is frozen first."""
        entry = message.entry
        blocks, name = blocks_of(entry), sequence_of(entry.event) or request_of(entry.event)
        if blocks:
            self._put_cursor(blocks[-1])
        self.select(name or self._selected)
        self.go_to_seq(entry.seq)

    async def action_filter(self) -> None:
        name = "events" if self.focused is not None and self.focused.id == "events" else "requests"
        self.action_pane(name)
        text = self.query_one(f"#{name}", StripPane).filter_text
        await open_dialogue(self, FilterScreen(self._glyphs, name, text))

    def on_filter_changed(self, message: FilterChanged) -> None:
        self.screen_stack[0].query_one(f"#{message.pane}", StripPane).set_filter(message.text, message.query)
        self._draw()

    def on_requests_pane_chosen(self, message: RequestsPane.Chosen) -> None:
        self.select(message.key)

    def on_table_pane_chosen(self, message: TablePane.Chosen) -> None:
        self.select(message.key)

    def select(self, key: str | None) -> None:
        """Light up a request's or a sequence's blocks, or nothing."""
        self._selected = key
        self.screen_stack[0].query_one(RequestsPane).stop_following()
        self._draw()

    def action_back(self) -> None:
        """One level out: the insight screen, the token, the selection, then the cursor, then the past."""
        table = self.screen_stack[0].query_one(TablePane)
        if self.screen_stack[0].has_class("-insight"):
            self.action_pane("grid")
        elif table.token is not None:
            table.point(None)
        elif self._selected is not None:
            self.select(None)
        elif self._cursor is not None or self._host_cursor is not None:
            self._put_cursor(None)
            self._draw()
        else:
            self.action_live()

    def action_go(self, name: str) -> None:
        """To a pane, also from the prompt."""
        self.action_pane(name)

    def action_pane(self, name: str) -> None:
        self._show_insight(name == "insight")
        if name not in (*POOLS, "insight"):
            self._front = name
            self._show_front()
        self.screen.set_focus(self.screen_stack[0].query_one(f"#{name}"))
        self.call_after_refresh(self._draw)

    def _show_insight(self, shown: bool) -> None:
        self.screen_stack[0].set_class(shown, "-insight")
        self._pump.want_ledger(shown)

    def action_zoom(self, step: int) -> None:
        self._zoomed().change_zoom(step)
        self._draw()

    def action_zoom_auto(self) -> None:
        self._zoomed().change_zoom(None)
        self._draw()

    def action_colour(self) -> None:
        """Colours say something else of each block."""
        self._colour_by = self._colour_by.following
        self._pump.want_traces(self._colour_by.needs_traces)
        self._draw()

    def on_block_grid_colour_clicked(self) -> None:
        self.action_colour()

    def _zoomed(self) -> BlockGrid:
        """The grid that has the focus, else the block pool's."""
        return self.focused if isinstance(self.focused, BlockGrid) else self.query_one("#grid", BlockGrid)
