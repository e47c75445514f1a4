"""Batches straight from bytes to structs, for what almost every payload is: small, whole, and of known kinds.

Anything else gives None, and the careful decoder says what it is. What both decode is equal; this one alone does not
mind broken text in fields that nobody reads.
"""

from functools import reduce
from itertools import chain
from operator import attrgetter, or_
from typing import Any, NamedTuple

import msgspec

from kvscope.events.state import FullState
from kvscope.events.text import make_printable, printable_strings
from kvscope.events.types import Batch, Count, Event

MAX_BYTES = 1 << 20  # a payload of that size holds few enough values by itself

_PLAIN = tuple(cls for cls in Event.__subclasses__() if cls is not FullState)
AnyPlain: Any = reduce(or_, _PLAIN)
_decoder = msgspec.msgpack.Decoder(tuple[bytes, Count, str, Count, list[AnyPlain]])


class _Texts(NamedTuple):
    """Names of the fields of one kind of event that are a string, and of those that are a list of them."""

    single: tuple[str, ...]
    several: tuple[str, ...]


def _text_fields(event_class: type[Event]) -> _Texts | None:
    """None: text may lie deeper."""
    single, several = [], []
    for field in msgspec.structs.fields(event_class):
        if field.type in (str, str | None):
            single.append(field.name)
        elif field.type == list[str]:
            several.append(field.name)
        elif "str" in repr(field.type) or _is_struct(field.type):
            return None
    return _Texts(tuple(single), tuple(several))


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


_TEXTS = {event_class: _text_fields(event_class) for event_class in _PLAIN}


def decode_plain(payload: bytes, *, printable: bool) -> Batch | None:
    """The batch, if nothing about it is out of the ordinary."""
    if len(payload) > MAX_BYTES:
        return None
    try:
        epoch, step, phase, time_ns, events = _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if printable:
        phase = make_printable(phase)
        events = printable_events(events)
    return Batch(epoch=epoch, step=step, phase=phase, time_ns=time_ns, events=tuple(events))


def printable_events(events: list[Event]) -> list[Event]:
    """The same, with changes where some text needs one. Kind by kind: almost always none does."""
    groups: dict[type[Event], list[Event]] = {}
    for event in events:
        kind = type(event)
        if kind in groups:
            groups[kind].append(event)
        else:
            groups[kind] = [event]
    unclean = {kind for kind, group in groups.items() if not _are_clean(group, _TEXTS[kind])}
    return [_clean(event, _TEXTS[type(event)]) if type(event) in unclean else event for event in events]


def _are_clean(group: list[Event], texts: _Texts | None) -> bool:
    if texts is None:
        # As JSON, where what is not plain is escaped or not ASCII; quotes are escaped too, and looked at one by one.
        whole = msgspec.json.encode(group)
        return whole.isascii() and b"\\" not in whole and b"\x7f" not in whole
    single = ["".join(filter(None, map(attrgetter(name), group))) for name in texts.single]
    several = ["".join(chain.from_iterable(map(attrgetter(name), group))) for name in texts.several]
    return all(text.isascii() and text.isprintable() for text in (*single, *several))


def _clean(event: Event, texts: _Texts | None) -> Event:
    if texts is None:
        return msgspec.convert(printable_strings(msgspec.to_builtins(event)), type(event))
    values: dict[str, Any] = {name: [make_printable(text) for text in getattr(event, name)] for name in texts.several}
    for name in texts.single:
        text = getattr(event, name)
        values[name] = None if text is None else make_printable(text)
    return msgspec.structs.replace(event, **values)
