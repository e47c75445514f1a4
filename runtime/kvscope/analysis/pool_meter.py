"""Counts a pool's blocks by what they are, at the cost of the blocks an event touches and not of the whole pool."""

from collections.abc import Iterable
from typing import NamedTuple

from kvscope.analysis.walk import Observer
from kvscope.events import types as ev
from kvscope.events.state import EngineState
from kvscope.events.types import Event

_TOUCHING = frozenset(
    {
        ev.BlocksAllocated,
        ev.BlocksShared,
        ev.BlocksReused,
        ev.BlocksEvicted,
        ev.BlocksReleased,
        ev.BlocksOutOfWindow,
        ev.BlocksSwappedOut,
        ev.BlocksSwappedIn,
        ev.BlockCopied,
        ev.SlotsWritten,
    }
)


class PoolFigures(NamedTuple):
    """The pool at one moment. Free + held + cached = all blocks; shared and what follows concern held blocks."""

    free: int = 0
    held: int = 0
    cached: int = 0
    shared: int = 0  # blocks with ref count > 1
    saved: int = 0  # blocks that would be needed besides, if nothing were shared
    unwritten_slots: int = 0  # reserved, no KV yet


class PoolMeter(Observer):
    """`figures` are those of the state last seen; exact after every event, however broken the stream."""

    def __init__(self) -> None:
        self.figures = PoolFigures()
        self._touched: list[int] = []
        self._before: PoolFigures | None = None  # of the touched blocks, before the event

    def on_state(self, state: EngineState) -> None:
        self.figures = _figures(state, range(len(state.ref_counts)))

    def before_event(self, state: EngineState, event: Event) -> None:
        ids = _block_ids(state, event) if type(event) in _TOUCHING else ()
        self._touched = [b for b in (ids if len(ids) < 2 else set(ids)) if b < len(state.ref_counts)]
        self._before = _figures(state, self._touched) if self._touched else None

    def after_event(self, state: EngineState, event: Event) -> None:
        if isinstance(event, ev.EngineStarted):
            self.on_state(state)
        elif self._before is not None:
            after = _figures(state, self._touched)
            if after != self._before:
                changes = zip(self.figures, after, self._before, strict=True)
                self.figures = PoolFigures(*[total + new - old for total, new, old in changes])


def block_size_of(state: EngineState) -> int:
    return state.info.block_size if state.info is not None else 0


def _figures(state: EngineState, block_ids: Iterable[int]) -> PoolFigures:
    """Figures of some of the blocks; a faulty stream may have taken a ref count below 0, which is free."""
    free = held = cached = shared = saved = unwritten = 0
    block_size = block_size_of(state)
    for block_id in block_ids:
        refs, written = state.ref_counts[block_id], state.written_slots[block_id]
        if refs > 0:
            held += 1
            shared += refs > 1
            saved += refs - 1
            unwritten += block_size - written
        elif written:
            cached += 1
        else:
            free += 1
    return PoolFigures(free, held, cached, shared, saved, unwritten)


def _block_ids(state: EngineState, event: Event) -> list[int]:
    """Every block whose ref count or written slots the event can change."""
    match event:
        case (
            ev.BlocksAllocated(block_ids=ids)
            | ev.BlocksShared(block_ids=ids)
            | ev.BlocksReused(block_ids=ids)
            | ev.BlocksEvicted(block_ids=ids)
            | ev.BlocksReleased(block_ids=ids)
            | ev.BlocksOutOfWindow(block_ids=ids)
            | ev.BlocksSwappedOut(block_ids=ids)
            | ev.BlocksSwappedIn(block_ids=ids)
        ):
            return ids
        case ev.BlockCopied():
            return [event.source_block, event.target_block]
        case ev.SlotsWritten():
            block_size = block_size_of(state) or 1
            sequence = state.sequence(event.sequence_id)
            return sequence.blocks(event.start // block_size, (event.stop - 1) // block_size + 1)
    return []
