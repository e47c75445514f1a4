"""Compact, independent copies of a state, to go back to later without folding everything again."""

from collections.abc import Callable

import msgspec

from kvscope.events.columns import Column
from kvscope.events.state import EngineState, RequestState, SequenceState
from kvscope.events.traces import pack


class Keyframe:
    """A state at rest: a byte or two per block; nothing that a fold changes is shared with a live state.

    Generated tokens are only ever appended to, so the live lists are kept, with their lengths of this moment: taking
    a copy costs nothing per token, and copies of one sequence share its tokens.
    """

    __slots__ = ("_bare", "_lengths", "_ref_counts", "_traces", "_written_slots")

    def __init__(self, state: EngineState) -> None:
        self._ref_counts, self._written_slots = pack(state.ref_counts), pack(state.written_slots)
        self._traces = state.traces.packed() if state.traces else None
        self._lengths = [(len(seq.token_ids), len(seq.pieces)) for seq in _sequences(state)]
        self._bare = _copy(state, Column(), Column(), lambda sequence: sequence)

    def restore(self, *, traced: bool = False) -> EngineState:
        """A state of its own for whoever folds on; with traces if it had some, or if they are to begin here."""
        lengths = iter(self._lengths)

        def cut(sequence: SequenceState) -> SequenceState:
            num_tokens, num_pieces = next(lengths)
            sequence.token_ids = sequence.token_ids[:num_tokens]
            sequence.pieces = sequence.pieces[:num_pieces]
            return sequence

        state = _copy(self._bare, Column.of(self._ref_counts), Column.of(self._written_slots), cut)
        if self._traces is not None:
            state.traces = self._traces.restore()
        elif traced:
            state.trace()
        return state

    @property
    def epoch(self) -> bytes:
        return self._bare.epoch

    @property
    def num_bytes(self) -> int:
        """Roughly, in memory: block lists and tables; the tokens belong to the batches that brought them."""
        packed = self._ref_counts.nbytes + self._written_slots.nbytes
        packed += self._traces.num_bytes if self._traces is not None else 0
        return packed + sum(500 + 8 * len(sequence.block_table) for sequence in _sequences(self._bare))


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
        traces=msgspec.UNSET,
    )


def _copy_request(request: RequestState, adapt: Callable[[SequenceState], SequenceState]) -> RequestState:
    sequences = [
        adapt(msgspec.structs.replace(sequence, block_table=sequence.block_table.copy()))
        for sequence in request.sequences
    ]
    return msgspec.structs.replace(request, sequences=sequences)
