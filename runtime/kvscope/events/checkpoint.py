"""A state as bytes that are few and quick to read back: block lists as they lie in memory, the rest as MessagePack.

For recordings, which hold hundreds of them. Unlike a snapshot on the wire, nobody else has to understand it:

    [beyond, written_slots, tables, lengths, prompts, state]

    beyond   by block: its ref count beyond the entries of tables that point at it, almost always nothing
    tables   all block tables behind each other, of `lengths` blocks, each block by how much more than the one before
    prompts  of each request: its tokens' ids, its text, and how many characters of it each token is
    state    without any of that

A list of numbers is `[typecode, bytes]`, with as few bytes for each as the largest needs. Most of a state are tokens of
prompts: they are made when somebody looks at one.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvscope.events.codec import DecodeError, check_shape
from kvscope.events.column_codes import pack_numbers, unpack_numbers
from kvscope.events.columns import Column, LazyList, column_from_list, column_to_list
from kvscope.events.state import EngineState, RequestState, SequenceState
from kvscope.events.text import make_printable, printable_strings
from kvscope.events.types import Count

_Packed = tuple[str, bytes]


class _Prompt(NamedTuple):
    token_ids: _Packed
    text: str  # of all pieces
    lengths: _Packed  # of the pieces, in characters


_Parts = tuple[_Packed, _Packed, _Packed, list[Count], list[_Prompt], EngineState]
_decoder = msgspec.msgpack.Decoder(_Parts, dec_hook=column_from_list)


class CheckpointEncoder:
    """Encodes the states of an engine one after the other: prompts, which never change, are packed once."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[RequestState, _Prompt]] = {}

    def encode(self, state: EngineState) -> bytes:
        sequences = _sequences(state)
        tables = np.fromiter(chain.from_iterable(sequence.block_table for sequence in sequences), np.int64)
        beyond = state.ref_counts.numbers - np.bincount(tables, minlength=len(state.ref_counts))
        columns = map(pack_numbers, (beyond, state.written_slots.numbers, np.diff(tables, prepend=0)))
        lengths = [len(sequence.block_table) for sequence in sequences]
        self._prompts = {name: self._pack(name, request) for name, request in state.requests.items()}
        prompts = [prompt for _, prompt in self._prompts.values()]
        return msgspec.msgpack.encode((*columns, lengths, prompts, _bare(state)), enc_hook=column_to_list)

    def _pack(self, name: str, request: RequestState) -> tuple[RequestState, _Prompt]:
        known = self._prompts.get(name)
        token_ids, pieces = request.prompt_token_ids, request.prompt_pieces
        if known is not None and known[0].prompt_token_ids is token_ids and known[0].prompt_pieces is pieces:
            return known
        lengths = pack_numbers(np.fromiter(map(len, pieces), np.int64))
        return request, _Prompt(pack_numbers(np.array(token_ids, np.int64)), "".join(pieces), lengths)


def encode_checkpoint(state: EngineState) -> bytes:
    """Raises OverflowError: a number of the state does not fit into 64 bits."""
    return CheckpointEncoder().encode(state)


def decode_checkpoint(data: bytes) -> EngineState:
    """The state, its text made printable. Raises DecodeError for anything else."""
    try:
        beyond, written_slots, tables, lengths, prompts, state = _decoder.decode(data)
        _add_blocks(state, unpack_numbers(*beyond), np.cumsum(unpack_numbers(*tables)), lengths)
        state.written_slots = Column.of(unpack_numbers(*written_slots))
        for request, prompt in zip(state.requests.values(), prompts, strict=True):
            _add_prompt(request, prompt)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise DecodeError(f"not a checkpoint: {make_printable(str(error))}") from None
    check_shape(state)
    return state if _is_printable(state, prompts) else _printable(state)


def _sequences(state: EngineState) -> list[SequenceState]:
    return [sequence for request in state.requests.values() for sequence in request.sequences]


def _bare(state: EngineState) -> EngineState:
    """Without blocks and prompts."""
    requests = {name: _bare_request(request) for name, request in state.requests.items()}
    bare = {"ref_counts": Column(), "written_slots": Column(), "traces": msgspec.UNSET}
    return msgspec.structs.replace(state, requests=requests, **bare)


def _bare_request(request: RequestState) -> RequestState:
    sequences = [msgspec.structs.replace(sequence, block_table=[]) for sequence in request.sequences]
    return msgspec.structs.replace(request, prompt_token_ids=[], prompt_pieces=[], sequences=sequences)


def _add_prompt(request: RequestState, prompt: _Prompt) -> None:
    """Raises ValueError."""
    token_ids, lengths = unpack_numbers(*prompt.token_ids), unpack_numbers(*prompt.lengths)
    request.prompt_token_ids = LazyList(len(token_ids), token_ids.tolist)
    request.prompt_pieces = LazyList(len(lengths), partial(_cut, prompt.text, lengths))


def _cut(text: str, lengths: NDArray[np.int64]) -> list[str]:
    return [text[start:stop] for start, stop in pairwise(accumulate(lengths.tolist(), initial=0))]


def _add_blocks(state: EngineState, beyond: NDArray[Any], tables: NDArray[Any], lengths: list[int]) -> None:
    sequences = _sequences(state)
    if len(lengths) != len(sequences) or sum(lengths) != len(tables):
        raise ValueError("not as many blocks as its tables have")
    if tables.size and not 0 <= tables.min() <= tables.max() < len(beyond):
        raise ValueError("a block table points outside the pool")
    state.ref_counts = Column.of(beyond + np.bincount(tables, minlength=len(beyond)))
    blocks = iter(tables.tolist())
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.block_table = list(islice(blocks, length))


def _is_printable(state: EngineState, prompts: list[_Prompt]) -> bool:
    """Whether no text needs a change, found quickly: most of it are prompts and generated text.

    The rest is looked at as JSON, in which what is not plain is escaped or not ASCII.
    """
    requests = {name: _without_text(request) for name, request in state.requests.items()}
    bare = msgspec.structs.replace(state, requests=requests, ref_counts=Column(), written_slots=Column())
    rest = msgspec.json.encode(bare, enc_hook=column_to_list)
    is_plain = rest.isascii() and b"\\" not in rest and b"\x7f" not in rest
    return is_plain and _is_plain("".join([*(prompt.text for prompt in prompts), *map(_text, state.requests.values())]))


def _text(request: RequestState) -> str:
    """But for the pieces of the prompt."""
    return "".join([request.prompt, *("".join([seq.text, *seq.pieces]) for seq in request.sequences)])


def _without_text(request: RequestState) -> RequestState:
    """Without what `_text` has, and without what has none."""
    sequences = [
        msgspec.structs.replace(sequence, text="", pieces=[], token_ids=[], block_table=[])
        for sequence in request.sequences
    ]
    return msgspec.structs.replace(request, prompt="", prompt_pieces=[], prompt_token_ids=[], sequences=sequences)


def _is_plain(text: str) -> bool:
    """Whether it is printable ASCII, in a tenth of the time of `isprintable`."""
    if not text.isascii():
        return False
    codes = np.frombuffer(text.encode(), np.uint8)
    return not codes.size or bool(codes.min() >= ord(" ") and codes.max() < 0x7F)


def _printable(state: EngineState) -> EngineState:
    fields: Sequence[object] = printable_strings(
        msgspec.to_builtins(state, builtin_types=(bytes,), enc_hook=column_to_list)
    )
    return msgspec.convert(fields, EngineState, dec_hook=column_from_list)
