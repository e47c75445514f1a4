"""Control requests and replies as bytes: MessagePack maps with `id` and `op`, or `id` and `ok`."""

from enum import Enum
from typing import Any

import msgpack

from kvscope.events.codec import DecodeError, unpack
from kvscope.events.text import make_printable
from kvscope.transport.wire import MAX_REQUEST_BYTES

MAX_REQUEST_ID_CHARS = 64
MAX_STEPS = 10_000  # at once


class Op(Enum):
    """What a client may ask. The ones after PING change the engine and are refused by a read-only server."""

    SNAPSHOT = "snapshot"
    REPLAY = "replay"
    STATS = "stats"
    PING = "ping"
    SUBMIT = "submit"
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    STEP = "step"
    BREAK = "break"


READ_ONLY_OPS = frozenset({Op.SNAPSHOT, Op.REPLAY, Op.STATS, Op.PING})


class ControlRefused(Exception):  # noqa: N818 - the word of the protocol
    """The engine says no; one line for the user."""


def decode_request(frame: bytes) -> tuple[int, dict[str, Any]]:
    """The request's id and all its fields.

    Raises:
        DecodeError: not a map with a usable id; there is nobody to answer.
    """
    fields = unpack(frame, MAX_REQUEST_BYTES)
    if not isinstance(fields, dict):
        raise DecodeError("a request is a map")
    request_id = fields.get("id")
    if not isinstance(request_id, int) or isinstance(request_id, bool) or not 0 <= request_id < 1 << 63:
        raise DecodeError("a request has an id, a number from 0")
    return request_id, fields


def encode_reply(request_id: int | None, /, **fields: Any) -> bytes:
    encoded: bytes = msgpack.packb({"id": request_id, **fields})
    return encoded


def text_field(fields: dict[str, Any], name: str, max_chars: int) -> str:
    """Raises ControlRefused unless the field is a string that is not too long."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise ControlRefused(f"{name} must be a string")
    if len(value) > max_chars:
        raise ControlRefused(f"{name} has {len(value)} characters; the limit is {max_chars}")
    return value


def number_field(fields: dict[str, Any], name: str, low: int, high: int) -> int:
    """Raises ControlRefused unless the field is a whole number in `low..high`."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ControlRefused(f"{name} must be a whole number from {low} to {high}")
    return value


def one_line(error: object) -> str:
    """An exception's text as one printable line."""
    return make_printable(" ".join(str(error).split())) or type(error).__name__
