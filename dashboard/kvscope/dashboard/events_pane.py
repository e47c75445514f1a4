"""The log as a pane."""

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.filters import EVERYTHING, Query, filter_log
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.long_panes import FollowingPane
from kvscope.dashboard.pane import MAX_COPIED_LINES
from kvscope.dashboard.ticker import draw_entry
from kvscope.transport.source import LogEntry

BRIEF_WIDTH = 74
HEAD_WIDTH = 28  # sequence number, step, phase and glyph before an event's sentence


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
        self._whole: Sequence[LogEntry] = ()
        self._log: Sequence[LogEntry] = ()
        self._pointed: LogEntry | None = None
        self._last: LogEntry | None = None  # the newest entry, when the longest was looked for
        self._longest = 0
        self._is_brief = self._is_behind = False
        self._text, self._query = "", EVERYTHING

    def show(self, log: Sequence[LogEntry]) -> None:
        if log is not self._whole or self._is_behind:
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
        self._is_behind = not self.display  # out of sight: the size follows when it is shown, for that is costly
        if self._is_behind:
            return
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
        self._sift()

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
