"""The pool of physical blocks: who is free, and how many tables point at each block.

Plain Python integers in lists: no object per block, so a million blocks cost no garbage collection. The pool records
what happens as events through the recorder it is given; it never publishes.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvscope.engine.free_queue import FreeQueue
from kvscope.engine.lru_list import LruList


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free; the scheduler must check first."""


class Allocation(NamedTuple):
    """Blocks handed out; `evicted` are those of them that gave up cached content."""

    block_ids: list[int]
    evicted: list[int]


class Released(NamedTuple):
    """Blocks that nobody holds any more, and those of them that keep their content."""

    freed: list[int]
    cached: list[int]


class BlockPool:
    """Physical blocks `0:num_blocks`.

    A block is held (ref count >= 1), free (ref count 0), or cached (ref count 0, but its content is worth keeping).
    Free blocks are handed out first, from the head of the free list; then cached ones, least recently used first.
    Blocks come back at the tail, last logical block first, so that a sequence's first blocks rest longest.
    """

    def __init__(self, num_blocks: int, block_size: int, free_order: Sequence[int] | None = None) -> None:
        """`free_order` seeds the free list, head first; by default ascending ids."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        order = list(free_order) if free_order is not None else list(range(num_blocks))
        if free_order is not None and sorted(order) != list(range(num_blocks)):
            raise ValueError("free_order must name every block exactly once")
        self._free = FreeQueue(order)
        self._cached = LruList(num_blocks)
        self._is_kept = [False] * num_blocks  # its content is worth keeping when nobody holds it

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds and that keep nothing."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out: free ones, and cached ones at the price of their content."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> Allocation:
        """Take `count` available blocks, each with ref count 1; no more of them evicted than needed.

        Raises:
            OutOfBlocksError: fewer are available; nothing is taken then.
        """
        if count > self.num_available_blocks:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_available_blocks} available")
        ref_counts = self.ref_counts
        block_ids, evicted = self._free.take(count), list[int]()
        if len(block_ids) < count:
            evicted = self._cached.take_oldest(count - len(block_ids))
            block_ids += evicted
            for block_id in evicted:
                self._is_kept[block_id] = False
        for block_id in block_ids:
            ref_counts[block_id] = 1
        return Allocation(block_ids, evicted)

    def keep(self, block_id: int) -> None:
        """From now on, until it is handed out again, this held block becomes cached and not free when let go."""
        self._is_kept[block_id] = True

    def share(self, block_ids: Iterable[int]) -> None:
        """One more table points at each of these held blocks."""
        for block_id in block_ids:
            if self.ref_counts[block_id] < 1:
                raise ValueError(f"P{block_id} is free and cannot be shared")
            self.ref_counts[block_id] += 1

    def reuse(self, block_ids: Iterable[int]) -> None:
        """One more table points at each of these held or cached blocks: a hit of the prefix cache.

        Raises:
            ValueError: a block is free; the pool cannot be used afterwards.
        """
        ref_counts = self.ref_counts
        idle: list[int] = []
        for block_id in block_ids:
            count = ref_counts[block_id]
            ref_counts[block_id] = count + 1
            if count == 0:
                idle.append(block_id)
        try:
            self._cached.remove(idle)
        except KeyError as error:
            raise ValueError(f"P{error.args[0]} is free: its content is gone") from None

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def release(self, block_ids: Sequence[int]) -> Released:
        """One table less points at each; those that nobody holds any more become cached or free, in the order given.

        Raises:
            ValueError: a block is free already (a double free); nothing after it is released.
        """
        ref_counts = self.ref_counts
        freed: list[int] = []
        for block_id in reversed(block_ids):
            count = ref_counts[block_id]
            if count < 1:
                self._take_back(freed)
                raise ValueError(f"P{block_id} is free already")
            ref_counts[block_id] = count - 1
            if count == 1:
                freed.append(block_id)
        cached = self._take_back(freed)
        return Released(freed[::-1], cached[::-1])

    def _take_back(self, freed: list[int]) -> list[int]:
        """Returns those that are cached now."""
        is_kept = self._is_kept
        cached = [block_id for block_id in freed if is_kept[block_id]]
        self._cached.append(cached)
        if len(cached) < len(freed):
            self._free.extend([block_id for block_id in freed if not is_kept[block_id]] if cached else freed)
        return cached

    def blocks_for(self, num_positions: int) -> int:
        """How many blocks hold that many positions."""
        return -(-num_positions // self.block_size)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """Invariant 1: what does not add up between ref counts, tables and the free list; empty when all is well."""
        entries = [0] * self.num_blocks
        for table in tables:
            for block_id in table:
                entries[block_id] += 1
        problems = [
            f"P{block_id} has ref count {count}, {entries[block_id]} table entries point at it"
            for block_id, count in enumerate(self.ref_counts)
            if count != entries[block_id]
        ]
        free, cached = set(self._free), set(self._cached)
        problems += [f"P{block_id} is free and kept" for block_id in sorted(free) if self._is_kept[block_id]]
        problems += [f"P{block_id} is free and held" for block_id in sorted(free) if self.ref_counts[block_id]]
        problems += [f"P{block_id} is cached and held" for block_id in sorted(cached) if self.ref_counts[block_id]]
        problems += [f"P{block_id} is cached and free" for block_id in sorted(cached & free)]
        held = sum(count > 0 for count in self.ref_counts)
        if held + self.num_available_blocks != self.num_blocks:
            problems.append(
                f"{held} held + {len(self._free)} free + {len(self._cached)} cached blocks are not {self.num_blocks}"
            )
        return problems
