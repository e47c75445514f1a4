"""What `/` understands: words that must all occur, and `kind:copy block:P3 request:r1 state:waiting`. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvscope.dashboard.copies import RequestFrame
from kvscope.events.codec import EVENT_CLASSES
from kvscope.events.types import Event
from kvscope.transport.source import LogEntry

FIELDS = ("kind", "block", "request", "state")
HINT = "words, or kind:copy block:3 request:r1 state:waiting"
SORTS = ("state", "newest", "blocks", "tokens", "first token")


# What people call them, beside the names on the wire.
_ALSO = {"block_copied": "copy cow copy-on-write", "blocks_evicted": "eviction", "request_preempted": "preemption"}
_ALSO |= {"request_refused": "refusal", "blocks_shared": "sharing", "blocks_allocated": "allocation"}
KINDS = {name: f"{name} {_ALSO.get(name, '')}" for name in EVENT_CLASSES}


class FilterError(ValueError):
    """A word that cannot be meant so; one line that names it."""


class Query(NamedTuple):
    """All of it must hold; empty, everything passes."""

    words: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    requests: tuple[str, ...] = ()
    states: tuple[str, ...] = ()


EVERYTHING = Query()


def parse_query(text: str) -> Query:
    """Raises FilterError for a field or a kind of event that does not exist, or a block that is no number."""
    found: dict[str, list[str]] = {name: [] for name in ("word", *FIELDS)}
    for word in text.casefold().split():
        field, colon, value = word.partition(":")
        if colon and field.isalpha() and field not in FIELDS:
            raise FilterError(f"no filter is called {field}: {HINT}")
        if field in FIELDS and colon:
            if value:
                found[field].append(value)
        else:
            found["word"].append(word)
    blocks = tuple(_block_id(value) for value in found["block"])
    kinds, requests, states = (tuple(found[name]) for name in ("kind", "request", "state"))
    for kind in kinds:
        if not any(kind in names for names in KINDS.values()):
            raise FilterError(f"no event is called {kind}; some are: copy eviction preemption allocated written token")
    return Query(tuple(found["word"]), kinds, blocks, requests, states)


def _block_id(value: str) -> int:
    digits = value.removeprefix("p")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 9:
        raise FilterError(f"block:{value} is no block: {HINT}")
    return int(digits)


def filter_log(log: Sequence[LogEntry], query: Query) -> Sequence[LogEntry]:
    """The entries that pass; the very log when all do."""
    return log if query == EVERYTHING else tuple(entry for entry in log if passes_event(entry, query))


def passes_event(entry: LogEntry, query: Query) -> bool:
    """A kind is any part of what an event is called; a block is one that the event's own lists or sentence name."""
    sentence, kind = entry.sentence.casefold(), KINDS[kind_of(entry.event)]
    return (
        all(word in sentence for word in query.words)
        and all(name in kind for name in query.kinds)
        and all(block_id in blocks_of(entry) for block_id in query.blocks)
        and all(name in (request_of(entry.event) or "").casefold().split(".") for name in query.requests)
        and not query.states
    )


def kind_of(event: Event) -> str:
    return str(type(event).__struct_config__.tag)


def request_of(event: Event) -> str | None:
    """The request that an event is about, if it is about one."""
    name = getattr(event, "request_id", None)
    if name is None and (sequence := sequence_of(event)) is not None:
        name = sequence.rpartition(".")[0]
    return name


def sequence_of(event: Event) -> str | None:
    return getattr(event, "sequence_id", None) or getattr(event, "for_sequence_id", None)


def blocks_of(entry: LogEntry) -> list[int]:
    """The blocks that an event names; a write names them in its sentence only, as `P3` or `P3 P4`."""
    event = entry.event
    ids = [*getattr(event, "block_ids", ())]
    ids += [block for name in ("source_block", "target_block") if (block := getattr(event, name, None)) is not None]
    if not ids and kind_of(event) == "slots_written":
        words = entry.sentence.rpartition("(")[2].rstrip(")").split()
        ids = [int(word[1:]) for word in words if word[0] == "P" and word[1:].isdigit()]
    return ids


def filter_requests(requests: Iterable[RequestFrame], query: Query) -> list[RequestFrame]:
    return list(requests) if query == EVERYTHING else [each for each in requests if passes_request(each, query)]


def passes_request(request: RequestFrame, query: Query) -> bool:
    text = f"{request.request_id} {request.status} {request.prompt}".casefold()
    texts = [text, *(sequence.text.casefold() for sequence in request.sequences)]
    return (
        all(any(word in part for part in texts) for word in query.words)
        and all(name == request.request_id.casefold() for name in query.requests)
        and all(request.status.startswith(state) for state in query.states)
        and all(any(b in sequence.table for sequence in request.sequences) for b in query.blocks)
        and not query.kinds
    )


def sort_requests(requests: list[RequestFrame], order: str) -> list[RequestFrame]:
    """By one of `SORTS`; `state` is the order they come in."""
    match order:
        case "newest":
            return sorted(requests, key=lambda r: -r.submitted_ns)
        case "blocks":
            return sorted(requests, key=lambda r: -len({b for s in r.sequences for b in s.table}))
        case "tokens":
            return sorted(requests, key=lambda r: -sum(s.num_generated for s in r.sequences))
        case "first token":
            return sorted(requests, key=lambda r: -(r.first_token_wait_ns or 0))
    return requests
