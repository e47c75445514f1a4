"""The wire is pinned: these bytes never change for the same facts."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgpack
import msgspec
import pytest

from kvscope.events.codec import EVENT_CLASSES, DecodeError, decode_batch, decode_state, encode_batch, encode_state
from kvscope.events.fast_decode import decode_plain
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Batch, Event
from kvscope.transport.wire import Heartbeat, decode_heartbeat, decode_seq, encode_heartbeat, encode_seq

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "golden_wire.json").read_text())


def kind(event: Event) -> str:
    return str(event.__struct_config__.tag)


def test_every_kind_is_pinned(samples: tuple[Event, ...]) -> None:
    assert {kind(event) for event in samples} == set(EVENT_CLASSES) == set(GOLDEN) - {"heartbeat"}


def test_bytes_of_every_kind(samples: tuple[Event, ...], batch_of: Callable[..., Batch]) -> None:
    for event in samples:
        assert encode_batch(batch_of(event)).hex() == GOLDEN[kind(event)], kind(event)


def test_pinned_bytes_decode_to_the_same_facts(samples: tuple[Event, ...], batch_of: Callable[..., Batch]) -> None:
    for event in samples:
        decoded = decode_batch(bytes.fromhex(GOLDEN[kind(event)]))
        assert decoded.batch == batch_of(event)
        assert decoded.num_refused_events == 0


@pytest.mark.parametrize("printable", [False, True])
def test_the_fast_decoder_says_what_the_careful_one_says(
    printable: bool, samples: tuple[Event, ...], batch_of: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind, with text that must be made visible, and with bytes changed at random."""
    random, decided = Random(1), 0
    payloads = [encode_batch(batch_of(event)) for event in samples]
    payloads += [payload.replace(b"r1", b"r\x1b").replace(b"a", b"\x9b") for payload in payloads]
    payloads += [payload.replace(b"r1", b"r" + byte) for payload in payloads for byte in (b"\x1b", b"\x7f", b'"')]
    for payload in list(payloads):
        for _ in range(40):
            changed = bytearray(payload)
            changed[random.randrange(len(changed))] = random.randrange(256)
            payloads.append(bytes(changed))
    fast = [decode_plain(payload, printable=printable) for payload in payloads]
    monkeypatch.setattr("kvscope.events.codec.decode_plain", lambda payload, printable: None)
    for payload, batch in zip(payloads, fast, strict=True):
        if batch is not None:
            with contextlib.suppress(DecodeError):  # of text that is none, in a field that nobody reads
                assert decode_batch(payload, printable=printable) == (batch, 0)
                decided += 1
    assert decided > len(samples)


def test_heartbeat_bytes() -> None:
    heartbeat = Heartbeat(bytes(range(16)), 4211, 1284, 123_456_789)
    assert encode_heartbeat(heartbeat).hex() == GOLDEN["heartbeat"]
    assert decode_heartbeat(bytes.fromhex(GOLDEN["heartbeat"])) == heartbeat


def test_heartbeat_of_a_later_version_has_more_elements() -> None:
    assert decode_heartbeat(msgpack.packb([b"e", 1, 2, 3, "disk full", "new"])) == Heartbeat(b"e", 1, 2, 3, "disk full")
    told = Heartbeat(b"e", 1, 2, 3, "disk full")
    assert decode_heartbeat(encode_heartbeat(told)) == told


@pytest.mark.parametrize("fields", [None, [], [b"e", 1, 2], ["e" * 3, "x", 2, 3], {"epoch": b"e"}, [b"e", 1.5, 2, 3]])
def test_not_a_heartbeat(fields: object) -> None:
    with pytest.raises(DecodeError):
        decode_heartbeat(msgpack.packb(fields))


def test_sequence_number_is_eight_bytes_big_endian() -> None:
    assert encode_seq(0x0102) == b"\0\0\0\0\0\0\x01\x02"
    assert decode_seq(encode_seq(1 << 40)) == 1 << 40
    with pytest.raises(DecodeError):
        decode_seq(b"\0" * 7)


def test_unknown_kind_costs_one_event(samples: tuple[Event, ...], batch_of: Callable[..., Batch]) -> None:
    fields = msgpack.unpackb(encode_batch(batch_of(*samples[:3])))
    fields[4].insert(1, {"type": "block_evicted", "block_id": 3})
    decoded = decode_batch(msgpack.packb(fields))
    assert decoded.batch.events == samples[:3]
    assert decoded.num_refused_events == 1


def test_unknown_fields_and_trailing_elements_are_skipped(
    samples: tuple[Event, ...], batch_of: Callable[..., Batch]
) -> None:
    fields = msgpack.unpackb(encode_batch(batch_of(*samples)))
    for event in fields[4]:
        event["later"] = [1, {"deep": None}]
    decoded = decode_batch(msgpack.packb([*fields, "trailing"]))
    assert decoded.batch.events == samples
    assert decoded.num_refused_events == 0


def required_fields(event_class: type[Event]) -> set[str]:
    fields = msgspec.structs.fields(event_class)
    return {field.name for field in fields if field.required}


def test_a_missing_or_wrong_field_costs_one_event(samples: tuple[Event, ...], batch_of: Callable[..., Batch]) -> None:
    for event in samples:
        [fields] = msgpack.unpackb(encode_batch(batch_of(event)))[4]
        for name in set(fields) - {"type"}:
            wrong = {**fields, name: object_of_another_type(fields[name])}
            without = {key: value for key, value in fields.items() if key != name}
            for broken in (wrong, without) if name in required_fields(type(event)) else (wrong,):
                packed = msgpack.packb([b"e" * 16, 1, "plan", 0, [broken]])
                decoded = decode_batch(packed)
                assert (len(decoded.batch.events), decoded.num_refused_events) == (0, 1), (kind(event), name)


def object_of_another_type(value: object) -> object:
    return 1.5 if not isinstance(value, float) else "text"


def test_state_round_trip(samples: tuple[Event, ...]) -> None:
    full = samples[-1]
    assert isinstance(full, FullState)
    assert decode_state(encode_state(full.state)) == full.state
    assert decode_state(encode_state(EngineState())) == EngineState()


def test_strings_are_made_printable(batch_of: Callable[..., Batch]) -> None:
    packed = msgpack.packb([b"e" * 16, 1, "life", 0, [{"type": "engine_stopped", "reason": "\x1b]52;c;x\x07\u202e"}]])
    [event] = decode_batch(packed, printable=True).batch.events
    assert "\x1b" not in str(event)
    assert "␛]52;c;x␇�" in str(event)
