"""Which events a reader looks for: the moments in which memory was short, shared apart, or wrong."""

from enum import IntEnum

from kvscope.events import types as ev
from kvscope.events.types import Batch, Event


class Notable(IntEnum):
    """Why a moment stands out. The numbers are in recordings; `standing` says which one wins over which."""

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
# An eviction is everyday work of a full prefix cache: it must not hide the copies.
_STANDING = (0, Notable.EVICTION, Notable.COPY, *(kind for kind in Notable if kind > Notable.EVICTION))

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


def standing(kind: int) -> int:
    """The place of a `Notable`, or of 0 for none, among all: where several fall together, the highest is shown."""
    return _STANDING.index(kind)


def most_notable(batch: Batch) -> int:
    """The `Notable` of the highest standing in the batch, 0 if there is none."""
    return max((_KINDS.get(kind, 0) for kind in set(map(type, batch.events))), default=0, key=standing)
