"""The panes beside the grid: requests, block table, text, one block, events. Each keeps values and draws them."""

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.filters import EVERYTHING, SORTS, Query, filter_log
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.inspector import draw_block
from kvscope.dashboard.pane import MAX_COPIED_LINES, FollowingPane, LazyPane, StripPane, key_names_of
from kvscope.dashboard.pool_frame import EMPTY_POOL, PoolFrame
from kvscope.dashboard.refusals import RecentRefusals, draw_refusal
from kvscope.dashboard.requests import Rows, draw_request_row, last_preemptions, list_rows, row_facts
from kvscope.dashboard.selection import Shown
from kvscope.dashboard.strips import make_strip
from kvscope.dashboard.table import draw_text
from kvscope.dashboard.ticker import draw_entry
from kvscope.transport.source import LogEntry

BRIEF_WIDTH = 74
MAX_DRAWN_ROWS = 500  # lines of requests that are remembered
HEAD_WIDTH = 28  # sequence number, step, phase and glyph before an event's sentence


class RequestsPane(LazyPane):
    """The list of requests; moving in it selects."""

    BINDINGS: ClassVar = [
        Binding("down,j", "choose(1)", "next", show=False),
        Binding("up,k", "choose(-1)", "previous", show=False),
        Binding("o", "sort", "next order", show=False),
        Binding("f", "follow", "follow the newest that runs", show=False),
    ]

    class Chosen(Message):
        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    class Rearranged(Message):
        """Order or following has changed: the title tells."""

    def __init__(self, glyphs: Glyphs, *, id: str, hint: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs, self._hint = glyphs, hint
        self._frame: Frame | None = None
        self._selected: str | None = None
        self._rows = Rows(())
        self._preempted: dict[str, LogEntry] = {}
        self._lit: frozenset[str] = frozenset()
        self._recent, self.refused = RecentRefusals(), list[LogEntry]()  # above the rows
        self._text, self._query, self._order, self._following = "", EVERYTHING, SORTS[0], False
        self._drawn: dict[str, tuple[tuple[object, ...], Strip]] = {}  # by row; what a line was drawn from, and it

    def show(self, frame: Frame, selected: str | None, lit: frozenset[str] = frozenset()) -> None:
        moved = selected != self._selected
        self._frame, self._selected, self._lit = frame, selected, lit
        self.redraw()
        if moved:
            self._scroll_to_selected()

    def prepare(self, width: int) -> int:
        frame = self._frame
        self._rows = list_rows(frame, self._query, self._order) if frame is not None else Rows(())
        if len(self._drawn) > MAX_DRAWN_ROWS:
            self._drawn.clear()
        self._preempted = last_preemptions(frame) if frame is not None else {}
        self.refused = self._recent.look(frame) if frame is not None else []
        return max(len(self.refused) + len(self._rows), 1)

    def draw_line(self, y: int, width: int) -> Strip:
        if y < len(self.refused):
            return draw_refusal(self.refused[y], self._glyphs, width)
        y -= len(self.refused)
        if self._frame is None or y >= len(self._rows):
            changed_by = f"{key_names_of(self)['filter']} changes it"
            hint = f"no request passes the filter: {changed_by}" if self._query != EVERYTHING else self._hint
            return make_strip([(f" {hint}", theme.SOFT)], width)
        frame, row, preempted, lit, glyphs = self._frame, self._rows[y], self._preempted, self._lit, self._glyphs
        chosen, entry = row.key == self._selected, preempted.get(row.request.request_id)
        facts = (row, row_facts(frame, row), chosen, row.key in lit, entry, width)
        drawn = self._drawn.get(row.key)
        if drawn is None or drawn[0] != facts:
            strip = draw_request_row(frame, row, self._selected, glyphs, width, preempted=preempted, lit=lit)
            drawn = self._drawn[row.key] = facts, strip
        return drawn[1]

    def set_filter(self, text: str, query: Query) -> None:
        self._text, self._query = text, query
        self.redraw()

    @property
    def filter_text(self) -> str:
        return self._text

    @property
    def note(self) -> str:
        """For the title: what makes the list other than it is by itself."""
        parts = [f"/{self._text}: {len(self._rows.requests)}"] if self._text else []
        parts += [f"by {self._order}"] if self._order != SORTS[0] else []
        return "  ".join([*parts, "following"] if self._following else parts)

    def followed(self, frame: Frame) -> str | None:
        """The request to select now, while the newest one is followed."""
        running = [request for request in frame.requests if request.status == "running"]
        return running[-1].request_id if self._following and running else None

    def stop_following(self) -> None:
        """The user has selected something, or nothing."""
        self._following = False

    def action_sort(self) -> None:
        self._order = SORTS[(SORTS.index(self._order) + 1) % len(SORTS)]
        self.redraw()
        self.post_message(self.Rearranged())

    def action_follow(self) -> None:
        self._following = not self._following
        self.post_message(self.Rearranged())

    def action_choose(self, step: int) -> None:
        keys = [row.key for row in self._rows]
        if keys:
            here = keys.index(self._selected) if self._selected in keys else (-1 if step > 0 else len(keys))
            self._choose(keys[min(max(here + step, 0), len(keys) - 1)])

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        row = offset.y + self.scroll_offset.y - len(self.refused) if offset is not None else -1
        if 0 <= row < len(self._rows):
            self._choose(self._rows[row].key)

    def _choose(self, key: str) -> None:
        """Move at once, so that the next key counts from here, and tell the app."""
        self._selected, self._following = key, False
        self.redraw()
        self._scroll_to_selected()
        self.post_message(self.Chosen(key))

    def _scroll_to_selected(self) -> None:
        for y, row in enumerate(self._rows, len(self.refused)):
            if row.key == self._selected:
                top, height = self.scroll_offset.y, self.content_height
                if not top <= y < top + height:
                    self.scroll_to(y=y if y < top else y - height + 1, animate=False)


class TextPane(FollowingPane):
    """What was asked, and what the model has written so far."""

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self._shown: Shown | None = None

    def show(self, shown: Shown | None) -> None:
        if shown != self._shown:
            self._shown = shown
            self.redraw()

    def draw(self, width: int) -> list[Strip]:
        if self._shown is None:
            return [make_strip([(" no sequence selected", theme.SOFT)], width)]
        return draw_text(*self._shown, self._glyphs, width)

    def copied_text(self) -> str:
        """Whole, and without the pane's line breaks."""
        return f"{self._shown[0].prompt}{self._shown[1].text}" if self._shown is not None else ""

    def redraw(self) -> None:
        super().redraw()
        self.follow()


class BlockPane(StripPane):
    """The block under the cursor."""

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self._frame: Frame | None = None
        self._block_id: int | None = None
        self._pool: PoolFrame = EMPTY_POOL

    def show(self, frame: Frame, block_id: int | None, pool: PoolFrame) -> None:
        self._frame, self._block_id, self._pool = frame, block_id, pool
        self.redraw()

    def draw(self, width: int) -> list[Strip]:
        if self._frame is None or self._block_id is None:
            return [make_strip([(" arrow keys or a click in the pool choose a block", theme.SOFT)], width)]
        return draw_block(self._frame, self._block_id, self._glyphs, width, pool=self._pool)


class EventsPane(FollowingPane):
    """The log. Lines are drawn when they come into view; the newest is followed until the user goes up."""

    BINDINGS: ClassVar = [
        Binding("down,j", "point(1)", "next event", show=False),
        Binding("up,k", "point(-1)", "previous event", show=False),
        Binding("enter", "jump", "to that moment, its block and its request", show=False),
    ]

    class Jumped(Message):
        """The user wants to see the moment of this event."""

        def __init__(self, entry: LogEntry) -> None:
            super().__init__()
            self.entry = entry

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self._whole: tuple[LogEntry, ...] = ()
        self._log: Sequence[LogEntry] = ()
        self._pointed: LogEntry | None = None
        self._last: LogEntry | None = None  # the newest entry, when the longest was looked for
        self._longest = 0
        self._is_brief = False
        self._text, self._query = "", EVERYTHING

    def show(self, log: tuple[LogEntry, ...]) -> None:
        if log != self._whole:
            self._whole = log
            self._sift()

    def set_filter(self, text: str, query: Query) -> None:
        self._text, self._query, self._last = text, query, None
        self._sift()

    @property
    def filter_text(self) -> str:
        return self._text

    @property
    def note(self) -> str:
        """For the title: the filter, and how many pass it."""
        return f"/{self._text}: {len(self._log):,} of {len(self._whole):,}" if self._text else ""

    def _sift(self) -> None:
        self._log = filter_log(self._whole, self._query)
        self._longest = self._measure()
        size = Size(self._longest + HEAD_WIDTH, len(self._log))
        if size != self.virtual_size:
            self.resize_content(size)
        self.follow()
        self.repaint(range(self.content_height))

    def _measure(self) -> int:
        """How long the longest sentence is. Of a log that goes on, the new entries alone are looked at."""
        last, self._last = self._last, self._log[-1] if self._log else None
        longest = 0
        for entry in reversed(self._log):
            if entry is last:
                return max(longest, self._longest)
            longest = max(longest, len(entry.sentence))
        return longest

    def redraw(self) -> None:
        self.refresh()

    def on_resize(self) -> None:
        self.follow()

    def before_lines(self) -> None:
        super().before_lines()
        self._is_brief = self.content_width < BRIEF_WIDTH

    def line_at(self, y: int) -> Strip:
        if y >= len(self._log):
            return Strip([])
        entry = self._log[y]
        strip = draw_entry(entry, self._glyphs, brief=self._is_brief)
        return strip.apply_style(theme.ROW) if entry is self._pointed else strip

    def action_point(self, step: int) -> None:
        """Move the mark; it begins at the newest event in view."""
        if not self._log:
            return
        bottom = min(self.scroll_offset.y + self.content_height, len(self._log)) - 1
        here = self._place()
        self._point(bottom if here is None else min(max(here + step, 0), len(self._log) - 1))

    def _place(self) -> int | None:
        return next((y for y, entry in enumerate(self._log) if entry is self._pointed), None)

    def _point(self, y: int) -> None:
        self._pointed, self._following = self._log[y], False
        top, height = self.scroll_offset.y, self.content_height
        if not top <= y < top + height:
            self.scroll_to(y=y if y < top else y - height + 1, animate=False)
        self.refresh()

    def copied_text(self) -> str:
        """The newest lines down to the last one in view."""
        stop = min(self.scroll_offset.y + self.content_height, len(self._log))
        start = max(stop - MAX_COPIED_LINES, 0)
        return "\n".join(self.line_at(y).text.rstrip() for y in range(start, stop))

    def action_jump(self) -> None:
        if self._pointed is not None:
            self.post_message(self.Jumped(self._pointed))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        row = offset.y + self.scroll_offset.y if offset is not None else len(self._log)
        if row < len(self._log):
            self._point(row)
            if event.chain == 2:
                self.action_jump()
