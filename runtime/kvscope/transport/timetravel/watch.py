"""Reverse watchpoints: which events a look back stops at. Pure."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvscope.events import types as ev
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Event

Matches = Callable[[Event], bool]


class Watch(NamedTuple):
    """What a look back stops at: a batch whose bytes hold none of `needles` has no such event, and is not decoded."""

    matches: Matches
    needles: tuple[bytes, ...] = ()  # none: every batch may have one


def changes_block(block_id: int, state: EngineState) -> Watch:
    """Events that change who points at a block, or what is written in it.

    For a look back from `state`. Writes name a sequence, not a block; but back to the last change of a table, which
    stops the look, the block's holders are those of `state`.
    """
    block_size = state.info.block_size if state.info is not None else 1
    first_positions = {name: logical * block_size for name, logical in state.holders(block_id)}

    def matches(event: Event) -> bool:
        if isinstance(event, ev.SlotsWritten):
            first = first_positions.get(event.sequence_id)
            return first is not None and event.start < first + block_size and event.stop > first
        if isinstance(event, ev.BlockCopied):
            return block_id in (event.source_block, event.target_block)
        if isinstance(event, ev.EngineStarted | FullState):
            return True
        return block_id in getattr(event, "block_ids", ())

    return Watch(matches, _needles(block_id, "engine_started", "full_state", *first_positions))


def lets_go_of(block_id: int) -> Watch:
    """Events in which somebody stopped pointing at a block: who held it before."""

    def matches(event: Event) -> bool:
        if isinstance(event, ev.BlockCopied):
            return event.source_block == block_id
        if isinstance(event, ev.BlocksReleased | ev.BlocksOutOfWindow | ev.BlocksSwappedOut):
            return block_id in event.block_ids
        return False

    return Watch(matches, _needles(block_id))


def admits(request_id: str) -> Watch:
    return _about(request_id, ev.RequestAdmitted)


def preempts(request_id: str) -> Watch:
    return _about(request_id, ev.RequestPreempted)


def _about(request_id: str, kind: type[ev.RequestAdmitted | ev.RequestPreempted]) -> Watch:
    return Watch(
        lambda event: isinstance(event, kind) and event.request_id == request_id,
        _needles(request_id),
    )


def _needles(*values: int | str) -> tuple[bytes, ...]:
    """As they are written; none where a text may have been made printable: it is another one in the file then."""
    if any(isinstance(value, str) and not value.isascii() for value in values):
        return ()
    return tuple(msgspec.msgpack.encode(value) for value in values)
