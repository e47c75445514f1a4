"""The pool of physical blocks: who is free, and how many tables point at each block.

Plain Python integers in lists: no object per block, so a million blocks cost no garbage collection. The pool records
what happens as events through the recorder it is given; it never publishes.
"""

from collections.abc import Iterable, Sequence


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free; the scheduler must check first."""


class BlockPool:
    """Physical blocks `0:num_blocks`. A block is free (ref count 0) or held (ref count >= 1).

    Blocks are handed out from the head of the free list and come back at its tail, last logical block first, so that
    a sequence's first blocks stay longest untouched.
    """

    def __init__(self, num_blocks: int, block_size: int, free_order: Sequence[int] | None = None) -> None:
        """`free_order` seeds the free list, head first; by default ascending ids."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        order = list(free_order) if free_order is not None else list(range(num_blocks))
        if sorted(order) != list(range(num_blocks)):
            raise ValueError("free_order must name every block exactly once")
        self._free = dict.fromkeys(order)  # insertion order is the order of reuse; removal anywhere is O(1)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with ref count 1.

        Raises:
            OutOfBlocksError: fewer are free; nothing is taken then.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(self._free)} free")
        free = iter(self._free)
        block_ids = [next(free) for _ in range(count)]
        for block_id in block_ids:
            del self._free[block_id]
            self.ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more table points at each of these held blocks."""
        for block_id in block_ids:
            if self.ref_counts[block_id] < 1:
                raise ValueError(f"P{block_id} is free and cannot be shared")
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> list[int]:
        """One table less points at each; returns those that nobody holds any more, in the order given.

        Raises:
            ValueError: a block is free already (a double free); nothing after it is released.
        """
        freed = []
        for block_id in reversed(block_ids):
            if self.ref_counts[block_id] < 1:
                raise ValueError(f"P{block_id} is free already")
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self._free[block_id] = None
                freed.append(block_id)
        return freed[::-1]

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
        problems += [f"P{block_id} is free and held" for block_id in self._free if self.ref_counts[block_id]]
        held = sum(count > 0 for count in self.ref_counts)
        if held + len(self._free) != self.num_blocks:
            problems.append(f"{held} held + {len(self._free)} free blocks are not {self.num_blocks}")
        return problems
