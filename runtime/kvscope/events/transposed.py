"""A batch on its side: what events of one kind say, field by field, instead of event by event.

Recordings keep batches with many events of a kind like this: a third of the bytes, and quick to fold without an object
for every event. What is read from it is what the batch on the wire says. MessagePack:

    [epoch, step, phase, time_ns, order, groups, events]

    order    bytes: of every event the number of its group, or 255: it is the next one of `events`
    groups   [[type, [field, ...], [column, ...]], ...]; columns as in `column_codes`
    events   the others, as on the wire
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from kvscope.events.codec import EVENT_CLASSES, MAX_EVENTS_PER_BATCH, DecodeError, convert_event
from kvscope.events.column_codes import ColumnError, ColumnReader, ColumnWriter, Values, as_list
from kvscope.events.fast_decode import AnyPlain, printable_events
from kvscope.events.state import FullState
from kvscope.events.text import make_printable, printable_strings
from kvscope.events.types import Batch, Count, Event

MIN_GROUP = 16  # fewer events of a kind are as short, and as quick to read, as they are
MAX_TRANSPOSED_BYTES = 1 << 20  # holds few enough values by itself
MAX_CELLS = 1_000_000  # values of all columns together
NO_GROUP = 255
_FULL_STATE = FullState.__struct_config__.tag  # a batch with one of these is folded in a way of its own
_STEPPING_FIELD, _SUM_FIELD = "start", "stop"  # of a written slot: a sequence writes one in every step

_Group = tuple[str, list[str], list[list[Any]]]
_decoder = msgspec.msgpack.Decoder(tuple[bytes, Count, str, Count, bytes, list[_Group], list[AnyPlain]])
_careful_decoder = msgspec.msgpack.Decoder(tuple[bytes, Count, str, Count, bytes, list[_Group], list[Any]])
_header_decoder = msgspec.msgpack.Decoder(tuple[bytes, Count, str, Count, bytes, msgspec.Raw, msgspec.Raw])
_wire_decoder = msgspec.msgpack.Decoder(tuple[bytes, Count, str, Count, list[dict[str, Any]]])


def transpose(payload: bytes) -> bytes | None:
    """The same batch, from what is on the wire; None where that form is as good, or the only one."""
    if len(payload) > MAX_TRANSPOSED_BYTES:
        return None
    try:
        epoch, step, phase, time_ns, events = _wire_decoder.decode(payload)
        keys = [(event["type"], *event) for event in events]
    except (msgspec.MsgspecError, KeyError, ValueError):
        return None
    counts = Counter(key for key in keys if len(key) > 2)  # there is something to say besides the kind
    numbers = {key: number for number, key in enumerate(key for key, count in counts.items() if count >= MIN_GROUP)}
    if not numbers or len(numbers) > NO_GROUP or any(kind == _FULL_STATE for kind, *_ in counts):
        return None
    writer, groups, order = ColumnWriter(step), list[_Group](), bytes(numbers.get(key, NO_GROUP) for key in keys)
    for number, (kind, *names) in enumerate(numbers):
        group = [event for event, member_of in zip(events, order, strict=True) if member_of == number]
        names.remove("type")
        columns = []
        for name in names:
            values = [event[name] for event in group]
            columns.append(writer.write(values, is_stepping=name == _STEPPING_FIELD, is_sum=name == _SUM_FIELD))
        groups.append((kind, names, columns))
    rest = [event for event, member_of in zip(events, order, strict=True) if member_of == NO_GROUP]
    transposed = msgspec.msgpack.encode((epoch, step, phase, time_ns, order, groups, rest))
    return transposed if len(transposed) <= MAX_TRANSPOSED_BYTES and _is_small(order, groups) else None


class EventColumns:
    """So many events of one kind: `fields[name][i]` is what event i says. Nothing in it may be changed."""

    def __init__(self, kind: type[Event], fields: dict[str, Values], count: int) -> None:
        self.kind, self.fields, self.count = kind, fields, count

    def event(self, place: int) -> Event:
        """One of them as an object."""
        return self.kind(**{name: as_list(values[place : place + 1])[0] for name, values in self.fields.items()})

    @cached_property
    def events(self) -> list[Event]:
        """The same as objects."""
        if not self.fields:
            return [self.kind() for _ in range(self.count)]
        kind, names = self.kind, tuple(self.fields)
        columns = map(as_list, self.fields.values())
        return [kind(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


class Transposed:
    """A batch as it was read: one with those events that are in no group, and the groups.

    Event i is the next one of group `order[i]`, or of the others where that is `NO_GROUP`.
    """

    def __init__(self, others: Batch, order: bytes, groups: list[EventColumns], num_refused_events: int) -> None:
        self.others, self.order, self.groups, self.num_refused_events = others, order, groups, num_refused_events

    def batch(self) -> Batch:
        """The same, event by event."""
        following = {number: iter(group.events) for number, group in enumerate(self.groups)}
        following[NO_GROUP] = iter(self.others.events)
        return msgspec.structs.replace(self.others, events=tuple([next(following[number]) for number in self.order]))


def read_transposed(data: bytes, *, printable: bool = False) -> Transposed:
    """Parse and validate it; events that do not validate are left out and counted, as `decode_batch` does.

    Raises:
        DecodeError: it is not what `transpose` makes.
    """
    if len(data) > MAX_TRANSPOSED_BYTES:
        raise DecodeError(f"{len(data)} bytes in one transposed batch; the limit is {MAX_TRANSPOSED_BYTES}")
    try:
        *header, order, groups, others = _decode(data)
        if not _is_small(order, groups) or not set(order) <= {*range(len(groups)), NO_GROUP}:
            raise ColumnError("too many events, or one of no group")
        if order.count(NO_GROUP) != len(others):
            raise ColumnError("not as many events as it says")
        reader = ColumnReader(header[1], _printable_column if printable else lambda values: values)
        read = [_read_group(reader, group, order.count(number)) for number, group in enumerate(groups)]
    except (msgspec.MsgspecError, ColumnError, ValueError, OverflowError, RecursionError) as error:
        raise DecodeError(f"not a transposed batch: {make_printable(str(error))}") from None
    refused = {number: group.refused for number, group in enumerate(read) if group.refused}
    if None in others:
        refused[NO_GROUP] = [event is None for event in others]
    kept, num_refused = _without(order, refused)
    plain = [event for event in others if event is not None]
    epoch, step, phase, time_ns = header
    if printable:
        phase, plain = make_printable(phase), printable_events(plain)
    batch = Batch(epoch=epoch, step=step, phase=phase, time_ns=time_ns, events=tuple(plain))
    return Transposed(batch, kept, [group.columns for group in read], num_refused)


def peek_transposed(data: bytes) -> tuple[int, int, int]:
    """Step, time and number of events, without decoding them. Raises DecodeError."""
    try:
        _, step, _, time_ns, order, _, _ = _header_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(f"not a transposed batch: {make_printable(str(error))}") from None
    return step, time_ns, len(order)


def _decode(data: bytes) -> Any:
    """The parts; None for each of `events` that is refused."""
    with suppress(msgspec.ValidationError):
        return _decoder.decode(data)
    *parts, events = _careful_decoder.decode(data)
    return *parts, [None if isinstance(event := convert_event(fields), FullState) else event for fields in events]


def _without(order: bytes, refused: dict[int, list[bool]]) -> tuple[bytes, int]:
    """The order of the events that are not refused, and how many are."""
    if not refused:
        return order, 0
    following = {number: iter(verdicts) for number, verdicts in refused.items()}
    kept = bytes(number for number in order if number not in following or not next(following[number]))
    return kept, len(order) - len(kept)


def _is_small(order: bytes, groups: list[_Group]) -> bool:
    num_cells = sum(order.count(number) * len(names) for number, (_, names, _) in enumerate(groups))
    return len(order) <= MAX_EVENTS_PER_BATCH and num_cells <= MAX_CELLS


class _Read(NamedTuple):
    """The events of one group that validate, and of each whether it does not; empty: all do."""

    columns: EventColumns
    refused: list[bool]


def _read_group(reader: ColumnReader, group: _Group, count: int) -> _Read:
    kind, names, written = group
    if len(names) != len(written) or not count or not names:
        raise ColumnError("not as many columns as names, or no event")
    fields = dict(zip(names, [reader.read(column, count) for column in written], strict=True))
    event_class = EVENT_CLASSES.get(kind)
    if event_class is None or event_class is FullState:
        return _Read(EventColumns(Event, {}, 0), [True] * count)
    with suppress(msgspec.ValidationError, OverflowError):
        types = _field_types(event_class)
        known = {name: reader.validated(fields[name], types[name]) for name in fields if name in types}
        if known.keys() >= _required(event_class):
            return _Read(EventColumns(event_class, known, count), [])
    return _one_by_one(event_class, fields, count)


def _one_by_one(event_class: type[Event], fields: dict[str, Values], count: int) -> _Read:
    kind, fields = event_class.__struct_config__.tag, {name: as_list(values) for name, values in fields.items()}
    events = [convert_event({"type": kind, **{name: fields[name][place] for name in fields}}) for place in range(count)]
    whole = [event for event in events if event is not None]
    names = [field.name for field in msgspec.structs.fields(event_class)]
    columns: dict[str, Values] = {name: [getattr(event, name) for event in whole] for name in names}
    return _Read(EventColumns(event_class, columns, len(whole)), [event is None for event in events])


@cache
def _field_types(event_class: type[Event]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(event_class)}


@cache
def _required(event_class: type[Event]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(event_class) if field.required)


def _printable_column(values: list[Any]) -> list[Any]:
    """The same values; others only where some text needs a change. Almost always none does."""
    kinds = set(map(type, values))
    if kinds <= {int, float, bool, type(None)}:
        return values
    if kinds == {str} and _is_plain(values):
        return values
    if kinds == {list}:
        inner = set(map(type, chain.from_iterable(values)))
        if inner <= {int} or (inner == {str} and _is_plain(chain.from_iterable(values))):
            return values
    cleaned: list[Any] = printable_strings(values)
    return cleaned


def _is_plain(texts: Iterable[str]) -> bool:
    text = "".join(texts)
    return text.isascii() and text.isprintable()
