"""What a viewer has seen happen to each block: its own memory of a stream, never part of what an engine says."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvscope.events.columns import Column


class Traces:
    """When each block was written last, and how often the prefix cache gave it again, since a viewer began to watch.

    `writes[b]` is the step of the last write counted from `since_step`, the first being 1; 0: not written since.
    `hits[b]` counts reuses of what block b holds now, and starts over when it is handed out for something else.
    Only viewers keep them, in the state that they fold (`EngineState.traces`): they leave no trace on the wire or in a
    file, and a state with them equals one without.
    """

    __slots__ = ("hits", "since_step", "writes")

    def __init__(self, num_blocks: int, since_step: int) -> None:
        self.since_step = since_step
        self.writes, self.hits = Column.zeros(num_blocks), Column.zeros(num_blocks)

    def stamp(self, step: int) -> int:
        """What `writes` says of a block written at this step."""
        return step - self.since_step + 1

    def hand_out(self, block_id: int) -> None:
        """The block is for something else from now on."""
        self.writes[block_id] = self.hits[block_id] = 0

    def packed(self) -> "PackedTraces":
        return PackedTraces(self.since_step, pack(self.writes), pack(self.hits))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traces | msgspec.UnsetType)

    __hash__ = None  # type: ignore[assignment]  # as every value that can be changed


class PackedTraces:
    """Traces at rest, in a keyframe."""

    __slots__ = ("_hits", "_since_step", "_writes")

    def __init__(self, since_step: int, writes: NDArray[Any], hits: NDArray[Any]) -> None:
        self._since_step, self._writes, self._hits = since_step, writes, hits

    def restore(self) -> Traces:
        """For whoever folds on."""
        traces = Traces(0, self._since_step)
        traces.writes, traces.hits = Column.of(self._writes), Column.of(self._hits)
        return traces

    @property
    def num_bytes(self) -> int:
        return self._writes.nbytes + self._hits.nbytes


def pack(column: Column) -> NDArray[Any]:
    """The same numbers in one or two bytes each where that is enough."""
    numbers = column.numbers
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    small = np.uint8 if high < 1 << 8 else np.uint16 if high < 1 << 16 else np.int32
    return numbers.astype(small if low >= 0 else np.int32)
