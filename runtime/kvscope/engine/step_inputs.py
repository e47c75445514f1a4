"""A step's inputs on the host: the packed tokens of all extents, and where each reads and writes KV."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvscope.engine.block_tables import Extent


class StepInputs(NamedTuple):
    """What `PagedBatch` holds on the device, and the tokens; of the same shapes, not yet of the same types."""

    token_ids: list[int]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    query_start: NDArray[np.int64]
    context_lengths: NDArray[np.int64]
    block_tables: NDArray[np.int64]
    max_query_length: int

    @property
    def num_seqs(self) -> int:
        return len(self.context_lengths)


def pack_inputs(extents: Sequence[Extent], block_size: int) -> StepInputs:
    """The inputs of a step over at least one extent."""
    starts, stops = np.array([(extent.start, extent.stop) for extent in extents]).T
    # Nothing reads what fell out of the window: any number will do.
    tables = [[0] * extent.sequence.num_released + extent.sequence.block_table for extent in extents]
    longest = max(map(len, tables))
    block_tables = np.array([table + [0] * (longest - len(table)) for table in tables])
    lengths = stops - starts
    query_start = np.zeros(len(extents) + 1, np.int64)
    ends = np.cumsum(lengths, out=query_start[1:])
    sequences = np.repeat(np.arange(len(extents)), lengths)
    positions = np.arange(ends[-1]) - (ends - stops)[sequences]
    block_ids = block_tables[sequences, positions // block_size]
    return StepInputs(
        token_ids=[token for extent in extents for token in extent.sequence.tokens(extent.start, extent.stop)],
        positions=positions,
        slot_mapping=block_ids * block_size + positions % block_size,
        query_start=query_start,
        context_lengths=stops,
        block_tables=block_tables,
        max_query_length=int(lengths.max()),
    )
