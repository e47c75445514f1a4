"""Compact, independent copies of a state, to go back to later without folding everything again."""

from array import array
from collections.abc import Callable, Sequence

import msgspec

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
        self._bare = _copy(state, [], [], lambda sequence: sequence)

    def restore(self) -> EngineState:
        """A state of its own for whoever folds on."""
        lengths = iter(self._lengths)

        def cut(sequence: SequenceState) -> SequenceState:
            num_tokens, num_pieces = next(lengths)
            sequence.token_ids = sequence.token_ids[:num_tokens]
            sequence.pieces = sequence.pieces[:num_pieces]
            return sequence

        return _copy(self._bare, list(self._ref_counts), list(self._written_slots), cut)

    @property
    def epoch(self) -> bytes:
        return self._bare.epoch

    @property
    def num_bytes(self) -> int:
        """Roughly, in memory: block lists and tables; the tokens belong to the batches that brought them."""
        packed = sum(len(values) * getattr(values, "itemsize", 1) for values in (self._ref_counts, self._written_slots))
        return packed + sum(500 + 8 * len(sequence.block_table) for sequence in _sequences(self._bare))


def _pack(values: Sequence[int]) -> Sequence[int]:
    try:
        return bytes(values)
    except ValueError:  # many sequences on one block, or large blocks
        return array("q", values)


def _sequences(state: EngineState) -> list[SequenceState]:
    return [sequence for request in state.requests.values() for sequence in request.sequences]


def _copy(
    state: EngineState,
    ref_counts: list[int],
    written_slots: list[int],
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
