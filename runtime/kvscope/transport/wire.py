"""What is on the sockets besides event batches: topics, sequence numbers, heartbeats and size limits.

PUB sends three frames, `[topic, sequence number, payload]`; the number is 8 bytes big-endian, per topic, +1 a message.
"""

from typing import NamedTuple

import msgpack
import msgspec

from kvscope.events.codec import MAX_BATCH_BYTES, MAX_STATE_BYTES, DecodeError, unpack

EVENTS_TOPIC = b"kvscope"
HEARTBEAT_TOPIC = b"kvscope.heartbeat"
HEARTBEAT_INTERVAL_S = 0.5
STALE_AFTER_S = 2.0

MAX_REQUEST_BYTES = 1 << 20  # what a control client may send in one frame
MAX_REPLY_BYTES = MAX_STATE_BYTES + (1 << 16)
MAX_EVENT_FRAME_BYTES = MAX_BATCH_BYTES
_SEQ_BYTES = 8


class Heartbeat(NamedTuple):
    """The engine lives: which life, the last batch sent, the engine's clock now, and what it warns its viewers of."""

    epoch: bytes
    last_seq: int
    step: int
    time_ns: int
    warning: str = ""


def encode_seq(seq: int) -> bytes:
    return seq.to_bytes(_SEQ_BYTES, "big")


def decode_seq(frame: bytes) -> int:
    """Raises DecodeError when the frame is not 8 bytes."""
    if len(frame) != _SEQ_BYTES:
        raise DecodeError(f"a sequence number has {_SEQ_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big")


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    fields = heartbeat if heartbeat.warning else heartbeat[:4]
    encoded: bytes = msgpack.packb(list(fields))
    return encoded


def decode_heartbeat(payload: bytes) -> Heartbeat:
    """Raises DecodeError; elements after the fifth are skipped, so that a later version may add some."""
    fields = unpack(payload, MAX_REQUEST_BYTES)
    if not isinstance(fields, list) or len(fields) < 4:
        raise DecodeError("not a heartbeat: expected [epoch, last_seq, step, time_ns]")
    try:
        return msgspec.convert(fields[:5], Heartbeat)
    except msgspec.ValidationError as error:
        raise DecodeError(f"not a heartbeat: {error}") from None
