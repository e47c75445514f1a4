"""The block table as a pane: of one sequence, or of all candidates of a request side by side."""

from typing import ClassVar

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.candidates import CandidatesDrawing
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.long_panes import LazyPane
from kvscope.dashboard.requests_pane import RequestsPane
from kvscope.dashboard.selection import Shown
from kvscope.dashboard.strips import make_strip
from kvscope.dashboard.table import TableDrawing

MAX_DRAWN_LINES = 500  # that are remembered


class TablePane(LazyPane):
    """One sequence, with a cursor on a token that shows where its keys and values lie; or a whole request."""

    BINDINGS: ClassVar = [
        Binding("right,l", "token(1)", "next token: where its keys and values lie", show=False),
        Binding("left,h", "token(-1)", "previous token", show=False),
        Binding("down,j", "block(1)", "next block", show=False),
        Binding("up,k", "block(-1)", "previous block", show=False),
    ]

    class Chosen(RequestsPane.Chosen):
        """One of the candidates."""

    class TokenPointed(Message):
        """The cursor is on a token in this block."""

        def __init__(self, block_id: int) -> None:
            super().__init__()
            self.block_id = block_id

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self._frame: Frame | None = None
        self._shown: Shown | None = None
        self._drawing: TableDrawing | None = None
        self._drawn: dict[int, tuple[tuple[object, ...], Strip]] = {}  # by line; what it was drawn from, and it
        self._candidates: CandidatesDrawing | None = None  # instead, while a whole request is selected
        self._whole = self._following = False
        self.token: int | None = None  # a position; it stays when another sequence comes on show, to compare them

    def show(self, frame: Frame, shown: Shown | None, *, whole: bool) -> None:
        """One sequence's table, or, `whole`, all of its request's side by side: at their newest text while it grows."""
        came = whole and shown is not None and (not self._whole or self._name_shown != shown[0].request_id)
        self._frame, self._shown, self._whole = frame, shown, whole
        if came and shown is not None:
            self._following = shown[0].status == "running"
        self.redraw()
        if whole and self._following:
            self.scroll_to(y=self.max_scroll_y, animate=False, force=True)  # the scrollbar may not be there yet

    @property
    def _name_shown(self) -> str | None:
        return self._shown[0].request_id if self._shown is not None else None

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Up from the end stops the following, back at the end resumes it."""
        super().watch_scroll_y(old_value, new_value)
        self._following = new_value >= self.max_scroll_y

    def prepare(self, width: int) -> int:
        self._drawing = self._candidates = None
        if len(self._drawn) > MAX_DRAWN_LINES:
            self._drawn.clear()
        if self._frame is not None and self._shown is not None and self._whole:
            self._candidates = CandidatesDrawing(
                self._frame, self._shown[0], self._glyphs, width, height=self.content_height
            )
            return len(self._candidates.strips)
        if self._frame is not None and self._shown is not None:
            token = None if self.token is None else self._within(self.token)
            self._drawing = TableDrawing(self._frame, self._shown, self._glyphs, width, token=token)
        return len(self._drawing) if self._drawing is not None else 1

    def draw_line(self, y: int, width: int) -> Strip:
        if self._candidates is not None:
            return self._candidates.strips[y]
        if self._drawing is None:
            return make_strip([(" no sequence selected", theme.SOFT)], width)
        facts = self._drawing.facts(y)
        if facts is None:
            return self._drawing[y]
        drawn = self._drawn.get(y)
        if drawn is None or drawn[0] != facts:
            drawn = self._drawn[y] = facts, self._drawing[y]
        return drawn[1]

    @property
    def _slots(self) -> range:
        """The positions that have a slot."""
        if self._frame is None or self._shown is None:
            return range(0)
        sequence, block_size = self._shown[1], self._frame.pool.block_size
        first = sequence.num_released * block_size
        return range(first, first + len(sequence.table) * block_size)

    def _within(self, token: int) -> int:
        """The position with a slot that is nearest to this one."""
        return min(max(token, self._slots.start), self._slots.stop - 1)

    def action_token(self, step: int) -> None:
        """Move by tokens; the cursor comes up where the view begins. Beside others, the first or last candidate's."""
        if self._candidates is not None:
            self.post_message(self.Chosen(self._candidates.shown[0 if step > 0 else -1].sequence.sequence_id))
        elif self._slots and self._frame is not None:
            start = self._slots.start + self.scroll_offset.y * self._frame.pool.block_size
            self.point(start if self.token is None else self._within(self.token) + step)

    def action_block(self, step: int) -> None:
        """Move by blocks; without a cursor, scroll."""
        if self.token is None or self._frame is None or self._candidates is not None:
            self.scroll_relative(y=step, animate=False)
        else:
            self.action_token(step * self._frame.pool.block_size)

    def point(self, token: int | None) -> None:
        """Put the cursor on a position, or take it away."""
        self.token = None if token is None else self._within(token)
        self.redraw()
        drawing, shown = self._drawing, self._shown
        if self.token is None or drawing is None or shown is None:
            return
        top, height, end = self.scroll_offset.y, self.content_height, drawing.row + drawing.num_below
        if not top <= drawing.row <= end < top + height:
            self.scroll_to(y=drawing.row if drawing.row < top else max(end - height + 1, 0), animate=False)
        logical = drawing.logical_at(drawing.row)
        block_id = shown[1].block(logical) if logical is not None else None
        if block_id is not None:
            self.post_message(self.TokenPointed(block_id))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and self._candidates is not None:
            self.post_message(self.Chosen(self._candidates.sequence_at(offset.x)))
        if offset is None or self._drawing is None or self._frame is None:
            return
        logical = self._drawing.logical_at(offset.y + self.scroll_offset.y)
        if logical is not None:
            self.point(logical * self._frame.pool.block_size)
