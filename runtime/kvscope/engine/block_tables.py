"""Block tables over the pool: growth, reuse, sharing, copy-on-write and release, each recorded as an event.

The scheduler asks first how many free blocks a step needs (`blocks_needed`), then carries it out; nothing here fails
half-way.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvscope.engine import request as rq
from kvscope.engine.block_pool import BlockPool
from kvscope.engine.prefixes import Prefixes
from kvscope.events import types as ev
from kvscope.events.types import Event


class BlockCopy(NamedTuple):
    """KV of all layers to copy, before the forward pass."""

    source_block: int
    target_block: int


class Extent(NamedTuple):
    """Positions `start:stop` of a sequence, to be computed in this step."""

    sequence: rq.Sequence
    start: int
    stop: int


class BlockTables:
    """Carries out what the scheduler decided, and appends what happened to `events`."""

    def __init__(
        self, pool: BlockPool, events: list[Event], prefixes: Prefixes | None = None, window: int | None = None
    ) -> None:
        """Without a prefix cache, content is given up as soon as nobody holds it.

        No layer looks back further than `window` positions, the token's own included; None: one looks at all.
        """
        self.pool = pool
        self.window = window
        self._events = events
        self._prefixes = prefixes

    def blocks_needed(self, extents: Iterable[Extent]) -> int:
        """Free blocks that writing all these extents takes: growth, and copies of shared blocks.

        Of the sequences that share a block, the last to write needs no copy.
        """
        needed = 0
        left: dict[int, int] = {}  # holders of a shared block, once earlier extents have left it
        for sequence, start, stop in extents:
            needed += max(self.pool.blocks_for(stop) - sequence.num_logical_blocks, 0)
            block_id = self._shared_block_at(sequence, start)
            if block_id is None:
                continue
            holders = left.get(block_id, self.pool.ref_count(block_id))
            if holders > 1:
                needed += 1
                left[block_id] = holders - 1
        return needed

    def prepare(self, extent: Extent) -> list[BlockCopy]:
        """Make every position of the extent writable by this sequence alone; returns the copies to make."""
        copies = self._make_private(extent.sequence, extent.start)
        self.grow(extent.sequence, extent.stop)
        return copies

    def grow(self, sequence: rq.Sequence, num_positions: int) -> None:
        """Reserve blocks until positions `0:num_positions` have slots. A table is replaced, as events hold it."""
        table = sequence.block_table
        first = sequence.num_released + len(table)
        count = self.pool.blocks_for(num_positions) - first
        if count <= 0:
            return
        block_ids = self.allocate(count, sequence)
        self._events.append(
            ev.BlocksAllocated(sequence_id=sequence.sequence_id, first_logical_block=first, block_ids=block_ids)
        )
        sequence.block_table = [*table, *block_ids] if table else block_ids

    def fork(self, parent: rq.Sequence, child: rq.Sequence) -> None:
        """The child's table becomes the parent's: every block has one holder more, none is copied."""
        self.pool.share(parent.block_table)
        child.block_table, child.num_released = list(parent.block_table), parent.num_released
        child.num_computed = parent.num_computed
        child.num_indexed = parent.num_indexed
        child.block_keys = parent.block_keys.copy()
        self._events.append(
            ev.BlocksShared(
                sequence_id=child.sequence_id,
                from_sequence_id=parent.sequence_id,
                block_ids=list(child.block_table),
            )
        )

    def release(self, sequence: rq.Sequence) -> list[int]:
        """Drop all blocks that it still has; returns the blocks that nobody holds any more."""
        if not sequence.block_table:
            return []
        freed, cached = self.pool.release(sequence.block_table)
        self._events.append(
            ev.BlocksReleased(
                sequence_id=sequence.sequence_id,
                block_ids=sequence.block_table,
                freed_block_ids=freed,
                cached_block_ids=cached,
            )
        )
        sequence.block_table = []
        sequence.num_computed = sequence.num_indexed = sequence.num_released = 0
        return freed

    def release_out_of_window(self, sequence: rq.Sequence) -> None:
        """Give up the blocks before the first position that the sequence's next token reads.

        Nothing computed later reads further back: positions only grow, and a preempted sequence begins anew or comes
        back as it left. The block of the last position stays even where a window of one position would not need it:
        who has KV holds a block.
        """
        count = self._first_read(sequence) // self.pool.block_size - sequence.num_released
        if count <= 0:
            return
        table, first = sequence.block_table, sequence.num_released
        freed, cached = self.pool.release(table[:count])
        self._events.append(
            ev.BlocksOutOfWindow(
                sequence_id=sequence.sequence_id,
                first_logical_block=first,
                block_ids=table[:count],
                freed_block_ids=freed,
                cached_block_ids=cached,
            )
        )
        sequence.block_table, sequence.num_released = table[count:], first + count

    def most_held(self, num_sequences: int, step_tokens: int) -> int | None:
        """Blocks that so many sequences can hold at once, computing `step_tokens` positions together; None: no limit.

        A sequence that computes c positions holds those of `window - 1 + c`, and half a block more at either end: at
        most `blocks_for(window) + c // block_size + 2`.
        """
        if self.window is None:
            return None
        block_size = self.pool.block_size
        return num_sequences * (self.pool.blocks_for(max(self.window, 2)) + 2) + step_tokens // block_size

    def check_integrity(self, sequences: Sequence[rq.Sequence]) -> list[str]:
        """Invariant 1 over the pool, and that every written position has a slot, here or on the host."""
        problems = self.pool.check_integrity(sequence.block_table for sequence in sequences)
        problems += [
            f"{sequence.sequence_id} has KV for {sequence.num_computed} positions in {num_blocks} blocks"
            for sequence in sequences
            if self.pool.blocks_for(sequence.num_computed)
            > (num_blocks := sequence.num_logical_blocks + len(sequence.host_table))
        ]
        problems += [
            f"{sequence.sequence_id} has given up L0-L{sequence.num_released - 1}, its next token reads from {read} on"
            for sequence in sequences
            if sequence.num_released * self.pool.block_size > (read := self._first_read(sequence))
        ]
        return problems

    def _make_private(self, sequence: rq.Sequence, position: int) -> list[BlockCopy]:
        """Copy-on-write: a shared block about to be written is replaced by a private copy of it."""
        source = self._shared_block_at(sequence, position)
        if source is None:
            return []
        logical, num_slots = divmod(position, self.pool.block_size)
        (target,) = self.allocate(1, sequence)
        self.pool.release([source])
        place, table = logical - sequence.num_released, sequence.block_table
        sequence.block_table = [*table[:place], target, *table[place + 1 :]]
        sequence.num_copies += 1
        self._events.append(
            ev.BlockCopied(
                sequence_id=sequence.sequence_id,
                logical_block=logical,
                source_block=source,
                target_block=target,
                num_slots=num_slots,
            )
        )
        return [BlockCopy(source, target)]

    def _first_read(self, sequence: rq.Sequence) -> int:
        """The first position that computing the sequence's next one reads, or the last that is written."""
        return max(sequence.num_computed - max(self.window, 2) + 1, 0) if self.window is not None else 0

    def allocate(self, count: int, sequence: rq.Sequence) -> list[int]:
        """Blocks from the pool for this sequence; cached ones among them are evicted first."""
        block_ids, evicted = self.pool.allocate(count)
        if evicted:
            self._evict(evicted, sequence)
        return block_ids

    def _evict(self, block_ids: list[int], sequence: rq.Sequence) -> None:
        if self._prefixes is not None:
            self._prefixes.evict(block_ids, sequence.sequence_id)

    def _shared_block_at(self, sequence: rq.Sequence, position: int) -> int | None:
        """The block that holds the position's slot, if another table points at it too."""
        place = position // self.pool.block_size - sequence.num_released
        if place >= len(sequence.block_table):
            return None
        block_id = sequence.block_table[place]
        return block_id if self.pool.ref_count(block_id) > 1 else None
