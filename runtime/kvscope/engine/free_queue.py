"""Free block ids, first in, first out: a list whose taken head is cut off now and then.

So taking many is one slice.
"""

from collections.abc import Iterator, Sequence

MIN_TAKEN = 1_024  # below, cutting costs more than it saves


class FreeQueue:
    """O(1) per id, amortised: the head is cut off when it is half of the list."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        self._block_ids = list(block_ids)
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._block_ids) - self._num_taken

    def __iter__(self) -> Iterator[int]:
        """Next to be taken first."""
        return iter(self._block_ids[self._num_taken :])

    def take(self, count: int) -> list[int]:
        """Up to that many from the head."""
        start = self._num_taken
        taken = self._block_ids[start : start + count]
        self._num_taken = start + len(taken)
        if self._num_taken > MIN_TAKEN and 2 * self._num_taken > len(self._block_ids):
            del self._block_ids[: self._num_taken]
            self._num_taken = 0
        return taken

    def extend(self, block_ids: Sequence[int]) -> None:
        """At the tail, in this order."""
        self._block_ids.extend(block_ids)
