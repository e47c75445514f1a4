"""What the prefix cache did not give, found in a log: near misses, and evictions that were regretted. Pure."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvscope.events import types as ev
from kvscope.events.types import Event

REGRET_WINDOW_NS = 60_000_000_000


class Told(Protocol):
    """An event with its moment; a log's entry is one."""

    @property
    def step(self) -> int: ...
    @property
    def time_ns(self) -> int: ...
    @property
    def event(self) -> Event: ...


class NearMiss(NamedTuple):
    """At its admission a request had `num_common` tokens in common with a cached block, and a block is longer."""

    step: int
    request_id: str
    num_common: int
    num_hit: int
    num_tokens: int


class Regret(NamedTuple):
    """A block was evicted and wanted again `elapsed_ns` later."""

    step: int
    request_id: str
    evicted_at_step: int
    evicted_for: str
    elapsed_ns: int


def find_near_misses(log: Iterable[Told]) -> list[NearMiss]:
    """In the order of the log."""
    return [
        NearMiss(entry.step, event.request_id, event.num_common_tokens, event.num_hit_tokens, event.num_tokens)
        for entry in log
        if isinstance(event := entry.event, ev.PrefixLookup) and event.miss == "shorter_than_block"
    ]


def find_regrets(log: Iterable[Told], window_ns: int = REGRET_WINDOW_NS) -> list[Regret]:
    """Evictions whose block was looked up again within the window; those that the log still holds."""
    evicted_at: dict[tuple[int, str], int] = {}
    regrets = []
    for entry in log:
        event = entry.event
        if isinstance(event, ev.BlocksEvicted):
            evicted_at[entry.step, event.for_sequence_id] = entry.time_ns
        elif isinstance(event, ev.PrefixLookup) and event.miss == "evicted":
            step, culprit = event.evicted_at_step, event.evicted_for
            if step is None or culprit is None or (step, culprit) not in evicted_at:
                continue
            elapsed_ns = entry.time_ns - evicted_at[step, culprit]
            if elapsed_ns <= window_ns:
                regrets.append(Regret(entry.step, event.request_id, step, culprit, elapsed_ns))
    return regrets
