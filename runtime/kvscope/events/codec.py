"""Events to bytes and back: MessagePack on the wire, msgspec structs in memory.

A batch is the array `[epoch, step, phase, time_ns, events]`; an event is a map with `"type"`. Unknown kinds and
events that do not validate cost one event each and are counted; unknown fields are skipped. Anything that is not a
batch at all is a DecodeError with one line of reason.
"""

from typing import Any, NamedTuple

import msgpack
import msgspec

from kvscope.events.columns import column_from_list, column_to_list
from kvscope.events.fast_decode import decode_plain
from kvscope.events.state import EngineState, FullState
from kvscope.events.text import make_printable, printable_strings
from kvscope.events.types import MAX_NUM_BLOCKS, Batch, Event

MAX_BATCH_BYTES = 16 * 1024 * 1024
MAX_STATE_BYTES = 256 * 1024 * 1024
MAX_EVENTS_PER_BATCH = 100_000
# Values in one payload, nested ones too: a byte on the wire can become 72 in memory (an empty map).
MAX_BATCH_NODES = 4_000_000
MAX_STATE_NODES = 16_000_000
_HEADER_BYTES = 512  # what comes before the events of a batch is a tenth of it

EVENT_CLASSES: dict[str, type[Event]] = {str(cls.__struct_config__.tag): cls for cls in Event.__subclasses__()}


class DecodeError(ValueError):
    """The bytes are not what they should be; the message is one line."""


class DecodedBatch(NamedTuple):
    batch: Batch
    num_refused_events: int  # unknown kind, or fields that do not validate


def encode_batch(batch: Batch) -> bytes:
    """The wire form of a batch. Deterministic: equal batches give equal bytes."""
    events = [msgspec.to_builtins(event, builtin_types=(bytes,), enc_hook=column_to_list) for event in batch.events]
    encoded: bytes = msgpack.packb([batch.epoch, batch.step, batch.phase, batch.time_ns, events])
    return encoded


def decode_batch(payload: bytes, *, printable: bool = False) -> DecodedBatch:
    """Parse one payload; with `printable`, every string in it is made safe for a terminal.

    Raises:
        DecodeError: not MessagePack, too large, or not shaped like a batch.
    """
    plain = decode_plain(payload, printable=printable)
    if plain is not None:
        return DecodedBatch(plain, 0)
    fields = unpack(payload, MAX_BATCH_BYTES, printable=printable)
    if not isinstance(fields, list) or len(fields) < 5 or not isinstance(fields[4], list):
        raise DecodeError("not an event batch: expected [epoch, step, phase, time_ns, events]")
    if len(fields[4]) > MAX_EVENTS_PER_BATCH:
        raise DecodeError(f"{len(fields[4])} events in one batch; the limit is {MAX_EVENTS_PER_BATCH}")
    events = [event for event in map(convert_event, fields[4]) if event is not None]
    header = dict(zip(("epoch", "step", "phase", "time_ns"), fields[:4], strict=True))
    try:
        batch = msgspec.convert({**header, "events": ()}, Batch)
    except msgspec.ValidationError as error:
        raise DecodeError(f"not an event batch: {error}") from None
    batch = msgspec.structs.replace(batch, events=tuple(events))
    return DecodedBatch(batch, len(fields[4]) - len(events))


def peek_epoch(payload: bytes) -> bytes:
    """Which life a batch is of, without decoding the rest of it. Raises DecodeError."""
    unpacker = msgpack.Unpacker(max_buffer_size=64)  # a new one: it holds nothing of an earlier payload
    unpacker.feed(payload[:64])
    try:
        num_elements, epoch = unpacker.read_array_header(), unpacker.unpack()
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"not an event batch: {make_printable(str(error) or type(error).__name__)}") from None
    if num_elements < 5 or not isinstance(epoch, bytes):
        raise DecodeError("not an event batch: expected [epoch, step, phase, time_ns, events]")
    return epoch


def peek_header(payload: bytes) -> tuple[int, int, int]:
    """Step, time and number of events of a batch, without decoding them. Raises DecodeError."""
    unpacker = msgpack.Unpacker(max_buffer_size=_HEADER_BYTES)
    unpacker.feed(payload[:_HEADER_BYTES])
    try:
        num_elements = unpacker.read_array_header()
        _, step, _, time_ns = (unpacker.unpack() for _ in range(4))
        num_events = unpacker.read_array_header()
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"not an event batch: {make_printable(str(error) or type(error).__name__)}") from None
    if num_elements < 5 or not all(isinstance(number, int) and 0 <= number < 1 << 62 for number in (step, time_ns)):
        raise DecodeError("not an event batch: expected [epoch, step, phase, time_ns, events]")
    return step, time_ns, num_events


def encode_state(state: EngineState) -> bytes:
    """The snapshot form of a state."""
    said = msgspec.structs.replace(state, traces=msgspec.UNSET)
    encoded: bytes = msgpack.packb(msgspec.to_builtins(said, builtin_types=(bytes,), enc_hook=column_to_list))
    return encoded


def decode_state(payload: bytes, *, printable: bool = False) -> EngineState:
    """Raises DecodeError when the payload is not a state, or its tables do not fit its pool."""
    fields = unpack(payload, MAX_STATE_BYTES, MAX_STATE_NODES, printable=printable)
    try:
        state = msgspec.convert(fields, EngineState, dec_hook=column_from_list)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DecodeError(f"not an engine state: {error}") from None
    check_shape(state)
    return state


def unpack(payload: bytes, max_bytes: int, max_nodes: int = MAX_BATCH_NODES, *, printable: bool = False) -> Any:
    """One MessagePack value of plain types, or a DecodeError with one line of reason."""
    if len(payload) > max_bytes:
        raise DecodeError(f"{len(payload)} bytes in one frame; the limit is {max_bytes}")
    nodes_left = max_nodes

    def count(container: Any) -> Any:
        nonlocal nodes_left
        nodes_left -= len(container) + 1
        if nodes_left < 0:
            raise DecodeError(f"more than {max_nodes} values in one frame")
        return container

    try:
        decoded = msgpack.unpackb(
            payload,
            ext_hook=_refuse_extension,
            list_hook=count,
            object_hook=count,
            max_array_len=max_nodes,
            max_map_len=max_nodes,
            max_ext_len=0,
            strict_map_key=True,
        )
        return printable_strings(decoded) if printable else decoded
    except DecodeError:
        raise
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError, TypeError) as error:
        reason = str(error) or type(error).__name__
        raise DecodeError(f"not MessagePack: {make_printable(reason)}") from None


def _refuse_extension(code: int, data: bytes) -> Any:
    raise DecodeError(f"MessagePack extension type {code} is not part of the protocol")


def convert_event(fields: Any) -> Event | None:
    """An event from a map of plain types; None for an unknown kind, and where it does not validate."""
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        return None
    event_class = EVENT_CLASSES.get(fields["type"])
    if event_class is None:
        return None
    try:
        event: Event = msgspec.convert(fields, event_class, dec_hook=column_from_list)
        if isinstance(event, FullState):
            check_shape(event.state)
    except (msgspec.ValidationError, DecodeError, RecursionError):
        return None
    return event


def check_shape(state: EngineState) -> None:
    num_blocks = state.info.num_blocks if state.info is not None else 0
    if len(state.ref_counts) != num_blocks or len(state.written_slots) != num_blocks:
        raise DecodeError("engine state: the block lists do not have the pool's length")
    sequences = [sequence for request in state.requests.values() for sequence in request.sequences]
    if any(not 0 <= block_id < num_blocks for sequence in sequences for block_id in sequence.block_table):
        raise DecodeError("engine state: a block table points outside the pool")
    num_host_blocks = len(state.host_ref_counts)
    if any(not 0 <= block_id < num_host_blocks for sequence in sequences for block_id in sequence.host_table):
        raise DecodeError("engine state: a host table points outside the host pool")
    if any(not 0 <= sequence.num_released < MAX_NUM_BLOCKS for sequence in sequences):
        raise DecodeError("engine state: no sequence has had that many blocks")
