"""The block table of one sequence, and its text, as strips. Pure."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.copies import RequestFrame, SequenceFrame
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part, fit_parts, make_strip, measure, piece_parts, wrap_parts
from kvscope.dashboard.translation import draw_translation
from kvscope.events.types import BlockCopied, BlocksReleased, BlocksSwappedOut


class Notes(NamedTuple):
    """What is known about a table beside its entries: copies by logical block, other holders by physical block."""

    copies: Mapping[int, tuple[int, int]]
    sharers: Mapping[int, list[str]]


OUT_OF_WINDOW = "out of the window"


class TableDrawing:
    """The lines of one table, one per logical block, drawn when asked for: a long sequence has thousands.

    All blocks that fell out of the sliding window have one line together.
    """

    def __init__(
        self, frame: Frame, shown: tuple[RequestFrame, SequenceFrame], glyphs: Glyphs, width: int, *, token: int | None
    ) -> None:
        """With `token`, a position, its translation stands under the row of its block."""
        self._frame, (self._request, self._sequence) = frame, shown
        sequence = self._sequence
        self._glyphs, self._width = glyphs, width
        self._pool = frame.host if sequence.host_table else frame.pool
        self._table = sequence.table_in(self._pool.letter)
        copies = copied_blocks(frame, sequence.sequence_id) if self._pool is frame.pool else {}
        self._notes = Notes(copies, find_sharers(frame, sequence, self._pool))
        self._num_gone, self._head = sequence.num_released, int(sequence.num_released > 0)  # blocks, their lines
        self._token, self._below, self.row = token, list[Strip](), self._head + len(sequence.table)  # has the token
        if token is not None and sequence.table:
            place = token // frame.pool.block_size - self._num_gone
            self.row = self._head + place
            readers = self._notes.sharers.get(sequence.table[place], [])
            self._below = draw_translation(frame, (sequence, token), readers, glyphs, width)

    def __len__(self) -> int:
        return max(self._head + len(self._table), 1) + len(self._below)

    @property
    def num_below(self) -> int:
        """Lines of the translation, which begin at line `row + 1`."""
        return len(self._below)

    def logical_at(self, y: int) -> int | None:
        """The logical block, of those that it has, that line `y` is about."""
        place = (y if y <= self.row else max(y - len(self._below), self.row)) - self._head
        return self._num_gone + place if 0 <= place < len(self._table) else None

    def __getitem__(self, y: int) -> Strip:
        width = self._width
        if self.row < y <= self.row + len(self._below):
            return self._below[y - self.row - 1]
        if y < self._head:
            return self._gone()
        logical = self.logical_at(y)
        if logical is None:
            return make_strip([(f" {_no_blocks(self._request, self._sequence)}", theme.SOFT)], width)
        shown = (self._request, self._sequence)
        words = _row_words(self._pool, shown, logical, self._notes, glyphs=self._glyphs, width=width)
        strip = make_strip(words, width)
        return strip.apply_style(theme.ROW) if self._below and y == self.row else strip

    def facts(self, y: int) -> tuple[object, ...] | None:
        """All that the line of a block depends on; None for other lines, and beside a translation."""
        logical = self.logical_at(y)
        if logical is None or y < self._head or self._below:
            return None
        sequence, block_size = self._sequence, self._pool.block_size
        block_id, first = self._table[logical - self._num_gone], logical * block_size
        stop = min(sequence.num_written, first + block_size)
        return (
            (self._width, self._request.owner, self._num_gone, len(self._table)),
            (self._pool.letter, self._pool.num_blocks, block_size),
            (sequence.sequence_id, logical, block_id, self._pool.refs[block_id], stop),
            (self._notes.sharers.get(block_id), self._notes.copies.get(logical)),
            sequence.pieces[first:stop],
        )

    def _gone(self) -> Strip:
        """Where the logical numbers below begin, and why."""
        count = self._num_gone
        place = "L0" if count == 1 else f"L0-L{count - 1}"
        words: list[Part] = [(f" {place}", theme.SOFT), (f" {self._glyphs.arrow} ", theme.FAINT)]
        info = self._frame.info
        reach = f" of {info.sliding_window}" if info is not None and info.sliding_window is not None else ""
        return make_strip([*words, (f"{OUT_OF_WINDOW}{reach}: given back", theme.FAINT)], self._width)


def draw_table(frame: Frame, request: RequestFrame, sequence: SequenceFrame, glyphs: Glyphs, width: int) -> list[Strip]:
    """Every line of a table."""
    drawing = TableDrawing(frame, (request, sequence), glyphs, width, token=None)
    return [drawing[y] for y in range(len(drawing))]


def draw_text(request: RequestFrame, sequence: SequenceFrame, glyphs: Glyphs, width: int) -> list[Strip]:
    """What was asked and what the model has written so far, wrapped."""
    *above, last = _wrapped_prompt(request.prompt, max(width - 2, 1))
    end: list[Part] = []
    if sequence.finish_reason is not None:
        end = [(f"  {glyphs.tick} {sequence.finish_reason}", theme.SOFT)]
    body = wrap_parts([(last, theme.SOFT), (sequence.text, theme.STRONG), *end], max(width - 2, 1))
    margin = make_strip([(" ", theme.PLAIN)])
    soft = [make_strip([(" " + line, theme.SOFT)], width) for line in above]
    return [*soft, *(Strip.join([margin, strip]).adjust_cell_length(width) for strip in body)]


@lru_cache(maxsize=16)
def _wrapped_prompt(prompt: str, width: int) -> tuple[str, ...]:
    """A prompt never changes: it is wrapped once, and its last line continues with what the model wrote."""
    strips = wrap_parts([(prompt, theme.SOFT)], width)
    lines = [strip.text.rstrip(" ") for strip in strips]
    return (*lines[:-1], lines[-1] + " " * (len(prompt) - len(prompt.rstrip(" "))))


def copied_blocks(frame: Frame, sequence_id: str) -> dict[int, tuple[int, int]]:
    """Logical block -> (source, target) of the copies this sequence made since it last let go of its table.

    Only what the log still holds: the table itself does not remember where a block came from.
    """
    copies: dict[int, tuple[int, int]] = {}
    sequence = frame.sequence(sequence_id)
    if sequence is None or not sequence.num_copies:
        return copies  # a look at the whole log, spared
    for entry in reversed(frame.log):
        event = entry.event
        if isinstance(event, BlocksReleased | BlocksSwappedOut) and event.sequence_id == sequence_id:
            break
        if isinstance(event, BlockCopied) and event.sequence_id == sequence_id:
            copies.setdefault(event.logical_block, (event.source_block, event.target_block))
    return copies


def find_sharers(frame: Frame, sequence: SequenceFrame, pool: PoolFrame) -> dict[int, list[str]]:
    """The other sequences that hold a block of this one in that pool, by block: one pass over all tables."""
    sharers: dict[int, list[str]] = {}
    if not pool.count_shared(sequence.table_in(pool.letter)):
        return sharers
    mine = set(sequence.table_in(pool.letter))
    for request in frame.requests:
        for other in request.sequences:
            table = other.table_in(pool.letter)
            if other.sequence_id != sequence.sequence_id and not mine.isdisjoint(table):
                for block_id in mine.intersection(table):
                    sharers.setdefault(block_id, []).append(other.sequence_id)
    return sharers


def _no_blocks(request: RequestFrame, sequence: SequenceFrame) -> str:
    if sequence.finish_reason is not None:
        return "finished: every block given back"
    if request.status == "preempted":
        return "preempted: no blocks; its KV will be computed again"
    return "no blocks yet"


def _row_words(
    pool: PoolFrame,
    shown: tuple[RequestFrame, SequenceFrame],
    logical: int,
    notes: Notes,
    *,
    glyphs: Glyphs,
    width: int,
) -> list[Part]:
    request, sequence = shown
    table = sequence.table_in(pool.letter)
    block_id, block_size = table[logical - sequence.num_released], pool.block_size
    ref_count = pool.refs[block_id]
    num_written = min(max(sequence.num_written - logical * block_size, 0), block_size)
    digits = len(str(max(sequence.num_released + len(table) - 1, 0)))
    parts: list[Part] = [
        (" L" + str(logical).ljust(digits), theme.SOFT),
        (f" {glyphs.arrow} ", theme.FAINT),
        (pool.name(block_id).ljust(len(str(max(pool.num_blocks - 1, 0))) + 1), theme.STRONG),
        (" " + slot_words(num_written, block_size, width, glyphs), theme.owner_style(request.owner)),
        (" refs ", theme.FAINT),
        (f"{ref_count}", theme.SHARED if ref_count > 1 else theme.SOFT),
        (" ", theme.PLAIN),
    ]
    tail: list[Part] = []
    if ref_count > 1:
        tail.append((f" = {_some(notes.sharers.get(block_id, []))} ", theme.STRONG))
    source, target = notes.copies.get(logical, (None, None))
    if source is not None and target == block_id:
        tail.append((f" {glyphs.copy} copied from P{source} ", theme.NOTICE))
    parts += tail
    first = logical * block_size
    parts.append((" ", theme.PLAIN))
    pieces = piece_parts(sequence.pieces[first : first + num_written], theme.TEXT, glyphs)
    return parts + fit_parts(pieces, width - measure(parts), glyphs)


def slot_words(num_written: int, block_size: int, width: int, glyphs: Glyphs) -> str:
    """One glyph per slot; as a fraction where the slots would push the texts out."""
    if block_size > width // 6:
        return f"{num_written:>{len(str(block_size))}}/{block_size}"
    return glyphs.written * num_written + glyphs.reserved * (block_size - num_written)


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "")
