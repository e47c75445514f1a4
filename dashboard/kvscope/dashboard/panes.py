"""The panes beside the grid: requests, block table, text, one block, events. Each keeps values and draws them."""

from typing import ClassVar

from textual import events
from textual.binding import Binding
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.inspector import draw_block
from kvscope.dashboard.pane import FollowingPane, LazyPane, StripPane
from kvscope.dashboard.requests import Row, draw_request_row, list_rows
from kvscope.dashboard.selection import Shown
from kvscope.dashboard.strips import make_strip
from kvscope.dashboard.table import TableDrawing, draw_text
from kvscope.dashboard.ticker import draw_entry
from kvscope.transport.source import LogEntry

BRIEF_WIDTH = 74
HEAD_WIDTH = 28  # sequence number, step, phase and glyph before an event's sentence


class RequestsPane(LazyPane):
    """The list of requests; moving in it selects."""

    BINDINGS: ClassVar = [
        Binding("down,j", "choose(1)", "next", show=False),
        Binding("up,k", "choose(-1)", "previous", show=False),
    ]

    class Chosen(Message):
        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self, glyphs: Glyphs, *, id: str, hint: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs, self._hint = glyphs, hint
        self._frame: Frame | None = None
        self._selected: str | None = None
        self._rows: list[Row] = []

    def show(self, frame: Frame, selected: str | None) -> None:
        moved = selected != self._selected
        self._frame, self._selected = frame, selected
        self.redraw()
        if moved:
            self._scroll_to_selected()

    def prepare(self, width: int) -> int:
        self._rows = list_rows(self._frame) if self._frame is not None else []
        return max(len(self._rows), 1)

    def draw_line(self, y: int, width: int) -> Strip:
        if self._frame is None or y >= len(self._rows):
            return make_strip([(f" {self._hint}", theme.SOFT)], width)
        return draw_request_row(self._frame, self._rows[y], self._selected, self._glyphs, width)

    def action_choose(self, step: int) -> None:
        keys = [row.key for row in self._rows]
        if keys:
            here = keys.index(self._selected) if self._selected in keys else (-1 if step > 0 else len(keys))
            self._choose(keys[min(max(here + step, 0), len(keys) - 1)])

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        row = offset.y + self.scroll_offset.y if offset is not None else len(self._rows)
        if row < len(self._rows):
            self._choose(self._rows[row].key)

    def _choose(self, key: str) -> None:
        """Move at once, so that the next key counts from here, and tell the app."""
        self._selected = key
        self.redraw()
        self._scroll_to_selected()
        self.post_message(self.Chosen(key))

    def _scroll_to_selected(self) -> None:
        for y, row in enumerate(self._rows):
            if row.key == self._selected:
                top, height = self.scroll_offset.y, self.content_height
                if not top <= y < top + height:
                    self.scroll_to(y=y if y < top else y - height + 1, animate=False)


class TablePane(LazyPane):
    """The block table of one sequence."""

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self._frame: Frame | None = None
        self._shown: Shown | None = None
        self._drawing: TableDrawing | None = None

    def show(self, frame: Frame, shown: Shown | None) -> None:
        self._frame, self._shown = frame, shown
        self.redraw()

    def prepare(self, width: int) -> int:
        self._drawing = None
        if self._frame is not None and self._shown is not None:
            self._drawing = TableDrawing(self._frame, *self._shown, self._glyphs, width)
        return len(self._drawing) if self._drawing is not None else 1

    def draw_line(self, y: int, width: int) -> Strip:
        if self._drawing is None:
            return make_strip([(" no sequence selected", theme.SOFT)], width)
        return self._drawing[y]


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

    def show(self, frame: Frame, block_id: int | None) -> None:
        self._frame, self._block_id = frame, block_id
        self.redraw()

    def draw(self, width: int) -> list[Strip]:
        if self._frame is None or self._block_id is None:
            return [make_strip([(" arrow keys or a click in the pool choose a block", theme.SOFT)], width)]
        return draw_block(self._frame, self._block_id, self._glyphs, width)


class EventsPane(FollowingPane):
    """The log. Lines are drawn when they come into view; the newest is followed until the user scrolls up."""

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self._log: tuple[LogEntry, ...] = ()

    def show(self, log: tuple[LogEntry, ...]) -> None:
        if log == self._log:
            return
        self._log = log
        longest = max((len(entry.sentence) for entry in log), default=0)
        self.virtual_size = Size(longest + HEAD_WIDTH, len(log))
        self.refresh()
        self.follow()

    def redraw(self) -> None:
        self.refresh()

    def on_resize(self) -> None:
        self.follow()

    def line_at(self, y: int) -> Strip:
        if y >= len(self._log):
            return Strip([])
        return draw_entry(self._log[y], self._glyphs, brief=self.content_width < BRIEF_WIDTH)
