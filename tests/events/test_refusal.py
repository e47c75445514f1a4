"""Hostile bytes are decoded or refused with one line; nothing else ever comes out of the decoders."""

import contextlib
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvscope.events.codec import (
    EVENT_CLASSES,
    MAX_BATCH_BYTES,
    MAX_BATCH_NODES,
    MAX_EVENTS_PER_BATCH,
    DecodeError,
    decode_batch,
    decode_state,
    encode_batch,
    encode_state,
)
from kvscope.events.state import FullState
from kvscope.events.types import Batch, Event

JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(width=32)
    | st.text(max_size=8)
    | st.binary(max_size=16),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.binary(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELD_NAMES = sorted({name for cls in EVENT_CLASSES.values() for name in cls.__struct_fields__})
ALMOST_EVENTS = st.dictionaries(st.sampled_from(FIELD_NAMES), JSONISH, max_size=6).flatmap(
    lambda fields: st.sampled_from(sorted(EVENT_CLASSES)).map(lambda name: {**fields, "type": name})
)
FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def decode_all(payload: bytes) -> None:
    for printable in (False, True):
        with contextlib.suppress(DecodeError):
            decode_batch(payload, printable=printable)
        with contextlib.suppress(DecodeError):
            decode_state(payload, printable=printable)


@pytest.mark.parametrize("value", [b"\xc0", b"\x90", b"\x80", b"\x91\xc0"])
def test_more_values_than_anybody_needs(value: bytes) -> None:
    """A few bytes on the wire must not become gigabytes in memory."""
    count = MAX_BATCH_NODES + 1
    frame = b"\xdd" + count.to_bytes(4, "big") + value * count
    with pytest.raises(DecodeError, match=r"not MessagePack: .*exceeds max_array_len|more than 4000000 values|limit"):
        decode_batch(frame)
    nested = b"\x92" + 2 * (b"\xdd" + (count // 2 + 1).to_bytes(4, "big") + b"\xc0" * (count // 2 + 1))
    with pytest.raises(DecodeError, match="more than 4000000 values"):
        decode_batch(nested)


@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes(payload: bytes) -> None:
    decode_all(payload)


@FUZZ
@given(JSONISH)
def test_any_message(value: object) -> None:
    decode_all(msgpack.packb(value))


@FUZZ
@given(JSONISH, JSONISH, JSONISH, JSONISH, st.lists(ALMOST_EVENTS | JSONISH, max_size=4))
def test_nearly_a_batch(epoch: object, step: object, phase: object, time_ns: object, events: list[object]) -> None:
    decode_all(msgpack.packb([epoch, step, phase, time_ns, events]))
    decode_all(msgpack.packb([b"e" * 16, 1, "plan", 1, events]))


@FUZZ
@given(st.data())
def test_one_changed_field_of_a_state(samples: tuple[Event, ...], data: st.DataObject) -> None:
    full = samples[-1]
    assert isinstance(full, FullState)
    fields = msgpack.unpackb(encode_state(full.state))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSONISH)
    decode_all(msgpack.packb(fields))


@FUZZ
@given(st.data())
def test_flipped_bytes_of_a_batch(
    samples: tuple[Event, ...], batch_of: Callable[..., Batch], data: st.DataObject
) -> None:
    payload = bytearray(encode_batch(batch_of(*samples)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    decode_all(bytes(payload))


BOMBS = {
    "claims 4 G elements": b"\xdd\xff\xff\xff\xff",
    "claims 4 G pairs": b"\xdf\xff\xff\xff\xff",
    "claims 4 GB of bytes": b"\xc6\xff\xff\xff\xff",
    "extension": b"\xc7\x01\x05\x00",
    "timestamp extension": b"\xd6\xff\x00\x00\x00\x00",
    "nested 500 deep": b"\x91" * 500 + b"\xc0",
    "nested 1,000 deep": b"\x91" * 1_000 + b"\xc0",
    "nested 100,000 deep": b"\x91" * 100_000 + b"\xc0",
    "invalid UTF-8": b"\x95\xa2\xff\xfe\x01\xa4plan\x01\x90",
    "number as key": b"\x81\x01\x01",
    "empty": b"",
    "two messages": b"\x90\x90",
    "cut short": b"\x95\xc4\x10",
}


@pytest.mark.parametrize("printable", [False, True])
@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str, printable: bool) -> None:
    payload = BOMBS[name]
    for decode in (decode_batch, decode_state):
        with pytest.raises(DecodeError) as refusal:
            decode(payload, printable=printable)
        assert "\n" not in str(refusal.value)
        assert str(refusal.value).isprintable()


def test_deep_nesting_inside_an_event_costs_that_event() -> None:
    deep: object = None
    for _ in range(480):
        deep = [deep]
    decoded = decode_batch(msgpack.packb([b"e" * 16, 1, "plan", 1, [{"type": "engine_stopped", "reason": deep}]]))
    assert decoded.num_refused_events == 1


def test_too_large() -> None:
    with pytest.raises(DecodeError, match="limit"):
        decode_batch(bytes(MAX_BATCH_BYTES + 1))


def test_too_many_events() -> None:
    with pytest.raises(DecodeError, match="limit"):
        decode_batch(msgpack.packb([b"e" * 16, 1, "plan", 1, [None] * (MAX_EVENTS_PER_BATCH + 1)]))


def test_a_state_whose_tables_leave_the_pool(samples: tuple[Event, ...]) -> None:
    full = samples[-1]
    assert isinstance(full, FullState)
    fields = msgpack.unpackb(encode_state(full.state))
    fields["requests"]["r1"]["sequences"][0]["block_table"] = [6]
    with pytest.raises(DecodeError, match="outside"):
        decode_state(msgpack.packb(fields))
    fields["ref_counts"] = [0]
    with pytest.raises(DecodeError, match="length"):
        decode_state(msgpack.packb(fields))
