"""Compact, independent copies of a state, to go back to later without folding everything again."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zstandard

from kvscope.events.columns import Column, column_to_list
from kvscope.events.state import EngineState, RequestState, SequenceState
from kvscope.events.traces import Traces, pack

MAX_PACKED_TOKENS = 10_000  # more would take some milliseconds, in which no picture is made
_LEVEL = 1


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

    def packed(self) -> "Keyframe | PackedKeyframe":
        """To be kept for long."""
        return PackedKeyframe(self) if sum(length for length, _ in self._lengths) <= MAX_PACKED_TOKENS else self


class PackedKeyframe:
    """A keyframe as one piece of memory. It shares nothing with others, and everybody who restores it unpacks it anew.

    As objects, requests that have long left the engine would lie scattered over memory that is not given back.
    """

    __slots__ = ("_packed", "epoch")

    def __init__(self, keyframe: Keyframe) -> None:
        self.epoch = keyframe.epoch
        plain = msgspec.msgpack.encode(keyframe.restore(), enc_hook=_to_plain)
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(plain)
        self._packed = bytes(memoryview(packed))  # what zstandard returns keeps the room that nothing packed would take

    def restore(self) -> EngineState:
        """A state of its own for whoever folds on."""
        plain = zstandard.ZstdDecompressor().decompress(self._packed)
        return msgspec.msgpack.decode(plain, type=EngineState, dec_hook=_from_plain)

    @property
    def num_bytes(self) -> int:
        return len(self._packed)


def _to_plain(value: Any) -> Any:
    """Numbers of blocks as bytes, and how wide each is; the rest as on the wire (msgspec's `enc_hook`)."""
    if isinstance(value, Column):
        numbers = pack(value)
        return numbers.dtype.str, numbers.tobytes()
    if isinstance(value, Traces):
        return value.since_step, value.writes, value.hits
    return column_to_list(value)


def _from_plain(kind: type, value: Any) -> Any:
    """Back again (msgspec's `dec_hook`)."""
    if kind is Column:
        return Column.of(np.frombuffer(value[1], value[0]))
    traces = Traces(0, value[0])
    traces.writes, traces.hits = (_from_plain(Column, column) for column in value[1:])
    return traces


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
