"""Batches straight from bytes to structs, for what almost every payload is: small, whole, and of known kinds.

Anything else gives None, and the careful decoder says what it is. What both decode is equal; this one alone does not
mind broken text in fields that nobody reads.
"""

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from kvscope.events.state import FullState
from kvscope.events.text import make_printable, printable_strings
from kvscope.events.types import Batch, Count, Event

MAX_BYTES = 1 << 20  # a payload of that size holds few enough values by itself

_PLAIN = tuple(cls for cls in Event.__subclasses__() if cls is not FullState)
_AnyPlain: Any = reduce(or_, _PLAIN)
_decoder = msgspec.msgpack.Decoder(tuple[bytes, Count, str, Count, list[_AnyPlain]])


def _text_fields(event_class: type[Event]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Names of its fields that are a string, and that are a list of them; None: text may lie deeper."""
    single, several = [], []
    for field in msgspec.structs.fields(event_class):
        if field.type in (str, str | None):
            single.append(field.name)
        elif field.type == list[str]:
            several.append(field.name)
        elif "str" in repr(field.type) or _is_struct(field.type):
            return None
    return tuple(single), tuple(several)


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
        for index, event in enumerate(events):
            texts = _TEXTS[type(event)]
            if texts is None:
                fields = printable_strings(msgspec.to_builtins(event))
                events[index] = msgspec.convert(fields, type(event))
            elif not _is_clean(event, texts):
                events[index] = _clean(event, texts)
    return Batch(epoch=epoch, step=step, phase=phase, time_ns=time_ns, events=tuple(events))


def _is_clean(event: Event, texts: tuple[tuple[str, ...], tuple[str, ...]]) -> bool:
    for name in texts[0]:
        text = getattr(event, name)
        if text is not None and not (text.isascii() and text.isprintable()):
            return False
    return all(text.isascii() and text.isprintable() for name in texts[1] for text in getattr(event, name))


def _clean(event: Event, texts: tuple[tuple[str, ...], tuple[str, ...]]) -> Event:
    values: dict[str, Any] = {name: [make_printable(text) for text in getattr(event, name)] for name in texts[1]}
    for name in texts[0]:
        text = getattr(event, name)
        values[name] = None if text is None else make_printable(text)
    return msgspec.structs.replace(event, **values)
