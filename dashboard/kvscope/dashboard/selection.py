"""What the user looks at: a request, a sequence, a block, or nothing in particular; and what a frame has of it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.copies import DEVICE, RequestFrame, SequenceFrame
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.grid_layout import Light
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.requests import order_requests
from kvscope.events import types as ev

Shown = tuple[RequestFrame, SequenceFrame]


@dataclass
class Selection:
    """What the user has chosen. The cursor is on a block of the pool, or on one of the host pool: never on both."""

    key: str | None = None  # a request or a sequence
    cursor: int | None = None
    host_cursor: int | None = None
    colour_by: ColourBy = ColourBy.OWNER

    def point(self, block_id: int | None, letter: str = DEVICE) -> None:
        self.cursor, self.host_cursor = (block_id, None) if letter == DEVICE else (None, block_id)

    def block_on_show(self, frame: Frame) -> tuple[int | None, PoolFrame]:
        """The one under the cursor, else the one that was touched last; and its pool."""
        if self.host_cursor is not None and frame.host.num_blocks:
            return self.host_cursor, frame.host
        return self.cursor if self.cursor is not None else latest_block(frame), frame.pool

    def holders_of_cursor(self, frame: Frame) -> frozenset[str]:
        if self.cursor is None and self.host_cursor is None:
            return frozenset()
        block_id, pool = self.block_on_show(frame)
        is_chosen = self.cursor is not None or pool is frame.host  # else a host pool that has gone was pointed at
        holders = frame.holders(block_id, pool) if block_id is not None and is_chosen else []
        return frozenset(name for name, _ in holders)


def find_selected(frame: Frame, key: str | None) -> Shown | None:
    """The request and sequence that a selected id names; a request stands for its first sequence with blocks."""
    if key is None:
        return None
    request = frame.request(key)
    if request is not None:
        return request, next((seq for seq in request.sequences if seq.table), request.sequences[0])
    request, sequence = frame.request(key.rpartition(".")[0]), frame.sequence(key)
    return (request, sequence) if request is not None and sequence is not None else None


def shown_sequence(frame: Frame, key: str | None) -> Shown | None:
    """The sequence whose table is on screen: the selected one, else the first of the list."""
    chosen = find_selected(frame, key)
    if chosen is not None:
        return chosen
    ordered = [request for request in order_requests(frame) if request.sequences]
    return find_selected(frame, ordered[0].request_id) if ordered else None


def light_of(frame: Frame, key: str | None, cursor: int | None, letter: str = DEVICE) -> Light:
    """The selected blocks of one pool with their logical numbers. Nothing is dimmed when nothing is lit in either."""
    fresh = Touched(frame, letter)
    chosen = find_selected(frame, key)
    if chosen is None:
        return Light({}, dim_others=False, cursor=cursor, fresh=fresh)
    request, sequence = chosen
    sequences = request.sequences if key == request.request_id else (sequence,)
    logical = {
        block: index
        for seq in reversed(sequences)
        for index, block in enumerate(seq.table_in(letter), seq.num_released)
    }
    dim_others = any(sequence.table or sequence.host_table for sequence in sequences)
    return Light(logical, dim_others=dim_others, cursor=cursor, fresh=fresh)


class Touched(Collection[int]):
    """The blocks of `touched_blocks`, looked for when somebody asks: the far zoom never does."""

    def __init__(self, frame: Frame, letter: str) -> None:
        self._frame, self._letter = frame, letter

    @cached_property
    def _blocks(self) -> frozenset[int]:
        return touched_blocks(self._frame, self._letter)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)


def touched_blocks(frame: Frame, letter: str = DEVICE) -> frozenset[int]:
    """Blocks of one pool that the latest step reserved, copied, moved or wrote, as far as the log tells."""
    touched: set[int] = set()
    for entry in reversed(frame.log):
        if entry.step != frame.step:
            break
        if letter == DEVICE:
            touched.update(_blocks_of(entry.event, frame))
        elif isinstance(entry.event, ev.BlocksSwappedOut):
            touched.update(entry.event.host_block_ids)
    return frozenset(touched)


def latest_block(frame: Frame) -> int | None:
    """The block that was reserved, copied or written last; what the block pane shows while nobody chose one."""
    for entry in reversed(frame.log):
        block_ids = _blocks_of(entry.event, frame)
        if block_ids:
            return block_ids[-1]
    return None


def _blocks_of(event: ev.Event, frame: Frame) -> Sequence[int]:
    match event:
        case ev.BlocksAllocated(block_ids=block_ids) | ev.BlocksSwappedIn(block_ids=block_ids):
            return block_ids
        case ev.BlockCopied(target_block=block_id):
            return (block_id,)
        case ev.SlotsWritten(sequence_id=name, start=start, stop=stop):
            sequence, size = frame.sequence(name), frame.pool.block_size
            first = sequence.num_released if sequence is not None else 0
            held = slice(max(start // size - first, 0), max(-(-stop // size) - first, 0))
            return () if sequence is None else sequence.table[held]
    return ()
