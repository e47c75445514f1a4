"""The list of requests as a pane: sorted, filtered, followed; above it what was refused a moment ago."""

from typing import ClassVar

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.filters import EVERYTHING, SORTS, Query
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.long_panes import LazyPane
from kvscope.dashboard.pane import key_names_of
from kvscope.dashboard.refusals import RecentRefusals, draw_refusal
from kvscope.dashboard.requests import Rows, draw_request_row, last_preemptions, list_rows, row_facts
from kvscope.dashboard.strips import make_strip
from kvscope.transport.source import LogEntry

MAX_DRAWN_ROWS = 500  # lines of requests that are remembered


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
