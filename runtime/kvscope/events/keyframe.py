"""Compact, independent copies of a state, to go back to later without folding everything again."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvscope.events.columns import Column
from kvscope.events.state import EngineState, RequestState, SequenceState


class Keyframe:
    """A state at rest: a byte or two per block; nothing that a fold changes is shared with a live state.

    Generated tokens are only ever appended to, so the live lists are kept, with their lengths of this moment: taking
    a copy costs nothing per token, and copies of one sequence share its tokens.
    """

    __slots__ = ("_bare", "_lengths", "_ref_counts", "_written_slots")

    def __init__(self, state: EngineState) -> None:
        self._ref_counts, self._written_slots = _pack(state.ref_counts), _pack(state.written_slots)
        self._lengths = [(len(seq.token_ids), len(seq.pieces)) for seq in _sequences(state)]
        self._bare = _copy(state, Column(), Column(), lambda sequence: sequence)

    def restore(self) -> EngineState:
        """A state of its own for whoever folds on."""
        lengths = iter(self._lengths)

        def cut(sequence: SequenceState) -> SequenceState:
            num_tokens, num_pieces = next(lengths)
            sequence.token_ids = sequence.token_ids[:num_tokens]
            sequence.pieces = sequence.pieces[:num_pieces]
            return sequence

        return _copy(self._bare, Column.of(self._ref_counts), Column.of(self._written_slots), cut)

    @property
    def epoch(self) -> bytes:
        return self._bare.epoch

    @property
    def num_bytes(self) -> int:
        """Roughly, in memory: block lists and tables; the tokens belong to the batches that brought them."""
        packed = self._ref_counts.nbytes + self._written_slots.nbytes
        return packed + sum(500 + 8 * len(sequence.block_table) for sequence in _sequences(self._bare))


def _pack(column: Column) -> NDArray[Any]:
    """A byte per block where that is enough: it is not with many sequences on one block, or large blocks."""
    numbers = column.numbers
    small = not numbers.size or (numbers.min() >= 0 and numbers.max() < 256)
    return numbers.astype(np.uint8 if small else np.int32)


def _sequences(state: EngineState) -> list[SequenceState]:
    return [sequence for request in state.requests.values() for sequence in request.sequences]


def _copy(
    state: EngineState,
    ref_counts: Column,
    written_slots: Column,
    adapt: Callable[[SequenceState], SequenceState],
) -> EngineState:
    """A copy with other block lists; `adapt` may change the copy of each sequence."""
    return msgspec.structs.replace(
        state,
        ref_counts=ref_counts,
        written_slots=written_slots,
        requests={name: _copy_request(request, adapt) for name, request in state.requests.items()},
        finished_order=state.finished_order.copy(),
        counters=msgspec.structs.replace(state.counters),
    )


def _copy_request(request: RequestState, adapt: Callable[[SequenceState], SequenceState]) -> RequestState:
    sequences = [
        adapt(msgspec.structs.replace(sequence, block_table=sequence.block_table.copy()))
        for sequence in request.sequences
    ]
    return msgspec.structs.replace(request, sequences=sequences)
