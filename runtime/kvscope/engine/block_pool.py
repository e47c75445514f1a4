"""The pool of physical blocks: who is free, and how many tables point at each block.

Plain Python integers in lists: no object per block, so a million blocks cost no garbage collection. The pool records
what happens as events through the recorder it is given; it never publishes.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

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


class FreeBlocks(Protocol):
    """Ids of free blocks, and which of them go next."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def take(self, count: int) -> list[int]: ...
    def extend(self, block_ids: Sequence[int]) -> None: ...


# What one number says of a block: 2 for each table that points at it, and 1 if its content is worth keeping.
FREE, CACHED, HOLDER = 0, 1, 2


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
        order = list(free_order) if free_order is not None else list(range(num_blocks))
        if free_order is not None and sorted(order) != list(range(num_blocks)):
            raise ValueError("free_order must name every block exactly once")
        self._states = [FREE] * num_blocks
        self._free: FreeBlocks = FreeQueue(order)
        self._cached = LruList(num_blocks)

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

    @property
    def ref_counts(self) -> list[int]:
        """Of every block; O(pool)."""
        return [state // HOLDER for state in self._states]

    def ref_count(self, block_id: int) -> int:
        return self._states[block_id] // HOLDER

    def is_cached(self, block_id: int) -> bool:
        return self._states[block_id] == CACHED

    def allocate(self, count: int) -> Allocation:
        """Take `count` available blocks, each with ref count 1; no more of them evicted than needed.

        Raises:
            OutOfBlocksError: fewer are available; nothing is taken then.
        """
        if count > self.num_available_blocks:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_available_blocks} available")
        states, block_ids = self._states, self._free.take(count)
        evicted: list[int] = []
        if len(block_ids) < count:
            evicted = self._cached.take_oldest(count - len(block_ids))
            block_ids += evicted
        for block_id in block_ids:
            states[block_id] = HOLDER
        return Allocation(block_ids, evicted)

    def keep(self, block_id: int) -> None:
        """From now on, until it is handed out again, this held block becomes cached and not free when let go."""
        self._states[block_id] |= CACHED

    def share(self, block_ids: Iterable[int]) -> None:
        """One more table points at each of these held blocks."""
        for block_id in block_ids:
            if self._states[block_id] < HOLDER:
                raise ValueError(f"P{block_id} is free and cannot be shared")
            self._states[block_id] += HOLDER

    def reuse(self, block_ids: Sequence[int]) -> None:
        """One more table points at each of these held or cached blocks: a hit of the prefix cache.

        Raises:
            ValueError: a block is free; nothing after it is reused.
        """
        states = self._states
        for block_id in self._cached.remove(block_ids, states, CACHED, CACHED + HOLDER):
            if states[block_id] == FREE:
                raise ValueError(f"P{block_id} is free: its content is gone")
            if self._cached.remove([block_id], states, CACHED, CACHED + HOLDER):
                states[block_id] += HOLDER

    def release(self, block_ids: list[int]) -> Released:
        """One table less points at each; those that nobody holds any more become cached or free, in the order given.

        The lists returned may be `block_ids` itself.

        Raises:
            ValueError: a block is free already (a double free); nothing after it is released.
        """
        states = self._states
        rest = self._cached.append(block_ids[::-1], states, CACHED + HOLDER, CACHED)
        if not rest:
            return Released(block_ids, block_ids)
        cached = block_ids[: len(rest) - 1 : -1]
        freed = cached.copy()
        for block_id in rest:
            state = states[block_id]
            if state < HOLDER:
                raise ValueError(f"P{block_id} is free already")
            if state > CACHED + HOLDER:
                states[block_id] = state - HOLDER
                continue
            freed.append(block_id)
            if state == HOLDER:
                states[block_id] = FREE
                self._free.extend([block_id])
            else:
                self._cached.append([block_id], states, state, CACHED)
                cached.append(block_id)
        return Released(freed[::-1], cached[::-1])

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
        listed = {**dict.fromkeys(self._free, "free"), **dict.fromkeys(self._cached, "cached")}
        problems += [
            f"P{block_id} is {_name(state)} and listed as {listed.get(block_id, 'held')}"
            for block_id, state in enumerate(self._states)
            if listed.get(block_id, "held") != _name(state)
        ]
        held = sum(state >= HOLDER for state in self._states)
        if held + self.num_available_blocks != self.num_blocks:
            problems.append(
                f"{held} held + {len(self._free)} free + {len(self._cached)} cached blocks are not {self.num_blocks}"
            )
        return problems


def _name(state: int) -> str:
    return "held" if state >= HOLDER else "cached" if state == CACHED else "free"
