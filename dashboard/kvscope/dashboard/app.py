"""The dashboard: builds the screen on a source, starts and ends with it, and draws the frames that come from it."""

import asyncio
import time
from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import Resize

from kvscope.dashboard.cadence import Cadence
from kvscope.dashboard.choosing import ChoosingApp
from kvscope.dashboard.deck import Deck
from kvscope.dashboard.glyphs import ASCII, UNICODE
from kvscope.dashboard.header import draw_banner, draw_gauge, draw_header
from kvscope.dashboard.keys import app_bindings
from kvscope.dashboard.pane import StripWidget
from kvscope.dashboard.prompt import PromptBar
from kvscope.dashboard.pump import FramePump, FrameReady
from kvscope.dashboard.screen_size import Arrangement, arrange, draw_too_small, is_medium, is_tall
from kvscope.dashboard.themed import Look
from kvscope.events.text import make_printable
from kvscope.events.types import SamplingParams
from kvscope.transport.source import Source


class DashboardApp(ChoosingApp):
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
        self.set_class(ascii_only, "-ascii")
        self._source_title = make_printable(title)
        self.script(scripted_prompts, scripted_delay_s)
        self._defaults = defaults if defaults is not None else SamplingParams()
        self._pump = FramePump(source.view, lambda frame: self.post_message(FrameReady(frame)), fps, self.has_room)
        self._cadence = Cadence(fps)
        self._words_later: asyncio.TimerHandle | None = None
        self._shown_revision = 0

    # --- life -----------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        keys, has_control = self.key_names, self._source.control is not None
        hint = "no requests yet" + (f": press {keys['prompt']} and type a prompt" if has_control else "")
        prompt = PromptBar(self._defaults, read_only=None if has_control else self.no_control)
        yield StripWidget(id="small")
        yield Deck(self._glyphs, prompt, keys, hint=hint)

    def on_mount(self) -> None:
        self.mark_places()
        self._source.start()
        self._arrange()
        self.query_one("#grid").focus()
        self.call_after_refresh(self._pump.start)  # the first picture needs to know its room
        self.set_interval(0.5, self._refresh_top)
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

    def on_resize(self, event: Resize) -> None:
        self._arrange(event.size.width, event.size.height)

    def _arrange(self, width: int | None = None, height: int | None = None) -> None:
        """The style sheet shows what has room; its classes say how much there is."""
        width, height = width or self.size.width, height or self.size.height
        arrangement = arrange(width, height)
        base = self.screen_stack[0]
        for candidate in Arrangement:
            base.set_class(candidate is arrangement, candidate.value)
        base.set_class(is_tall(height), "-tall")
        base.set_class(is_medium(height), "-medium")
        message = draw_too_small(width, height) if arrangement is Arrangement.SMALL else []
        base.query_one("#small", StripWidget).show(message)
        self.deck.show_front()
        self.call_after_refresh(self.draw)

    # --- frames ---------------------------------------------------------------------------------------------------

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
            self.draw()
        elif self.is_running:
            self.deck.show_cells(self._frame, self.chosen)
            if self._words_later is None:
                self._words_later = asyncio.get_running_loop().call_later(wait_s, self.call_next, self.draw)
        self.send_now()
        self._pump.shown()

    def draw(self) -> None:
        """Everything, as soon as there is a reason to."""
        if self._words_later is not None:
            self._words_later.cancel()
            self._words_later = None
        if not self.is_running:
            return  # the screen is being taken down, some panes are gone
        frame, deck, chosen = self._frame, self.deck, self.chosen
        self._cadence.drawn(time.monotonic())
        self._shown_revision = frame.revision
        self._pump.want_ledger(self.screen_stack[0].has_class("-insight"))
        self._pump.want_traces(chosen.colour_by.needs_traces)
        self.draw_top()
        chosen.key = deck.requests.followed(frame) or chosen.key
        deck.show_cells(frame, chosen)
        deck.show_words(frame, chosen)
        self.tell_refused()

    def _refresh_top(self) -> None:
        """Ages and notes change with time alone; while pictures bring words, they bring the top as well."""
        if not self._cadence.wait_s(time.monotonic()):
            self.draw_top()

    def draw_top(self) -> None:
        if not self.is_running:
            return  # as above
        frame, deck, (width, height) = self.with_distance(self._frame), self.deck, self.size
        keys, glyphs = self.key_names, self._glyphs
        self.end_broken_recording()
        recording = self._recording.name if self._recording is not None else ""
        age_s = max(time.monotonic() - frame.status_since, 0.0)
        title = self._source_title
        deck.header.show([draw_header(frame, title, glyphs, width, age_s, recording=recording, keys=keys)])
        deck.gauge.show(draw_gauge(frame, glyphs, width))
        deck.banner.show(draw_banner(frame, glyphs, width, age_s, keys=keys))
        bar_height = is_medium(height) + is_tall(height)  # with none it shares a line with the player's numbers
        deck.timeline.draw(self._player, frame.seq, width, bar_height, self.note_here())
