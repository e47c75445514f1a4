"""Swap: the KV of a preempted request moves to blocks of host memory, and back, instead of being computed again.

Host blocks are a second pool of the same block size. What its sequences share on the device they share there too: each
distinct block is moved once. Blocks that were reserved but never written are not worth moving.
"""

from collections import Counter
from collections.abc import Iterable

from kvscope.engine.block_pool import BlockPool
from kvscope.engine.block_tables import BlockCopy, BlockTables
from kvscope.engine.request import Sequence
from kvscope.events import types as ev
from kvscope.events.types import Event


class Swapper:
    """Moves whole sequences between the two pools, and records it. The copies returned are for the runner to make."""

    def __init__(self, tables: BlockTables, num_host_blocks: int, events: list[Event]) -> None:
        self.host_pool = BlockPool(num_host_blocks, tables.pool.block_size)
        self._tables = tables
        self._events = events

    def host_blocks_needed(self, sequences: Iterable[Sequence]) -> int:
        """Host blocks that moving these sequences out takes."""
        return len({block_id for sequence in sequences for block_id in self._written(sequence)})

    def blocks_needed(self, limits: Iterable[tuple[Sequence, int]]) -> int:
        """Device blocks to bring these sequences back and compute positions up to each one's limit.

        As with any growth: the last writer of a shared block writes in place, the others need a copy.
        """
        pool, distinct, growth = self._tables.pool, set[int](), 0
        writers: Counter[int] = Counter()
        for sequence, limit in limits:
            distinct.update(sequence.host_table)
            growth += max(pool.blocks_for(limit) - sequence.num_released - len(sequence.host_table), 0)
            place = sequence.num_computed // pool.block_size - sequence.num_released
            if sequence.num_computed < limit and place < len(sequence.host_table):
                writers[sequence.host_table[place]] += 1
        copies = sum(min(count, self.host_pool.ref_count(host_id) - 1) for host_id, count in writers.items())
        return len(distinct) + growth + copies

    def swap_out(self, sequences: Iterable[Sequence]) -> list[BlockCopy]:
        """Move every written block to the host and give up the tables; copies go from device to host blocks.

        The blocks given up may be handed out again in the same step, so the copies come before all else.
        """
        host_ids: dict[int, int] = {}
        for sequence in sequences:
            if sequence.block_table:
                self._move_out(sequence, host_ids)
        return [BlockCopy(*pair) for pair in host_ids.items()]

    def swap_in(self, sequences: Iterable[Sequence]) -> list[BlockCopy]:
        """Bring the sequences' blocks back into newly allocated ones; copies go from host to device blocks."""
        block_ids: dict[int, int] = {}
        for sequence in sequences:
            if sequence.host_table:
                self._move_in(sequence, block_ids)
        return [BlockCopy(*pair) for pair in block_ids.items()]

    def release(self, sequence: Sequence) -> None:
        """Give up what a sequence that has ended holds on the host."""
        if not sequence.host_table:
            return
        self.host_pool.release(sequence.host_table)
        self._events.append(ev.HostBlocksReleased(sequence_id=sequence.sequence_id, host_block_ids=sequence.host_table))
        sequence.host_table = []
        sequence.num_computed = sequence.num_indexed = sequence.num_released = 0

    def _move_out(self, sequence: Sequence, host_ids: dict[int, int]) -> None:
        written = self._written(sequence)
        self.host_pool.share(host_ids[block_id] for block_id in written if block_id in host_ids)
        new = [block_id for block_id in written if block_id not in host_ids]
        host_ids.update(zip(new, self.host_pool.allocate(len(new)).block_ids, strict=True))
        sequence.host_table = [host_ids[block_id] for block_id in written]
        freed, cached = self._tables.pool.release(sequence.block_table)
        self._events.append(
            ev.BlocksSwappedOut(
                sequence_id=sequence.sequence_id,
                block_ids=sequence.block_table,
                host_block_ids=sequence.host_table,
                freed_block_ids=freed,
                cached_block_ids=cached,
            )
        )
        sequence.block_table = []

    def _move_in(self, sequence: Sequence, block_ids: dict[int, int]) -> None:
        """`num_indexed` starts over: the prefix cache may have forgotten the blocks that were left behind."""
        self._tables.pool.share(block_ids[host_id] for host_id in sequence.host_table if host_id in block_ids)
        new = [host_id for host_id in sequence.host_table if host_id not in block_ids]
        block_ids.update(zip(new, self._tables.allocate(len(new), sequence), strict=True))
        sequence.block_table = [block_ids[host_id] for host_id in sequence.host_table]
        sequence.num_indexed = sequence.num_released
        self.host_pool.release(sequence.host_table)
        self._events.append(
            ev.BlocksSwappedIn(
                sequence_id=sequence.sequence_id,
                host_block_ids=sequence.host_table,
                block_ids=list(sequence.block_table),
            )
        )
        sequence.host_table = []

    def _written(self, sequence: Sequence) -> list[int]:
        return sequence.block_table[: self._tables.pool.blocks_for(sequence.num_computed) - sequence.num_released]
