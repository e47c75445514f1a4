"""A state as bytes that are quick to read back: block lists as they lie in memory, the rest as MessagePack.

For recordings, which hold hundreds of them. Unlike a snapshot on the wire, nobody else has to understand it.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from kvscope.events.codec import DecodeError, check_shape
from kvscope.events.columns import Column, column_from_list, column_to_list
from kvscope.events.state import EngineState
from kvscope.events.text import make_printable, printable_strings

_Parts = tuple[str, bytes, bytes, EngineState]  # typecode of both lists, the lists, the state without them
_decoder = msgspec.msgpack.Decoder(_Parts, dec_hook=column_from_list)


def encode_checkpoint(state: EngineState) -> bytes:
    """The state, with a byte per block and list, or eight where a count is larger than that."""
    bare = msgspec.structs.replace(state, ref_counts=Column(), written_slots=Column())
    lists = state.ref_counts.numbers, state.written_slots.numbers
    typecode = "B" if all(not values.size or 0 <= values.min() <= values.max() < 256 for values in lists) else "q"
    packed = [values.astype(np.uint8 if typecode == "B" else np.int64).tobytes() for values in lists]
    return msgspec.msgpack.encode((typecode, *packed, bare), enc_hook=column_to_list)


def decode_checkpoint(data: bytes) -> EngineState:
    """The state, its text made printable. Raises DecodeError for anything else."""
    try:
        typecode, ref_counts, written_slots, state = _decoder.decode(data)
        state.ref_counts, state.written_slots = _unpack(typecode, ref_counts), _unpack(typecode, written_slots)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise DecodeError(f"not a checkpoint: {make_printable(str(error))}") from None
    check_shape(state)
    return state if _is_printable(state) else _printable(state)


def _unpack(typecode: str, data: bytes) -> Column:
    if typecode not in ("B", "q"):
        raise ValueError("unknown typecode")
    return Column.of(np.frombuffer(data, np.uint8 if typecode == "B" else np.int64))


def _is_printable(state: EngineState) -> bool:
    """Whether no text needs a change, found quickly: most of it is generated text."""
    rest = msgspec.structs.replace(state, requests={}, ref_counts=Column(), written_slots=Column())
    return _is_plain(msgspec.json.encode(rest, enc_hook=column_to_list).decode()) and all(
        _is_plain(name + request.prompt + "".join(request.prompt_pieces) + request.params.cache_salt)
        and _is_plain("".join(request.params.stop) + request.status)
        and all(_is_plain(seq.sequence_id + seq.text + "".join(seq.pieces)) for seq in request.sequences)
        for name, request in state.requests.items()
    )


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _printable(state: EngineState) -> EngineState:
    fields: Sequence[object] = printable_strings(
        msgspec.to_builtins(state, builtin_types=(bytes,), enc_hook=column_to_list)
    )
    return msgspec.convert(fields, EngineState, dec_hook=column_from_list)
