"""Which events a reader looks for: the moments in which memory was short, shared apart, or wrong."""

from enum import IntEnum

from kvscope.events import types as ev
from kvscope.events.types import Batch, Event


class Notable(IntEnum):
    """Why a moment stands out; the higher one wins where several fall together."""

    COPY = 1
    EVICTION = 2
    PREEMPTION = 3
    REFUSAL = 4
    DROP = 5
    FINDING = 6
    BOOKMARK = 7  # no event: somebody has marked the moment


_KINDS: dict[type[Event], Notable] = {
    ev.BlockCopied: Notable.COPY,
    ev.BlocksEvicted: Notable.EVICTION,
    ev.RequestPreempted: Notable.PREEMPTION,
    ev.RequestRefused: Notable.REFUSAL,
    ev.BatchesDropped: Notable.DROP,
    ev.AuditFinding: Notable.FINDING,
}
_TYPES = frozenset(_KINDS)

BREAKPOINTS: dict[str, type[Event]] = {
    "copy-on-write": ev.BlockCopied,
    "preemption": ev.RequestPreempted,
    "eviction": ev.BlocksEvicted,
    "refusal": ev.RequestRefused,
    "audit finding": ev.AuditFinding,
}  # what an engine can be told to pause at


def notable(event: Event) -> Notable | None:
    """Why this event stands out; None for the ordinary ones."""
    return _KINDS.get(type(event))


def notable_places(batch: Batch) -> list[int]:
    """Indices of the notable events of a batch."""
    if _TYPES.isdisjoint(map(type, batch.events)):
        return []
    return [index for index, event in enumerate(batch.events) if type(event) in _TYPES]


def most_notable(batch: Batch) -> int:
    """The highest `Notable` in the batch, 0 if there is none."""
    return max((_KINDS.get(kind, 0) for kind in set(map(type, batch.events))), default=0)
