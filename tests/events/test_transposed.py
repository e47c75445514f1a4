"""A batch on its side says what it says on the wire; anything else is refused."""

import random

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvscope.events import transposed as transposed_module
from kvscope.events import types as ev
from kvscope.events.codec import DecodeError, decode_batch, encode_batch
from kvscope.events.transposed import peek_transposed, read_transposed, transpose
from kvscope.events.types import Batch, Event

SAME_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
VALUES = st.one_of(
    st.integers(-2, 3), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.text(max_size=3),
    st.lists(st.integers(0, 9) | st.text(max_size=2), max_size=2), st.just({}), st.just(-0.0),
).filter(lambda value: not isinstance(value, int) or -(1 << 63) <= value < 1 << 64)  # fmt: skip
TEXTS = st.text(st.sampled_from("ab\x1b\u202e\n"), max_size=2)
NAMES = st.sampled_from(["r1.0", "r1.1", "r2.0", "nobody.0", "\x1b.0"])


@pytest.fixture(autouse=True)
def every_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transposed_module, "MIN_GROUP", 1)


def wire(events: list[object]) -> bytes:
    return msgpack.packb([bytes(16), 5, "\x1bplan", 7, events])


def fields_of(kind: str, names: list[str]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.sampled_from(names), VALUES).map(lambda fields: {"type": kind, **fields})


WRITES = st.fixed_dictionaries({"sequence_id": NAMES, "start": st.integers(0, 9), "stop": st.integers(0, 9)})
TOKENS = st.fixed_dictionaries(
    {"sequence_id": NAMES, "token_ids": st.lists(st.integers(0, 3), max_size=2), "pieces": st.lists(TEXTS, max_size=2)},
    optional={"text": TEXTS, "score": st.none() | st.floats(-1, 0)},
)
EVENTS = st.one_of(
    WRITES.map(lambda fields: {"type": "slots_written", **fields}),
    TOKENS.map(lambda fields: {"type": "tokens_generated", **fields}),
    fields_of("slots_written", ["sequence_id", "start", "stop", "later"]),
    fields_of("of_tomorrow", ["a", "b"]),
    fields_of("engine_paused", ["reason"]),
    fields_of("engine_resumed", ["of_tomorrow"]),
)


@given(st.lists(EVENTS, max_size=12), st.booleans(), st.integers(1, 3))
@SAME_FIXTURE
def test_it_says_what_the_wire_says(events: list[object], printable: bool, min_group: int) -> None:
    """Unknown kinds, missing fields and values of the wrong type are refused one by one, as on the wire."""
    transposed_module.MIN_GROUP = min_group
    payload = wire(events)
    data = transpose(payload)
    if data is None:
        assert min_group > 1 or not any(len(event) > 1 for event in events)  # without fields there are no columns
        return
    read = read_transposed(data, printable=printable)
    assert (read.batch(), read.num_refused_events) == tuple(decode_batch(payload, printable=printable))
    assert peek_transposed(data) == (5, 7, len(events))


def test_text_beside_the_groups_is_made_printable_too() -> None:
    transposed_module.MIN_GROUP = 2
    data = transpose(wire([{"type": "engine_paused", "reason": "\x1b"}, *[{"type": "step_completed", "n": 1}] * 2]))
    assert data is not None
    read = read_transposed(data, printable=True)
    assert read.batch().events == (ev.EnginePaused(reason="␛"),)
    assert (read.batch().phase, read.num_refused_events) == ("␛plan", 2)


def test_every_kind_of_event(samples: tuple[Event, ...]) -> None:
    """All but full states; each twice, so that there are columns."""
    batch = Batch(epoch=bytes(16), step=5, phase="plan", time_ns=7, events=(*samples[:-1], *samples[:-1]))
    data = transpose(encode_batch(batch))
    assert data is not None
    assert read_transposed(data).batch() == batch
    whole = msgspec.structs.replace(batch, events=samples)
    assert transpose(encode_batch(whole)) is None


@given(st.integers(0, 1 << 32))
@settings(parent=SAME_FIXTURE, max_examples=40)
def test_spoiled_bytes_are_refused_or_read(samples: tuple[Event, ...], seed: int) -> None:
    rng = random.Random(seed)
    events = tuple(rng.choices(samples[:-1], k=60))
    data = transpose(encode_batch(Batch(epoch=bytes(16), step=5, phase="plan", time_ns=7, events=events)))
    assert data is not None
    for _ in range(30):
        spoiled = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        spoiled = spoiled[: rng.choice((len(spoiled), rng.randrange(len(spoiled))))]
        try:
            read = read_transposed(bytes(spoiled), printable=True)
        except DecodeError:
            continue
        assert len(read.batch().events) + read.num_refused_events == peek_transposed(bytes(spoiled))[2]


def parts(order: bytes, groups: list[object], rest: tuple[object, ...] = (), step: int = 5) -> bytes:
    return msgpack.packb([bytes(16), step, "plan", 7, order, groups, rest])


PAUSED = "engine_paused"


@pytest.mark.parametrize(
    "data",
    {
        "a group that is not there": parts(b"\x00\x01", [[PAUSED, ["reason"], [[1, "x", 1]]]]),
        "too few events beside": parts(b"\xff\xff", [], ({"type": PAUSED},)),
        "too few values": parts(b"\x00\x00", [[PAUSED, ["reason"], [[0, ["x"]]]]]),
        "another number of events": parts(b"\x00\x00", [[PAUSED, ["reason"], [[1, "x", 1 << 60]]]]),
        "as a column that comes later": parts(b"\x00", [[PAUSED, ["reason"], [[2, 0]]]]),
        "as one before the first": parts(b"\x00\x00", [[PAUSED, ["reason", "b"], [[1, "x", 2], [2, -1]]]]),
        "lists in lists in lists": parts(b"\x00", [[PAUSED, ["reason"], [[3, [3, [3, [0, [1]]]]]]]]),
        "a sum of texts": parts(b"\x00", [[PAUSED, ["reason", "b"], [[1, "x", 1], [4, 0, 1]]]]),
        "steps of texts": parts(b"\x00", [[PAUSED, ["reason"], [[5, "U", b"xxxx"]]]]),
        "half a number": parts(b"\x00", [[PAUSED, ["reason"], [[5, "h", b"x"]]]]),
        "numbers of two types": parts(b"\x00", [[PAUSED, ["reason"], [[5, "bh", b"x"]]]]),
        "no such code": parts(b"\x00", [[PAUSED, ["reason"], [[9, 1]]]]),
        "names without columns": parts(b"\x00", [[PAUSED, ["reason"], []]]),
        "no name": parts(b"\x00", [[PAUSED, [], []]]),
        "too many values": parts(bytes(90_000), [["x", ["f"] * 20, [[1, 0, 90_000]] * 20]]),
        "a kilobyte that means a gigabyte": parts(bytes(1100), [[PAUSED, ["reason"], [[1, "x" * 1000, 1100]]]]),
        "the same again and again": parts(
            bytes(range(200)), [[PAUSED, ["reason"], [[0, ["x" * 6000]]]], *[[PAUSED, ["reason"], [[2, 0]]]] * 199]
        ),
        "a list again": parts(b"\x00", [["x", ["a", "b"], [[0, [["x"]]], [2, 0]]]]),
        "too large": parts(b"", [], ({"type": PAUSED, "reason": "x" * (1 << 20)},)),
        "no batch": b"\x93\x01\x02\x03",
        "half a batch": parts(b"\x00", [])[:9],
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_what_is_no_transposed_batch(data: tuple[str, bytes]) -> None:
    with pytest.raises(DecodeError):
        read_transposed(data[1])


def test_a_column_says_it_shortly() -> None:
    """One step of many sequences takes little more than its positions."""
    names = [f"r{number}.0" for number in range(100)]
    events = [
        {"type": "slots_written", "sequence_id": name, "start": 7 * i, "stop": 7 * i + 1}
        for i, name in enumerate(names)
    ]
    events += [
        {"type": "tokens_generated", "sequence_id": name, "token_ids": [3], "pieces": ["a"], "text": "a", "score": None}
        for name in names
    ]
    data = transpose(wire(events))
    assert data is not None
    [_, _, _, _, _, [[_, _, [_, start, stop]], [_, _, tokens]], rest] = msgpack.unpackb(data)
    assert start == [5, "h", b"".join((7 * i - 5).to_bytes(2, "little", signed=True) for i in range(100))]
    assert stop == [4, 1, 1]
    assert tokens == [[2, 0], [3, [1, 3, 100]], [3, [1, "a", 100]], [1, "a", 100], [1, None, 100]]
    assert rest == []
