"""The candidates or beams of one request side by side: what they have in common, where they part, what each has. Pure.

L0 → P0 ■■■■ refs 2  p0│ p1│ p2│ p3                  common memory, once and dimmed
they part at position 6: L1, slot 2
r1.0  2 tok              │ r1.1  2 tok
L1 P2 ■■■■ ◆ from P1     │ L1 P1 ■■■■
 p4 p5› a0 a1            │  p4 p5› b0 b1
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.copies import RequestFrame, SequenceFrame
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part, fit_parts, flat, make_strip, measure, piece_parts, wrap_parts
from kvscope.dashboard.table import OUT_OF_WINDOW, copied_blocks, slot_words

MIN_COLUMN = 18
ROOMY = 28
MAX_TRUNK = 2  # lines for what all have in common


class Column(NamedTuple):
    """One candidate, the pool that its blocks are in, and its copies by logical block."""

    sequence: SequenceFrame
    pool: PoolFrame
    copies: dict[int, tuple[int, int]]

    def block(self, logical: int) -> int | None:
        return self.sequence.block(logical, self.pool.letter)

    @property
    def num_blocks(self) -> int:
        """Where its table ends."""
        return self.sequence.num_released + len(self.sequence.table_in(self.pool.letter))


class CandidatesDrawing:
    """The lines, drawn at once: what all share is a line or two, however long the prompt is."""

    def __init__(
        self, frame: Frame, request: RequestFrame, glyphs: Glyphs, width: int, *, height: int | None = None
    ) -> None:
        """In more lines than `height` the names come once more below the newest text."""
        self._frame, self._request, self._glyphs, self._width = frame, request, glyphs, width
        self._block_size = frame.pool.block_size
        self._all = [_column(frame, sequence) for sequence in request.sequences]
        num_columns = max(min(len(self._all), width // MIN_COLUMN), 1)
        self.shown, self.column_width = self._all[:num_columns], width // num_columns
        self.parting = find_parting([column.sequence for column in self._all])
        self._start = self._num_common_blocks()
        heads = self._heads()
        self.strips = [*self._trunk(), *self._parting_line(), heads]
        num_tokens = max(len(column.sequence.pieces) for column in self._all)
        num_blocks = max(column.num_blocks for column in self._all)
        for logical in range(self._start, max(num_blocks, -(-num_tokens // self._block_size))):
            self.strips += self._row(logical)
        self.strips += [heads] if height is not None and len(self.strips) > height else []

    def sequence_at(self, x: int) -> str:
        """Whose column it is."""
        return self.shown[min(x // self.column_width, len(self.shown) - 1)].sequence.sequence_id

    def _num_common_blocks(self) -> int:
        """Leading blocks that are the same for all, up to the one in which they part."""
        first, *others = self._all
        end = first.num_blocks
        if self.parting is not None:
            end = min(end, self.parting // self._block_size)
        same = (all(other.block(logical) == first.block(logical) for other in others) for logical in range(end))
        return next((logical for logical, is_same in enumerate(same) if not is_same), end)

    def _trunk(self) -> list[Strip]:
        """A line for each common block; of many, how many, and the last one."""
        first, count = self._all[0], self._start
        drawn = range(count) if count <= MAX_TRUNK else range(count - MAX_TRUNK + 1, count)
        lines = []
        if drawn.start:
            words = f" L0-L{drawn.start - 1}  {drawn.start} blocks that all {len(self._all)} share"
            lines.append(make_strip([(words, theme.SOFT)], self._width))
        for logical in drawn:
            block_id, start = first.block(logical), logical * self._block_size
            head: list[Part] = [
                (f" L{logical} {self._glyphs.arrow} ", theme.SOFT),
                *([(OUT_OF_WINDOW, theme.FAINT)] if block_id is None else self._block_words(first, logical, block_id)),
                (" ", theme.PLAIN),
            ]
            stop = min(start + self._block_size, first.sequence.num_written)
            texts = piece_parts(first.sequence.pieces[start:stop], theme.FAINT, self._glyphs)
            lines.append(make_strip([*head, *fit_parts(texts, self._width - measure(head), self._glyphs)], self._width))
        return lines

    def _parting_line(self) -> list[Strip]:
        if self.parting is None:
            return []
        logical, slot = divmod(self.parting, self._block_size)
        hidden = len(self._all) - len(self.shown)
        more = f"; {hidden} more than fit here" if hidden else ""
        words = f" {self._glyphs.cursor} they part at position {self.parting}: L{logical}, slot {slot}{more}"
        return [make_strip([(words, theme.NOTICE)], self._width)]

    def _heads(self) -> Strip:
        cells = []
        for column in self.shown:
            sequence = column.sequence
            words = f" {sequence.num_generated} tok"
            words += f" {sequence.score:.2f}" if sequence.score is not None else ""
            words += f" {self._glyphs.tick} {sequence.finish_reason}" if sequence.finish_reason is not None else ""
            style = theme.owner_style(self._request.owner) + theme.BOLD
            cells.append([[(sequence.sequence_id, style), (words, theme.SOFT)]])
        return self._beside(cells)[0]

    def _row(self, logical: int) -> list[Strip]:
        """A logical block of each: where it lies, and its text, as many lines as the longest needs."""
        cells: list[list[list[Part]]] = []
        for index, column in enumerate(self.shown):
            block_id = column.block(logical)
            same = [other.sequence.sequence_id for other in self.shown[:index] if other.block(logical) == block_id]
            head = self._head(column, logical, block_id, same[0] if same and block_id is not None else None)
            text = wrap_parts(self._text(column, logical, block_id), self.column_width - 3)
            cells.append([head, *([(s.text, s.style or theme.PLAIN) for s in strip] for strip in text)])
        return self._beside(cells)

    def _head(self, column: Column, logical: int, block_id: int | None, like: str | None) -> list[Part]:
        parts: list[Part] = [(f"L{logical} ", theme.SOFT)]
        if block_id is None:
            if logical < column.sequence.num_released:
                return [*parts, (OUT_OF_WINDOW, theme.FAINT)]
            ended = column.sequence.finish_reason is not None
            return [*parts, ("given back" if ended else "no block yet", theme.FAINT)]
        parts += self._block_words(column, logical, block_id)
        source, target = column.copies.get(logical, (None, None))
        if source is not None and target == block_id:
            words = "from " if self.column_width >= ROOMY else ""
            parts.append((f" {self._glyphs.copy} {words}P{source}", theme.NOTICE))
        return [*parts, (f" = {like}", theme.STRONG)] if like is not None else parts

    def _block_words(self, column: Column, logical: int, block_id: int) -> list[Part]:
        size, ref_count = self._block_size, column.pool.refs[block_id]
        num_written = min(max(column.sequence.num_written - logical * size, 0), size)
        return [
            (f"{column.pool.name(block_id)} ", theme.STRONG),
            (slot_words(num_written, size, self.column_width, self._glyphs), theme.owner_style(self._request.owner)),
            *([(" refs ", theme.FAINT), (f"{ref_count}", theme.SHARED)] if ref_count > 1 else []),
        ]

    def _text(self, column: Column, logical: int, block_id: int | None) -> list[Part]:
        """Dimmed where the memory is shared; soft where there is no KV (yet)."""
        sequence, start = column.sequence, logical * self._block_size
        is_shared = block_id is not None and column.pool.refs[block_id] > 1
        parts: list[Part] = []
        for position, piece in enumerate(sequence.pieces[start : start + self._block_size], start):
            if position == self.parting:
                parts.append((self._glyphs.cursor, theme.NOTICE))
            written = theme.FAINT if is_shared else theme.TEXT
            parts.append((flat(piece, self._glyphs), written if position < sequence.num_written else theme.SOFT))
        return parts

    def _beside(self, cells: Sequence[Sequence[Sequence[Part]]]) -> list[Strip]:
        """The lines of each column beside those of the others, in columns of one width."""
        room = self.column_width - 3
        lines = []
        for parts in zip_longest(*cells, fillvalue=()):
            line: list[Part] = []
            for index, column in enumerate(parts):
                fitted = fit_parts(list(column), room, self._glyphs)
                line += [(f"{self._glyphs.bar} " if index else " ", theme.FAINT), *fitted]
                line.append((" " * (room + (1 if index else 2) - measure(fitted)), theme.PLAIN))
            lines.append(make_strip(line, self._width))
        return lines


def find_parting(sequences: Sequence[SequenceFrame]) -> int | None:
    """The first position at which their texts differ, or one has none; None while all are the same."""
    start = sequences[0].num_prompt_tokens  # the prompt is everybody's
    stop = max(len(sequence.pieces) for sequence in sequences)
    for position in range(start, stop):
        pieces = {sequence.pieces[position] if position < len(sequence.pieces) else None for sequence in sequences}
        if len(pieces) > 1:
            return position
    return None


def _column(frame: Frame, sequence: SequenceFrame) -> Column:
    if sequence.host_table:
        return Column(sequence, frame.host, {})
    return Column(sequence, frame.pool, copied_blocks(frame, sequence.sequence_id))
