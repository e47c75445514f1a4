"""Free blocks as runs of consecutive ids, for an allocator whose sequences each lie in one piece.

ids    0 1 2 3 4 5 6 7 8        free runs 2:4 and 7:9: four blocks are free, and no three of them in a row
       # # . . # # # . .
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence


class FreeRuns:
    """Runs are kept in the order of their ids; neighbours are merged at once. O(runs) per call."""

    def __init__(self, num_blocks: int) -> None:
        """All blocks `0:num_blocks` are free."""
        self._starts = [0] if num_blocks else []
        self._stops = [num_blocks] if num_blocks else []

    def __len__(self) -> int:
        """Free blocks, in however many pieces."""
        return sum(self.lengths())

    def __iter__(self) -> Iterator[int]:
        """Lowest first."""
        for start, stop in zip(self._starts, self._stops, strict=True):
            yield from range(start, stop)

    def lengths(self) -> list[int]:
        """Of every run, lowest first."""
        return [stop - start for start, stop in zip(self._starts, self._stops, strict=True)]

    def take(self, count: int) -> list[int]:
        """First fit: the beginning of the lowest run that is long enough; nothing when none is."""
        for place, length in enumerate(self.lengths()):
            if length >= count:
                start = self._starts[place]
                self._starts[place] += count
                if length == count:
                    del self._starts[place], self._stops[place]
                return list(range(start, start + count))
        return []

    def extend(self, block_ids: Sequence[int]) -> None:
        """Blocks come back, in any order."""
        for block_id in block_ids:
            self._give_back(block_id)

    def _give_back(self, block_id: int) -> None:
        place = bisect_right(self._starts, block_id)  # of the first run above it
        follows = place > 0 and self._stops[place - 1] == block_id
        precedes = place < len(self._starts) and self._starts[place] == block_id + 1
        if follows and precedes:
            self._stops[place - 1] = self._stops.pop(place)
            del self._starts[place]
        elif follows:
            self._stops[place - 1] += 1
        elif precedes:
            self._starts[place] -= 1
        else:
            self._starts.insert(place, block_id)
            self._stops.insert(place, block_id + 1)
