"""A state as bytes that are few and quick to read back: block lists as they lie in memory, the rest as MessagePack.

For recordings, which hold hundreds of them. Unlike a snapshot on the wire, nobody else has to understand it:

    [beyond, written_slots, tables, lengths, state]

    beyond   by block: its ref count beyond the entries of tables that point at it, almost always nothing
    tables   all block tables behind each other, of `lengths` blocks, each block by how much more than the one before
    state    without any of that

A list of numbers is `[typecode, bytes]`, with as few bytes for each as the largest needs.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvscope.events.codec import DecodeError, check_shape
from kvscope.events.columns import Column, column_from_list, column_to_list
from kvscope.events.state import EngineState, RequestState, SequenceState
from kvscope.events.text import make_printable, printable_strings
from kvscope.events.types import Count

_TYPECODES = "bhiq"  # numpy's, by size
_Packed = tuple[str, bytes]
_Parts = tuple[_Packed, _Packed, _Packed, list[Count], EngineState]
_decoder = msgspec.msgpack.Decoder(_Parts, dec_hook=column_from_list)


def encode_checkpoint(state: EngineState) -> bytes:
    sequences = _sequences(state)
    tables = np.fromiter(chain.from_iterable(sequence.block_table for sequence in sequences), np.int64)
    beyond = state.ref_counts.numbers - np.bincount(tables, minlength=len(state.ref_counts))
    columns = _pack(beyond), _pack(state.written_slots.numbers), _pack(np.diff(tables, prepend=0))
    lengths = [len(sequence.block_table) for sequence in sequences]
    return msgspec.msgpack.encode((*columns, lengths, _without_blocks(state)), enc_hook=column_to_list)


def decode_checkpoint(data: bytes) -> EngineState:
    """The state, its text made printable. Raises DecodeError for anything else."""
    try:
        beyond, written_slots, tables, lengths, state = _decoder.decode(data)
        _add_blocks(state, _unpack(beyond), np.cumsum(_unpack(tables)), lengths)
        state.written_slots = Column.of(_unpack(written_slots))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise DecodeError(f"not a checkpoint: {make_printable(str(error))}") from None
    check_shape(state)
    return state if _is_printable(state) else _printable(state)


def _sequences(state: EngineState) -> list[SequenceState]:
    return [sequence for request in state.requests.values() for sequence in request.sequences]


def _without_blocks(state: EngineState) -> EngineState:
    requests = {name: _without_tables(request) for name, request in state.requests.items()}
    bare = {"ref_counts": Column(), "written_slots": Column(), "traces": msgspec.UNSET}
    return msgspec.structs.replace(state, requests=requests, **bare)


def _without_tables(request: RequestState) -> RequestState:
    sequences = [msgspec.structs.replace(sequence, block_table=[]) for sequence in request.sequences]
    return msgspec.structs.replace(request, sequences=sequences)


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


def _pack(numbers: NDArray[Any]) -> _Packed:
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    code = next(code for code in _TYPECODES if np.iinfo(code).min <= low <= high <= np.iinfo(code).max)
    return code, numbers.astype(code).tobytes()


def _unpack(packed: _Packed) -> NDArray[Any]:
    code, data = packed
    if len(code) != 1 or code not in _TYPECODES:
        raise ValueError("unknown typecode")
    return np.frombuffer(data, code).astype(np.int64)


def _is_printable(state: EngineState) -> bool:
    """Whether no text needs a change, found quickly: most of it are pieces of prompts and of generated text.

    The rest is looked at as JSON, in which what is not plain is escaped or not ASCII.
    """
    requests = {name: _without_text(request) for name, request in state.requests.items()}
    bare = msgspec.structs.replace(state, requests=requests, ref_counts=Column(), written_slots=Column())
    rest = msgspec.json.encode(bare, enc_hook=column_to_list)
    is_plain = rest.isascii() and b"\\" not in rest and b"\x7f" not in rest
    return is_plain and _is_plain("".join(chain.from_iterable(map(_texts, state.requests.values()))))


def _texts(request: RequestState) -> Iterator[str]:
    return chain((request.prompt,), request.prompt_pieces, *((seq.text, *seq.pieces) for seq in request.sequences))


def _without_text(request: RequestState) -> RequestState:
    """Without what `_texts` has, and without what has none."""
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
