"""Block ids in the order in which they were last used: a doubly linked list over two lists of integers.

    index       0    1    2   ...   capacity (the two ends)
    _newer      id that was used next after this one; at the ends: the oldest
    _older      id that was used just before; at the ends: the newest

Append, remove anywhere and take the oldest are O(1) per id, whatever the capacity, and no call allocates an object per
id. A dict in insertion order would do the same until its head is taken again and again: it walks over its own holes.
"""

from collections.abc import Container, Iterable, Iterator


class LruList(Container[int]):
    """Ids below `capacity`, each at most once. Calls are batched: the loop is inside."""

    def __init__(self, capacity: int) -> None:
        self._ends = capacity
        self._newer: list[int | None] = [None] * capacity + [capacity]  # None: not in the list
        self._older: list[int] = [capacity] * (capacity + 1)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block_id: object) -> bool:
        return isinstance(block_id, int) and self._newer[block_id] is not None

    def __iter__(self) -> Iterator[int]:
        """Oldest first."""
        block_id = self._newer[self._ends]
        while block_id is not None and block_id != self._ends:
            yield block_id
            block_id = self._newer[block_id]

    def append(self, block_ids: Iterable[int]) -> None:
        """Ids that are not in the list, the last of them the newest."""
        newer, older, ends = self._newer, self._older, self._ends
        newest = older[ends]
        length = self._length
        for block_id in block_ids:
            newer[newest] = block_id
            older[block_id] = newest
            newest = block_id
            length += 1
        newer[newest] = ends
        older[ends] = newest
        self._length = length

    def remove(self, block_ids: Iterable[int]) -> None:
        """Raises KeyError at the first id that is not in the list; those before it are gone."""
        newer, older = self._newer, self._older
        for block_id in block_ids:
            after = newer[block_id]
            if after is None:
                raise KeyError(block_id)
            before = older[block_id]
            newer[before] = after
            older[after] = before
            newer[block_id] = None
            self._length -= 1

    def take_oldest(self, count: int) -> list[int]:
        """Remove and return that many, oldest first; the caller knows that there are so many."""
        newer, ends = self._newer, self._ends
        taken = []
        oldest = newer[ends]
        for _ in range(count):
            assert oldest is not None
            taken.append(oldest)
            newer[oldest], oldest = None, newer[oldest]
        assert oldest is not None
        newer[ends] = oldest
        self._older[oldest] = ends
        self._length -= count
        return taken
