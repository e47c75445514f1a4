"""Reverse watchpoints: which events a look back stops at. Pure."""

from collections.abc import Callable

from kvscope.events import types as ev
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Event

Matches = Callable[[Event], bool]


def changes_block(block_id: int, state: EngineState) -> Matches:
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

    return matches


def lets_go_of(block_id: int) -> Matches:
    """Events in which somebody stopped pointing at a block: who held it before."""

    def matches(event: Event) -> bool:
        if isinstance(event, ev.BlockCopied):
            return event.source_block == block_id
        return isinstance(event, ev.BlocksReleased) and block_id in event.block_ids

    return matches


def admits(request_id: str) -> Matches:
    return lambda event: isinstance(event, ev.RequestAdmitted) and event.request_id == request_id


def preempts(request_id: str) -> Matches:
    return lambda event: isinstance(event, ev.RequestPreempted) and event.request_id == request_id
