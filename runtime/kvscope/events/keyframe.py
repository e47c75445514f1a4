"""Compact, independent copies of a state, to go back to later without folding everything again."""

from array import array
from collections.abc import Sequence

import msgspec

from kvscope.events.state import EngineState, RequestState, SequenceState


class Keyframe:
    """A state at rest: block lists take 4 bytes per block, and nothing in it is shared with a live state.

    What events hand over and no fold changes afterwards (prompts, parameters) is shared.
    """

    __slots__ = ("_bare", "_ref_counts", "_written_slots")

    def __init__(self, state: EngineState) -> None:
        self._ref_counts, self._written_slots = _pack(state.ref_counts), _pack(state.written_slots)
        self._bare = _copy(state, [], [])

    def restore(self) -> EngineState:
        """A state of its own for whoever folds on."""
        return _copy(self._bare, self._ref_counts.tolist(), self._written_slots.tolist())

    @property
    def epoch(self) -> bytes:
        return self._bare.epoch

    @property
    def num_bytes(self) -> int:
        """Roughly, in memory: block lists, tables and generated tokens."""
        packed = len(self._ref_counts) * self._ref_counts.itemsize
        packed += len(self._written_slots) * self._written_slots.itemsize
        sequences = [seq for request in self._bare.requests.values() for seq in request.sequences]
        return packed + sum(400 + 8 * len(seq.block_table) + 16 * len(seq.token_ids) for seq in sequences)


def _pack(values: Sequence[int]) -> "array[int]":
    try:
        return array("i", values)
    except OverflowError:  # nothing an engine would send, but a stream may say so
        return array("q", values)


def _copy(state: EngineState, ref_counts: list[int], written_slots: list[int]) -> EngineState:
    return msgspec.structs.replace(
        state,
        ref_counts=ref_counts,
        written_slots=written_slots,
        requests={name: _copy_request(request) for name, request in state.requests.items()},
        finished_order=state.finished_order.copy(),
        counters=msgspec.structs.replace(state.counters),
    )


def _copy_request(request: RequestState) -> RequestState:
    return msgspec.structs.replace(request, sequences=[_copy_sequence(sequence) for sequence in request.sequences])


def _copy_sequence(sequence: SequenceState) -> SequenceState:
    return msgspec.structs.replace(
        sequence,
        block_table=sequence.block_table.copy(),
        token_ids=sequence.token_ids.copy(),
        pieces=sequence.pieces.copy(),
    )
