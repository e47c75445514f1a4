"""Block ids in the order in which they were last used: a doubly linked list over two lists of integers.

    index       0    1    2   ...   capacity (the two ends)
    _newer      id that was used next after this one; at the ends: the oldest
    _older      id that was used just before; at the ends: the newest

Append, remove anywhere and take the oldest are O(1) per id, whatever the capacity, and no call allocates an object per
id. A dict in insertion order would do the same until its head is taken again and again: it walks over its own holes.
"""

from collections.abc import Iterator, Sequence


class LruList:
    """Ids below `capacity`, each at most once; the caller knows which are in it.

    Calls are batched, and change the states of blocks on the way: most often a whole table changes alike, and then this
    is one tight loop over it.
    """

    def __init__(self, capacity: int) -> None:
        self._ends = capacity
        self._newer = [capacity] * (capacity + 1)
        self._older = [capacity] * (capacity + 1)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Oldest first."""
        block_id = self._newer[self._ends]
        while block_id != self._ends:
            yield block_id
            block_id = self._newer[block_id]

    def append(self, block_ids: Sequence[int], states: list[int], before: int, after: int) -> Sequence[int]:
        """Ids that are not in the list, the last of them the newest: as long as their state is `before`.

        Their state becomes `after`. Returns the others, from the first that is in another state on.
        """
        newer, older, ends = self._newer, self._older, self._ends
        newest, remaining = older[ends], iter(block_ids)
        rest: Sequence[int] = ()
        for block_id in remaining:
            if states[block_id] != before:
                rest = (block_id, *remaining)
                break
            states[block_id] = after
            newer[newest] = block_id
            older[block_id] = newest
            newest = block_id
        newer[newest] = ends
        older[ends] = newest
        self._length += len(block_ids) - len(rest)
        return rest

    def remove(self, block_ids: Sequence[int], states: list[int], before: int, after: int) -> Sequence[int]:
        """Ids that are in the list; otherwise as `append`."""
        newer, older = self._newer, self._older
        remaining = iter(block_ids)
        rest: Sequence[int] = ()
        for block_id in remaining:
            if states[block_id] != before:
                rest = (block_id, *remaining)
                break
            states[block_id] = after
            newer_id, older_id = newer[block_id], older[block_id]
            newer[older_id] = newer_id
            older[newer_id] = older_id
        self._length -= len(block_ids) - len(rest)
        return rest

    def take_oldest(self, count: int) -> list[int]:
        """Remove and return that many, oldest first; the caller knows that there are so many."""
        newer, oldest = self._newer, self._newer[self._ends]
        taken = []
        for _ in range(count):
            taken.append(oldest)
            oldest = newer[oldest]
        newer[self._ends] = oldest
        self._older[oldest] = self._ends
        self._length -= count
        return taken
