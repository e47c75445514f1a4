"""The part of the fold that moves blocks: who points at them, and what is written in them."""

from collections.abc import Callable
from typing import Any

from kvscope.events import types as ev
from kvscope.events.state import EngineState, FoldError, SequenceState
from kvscope.events.types import Event

Handler = Callable[[EngineState, Any], None]


def _blocks_allocated(state: EngineState, event: ev.BlocksAllocated) -> None:
    sequence = state.sequence(event.sequence_id)
    table = sequence.block_table
    if sequence.num_released + len(table) != event.first_logical_block:
        raise FoldError(
            f"{event.sequence_id} ends before L{sequence.num_released + len(table)}, the event continues at "
            f"L{event.first_logical_block}"
        )
    refs, written = state.ref_counts, state.written_slots
    for block_id in event.block_ids:
        _check_block(state, block_id)
        refs[block_id] += 1
        written[block_id] = 0
        refs.touched[block_id] = written.touched[block_id] = 1
        if state.traces:
            state.traces.hand_out(block_id)
    table.extend(event.block_ids)


def _hold(state: EngineState, event: ev.BlocksShared | ev.BlocksReused) -> SequenceState:
    """A sequence without blocks comes to hold blocks that others hold, or that are cached."""
    sequence = state.sequence(event.sequence_id)
    if sequence.block_table:
        raise FoldError(f"{event.sequence_id} already holds blocks")
    for block_id in event.block_ids:
        _check_block(state, block_id)
        state.ref_counts[block_id] += 1
        state.ref_counts.touched[block_id] = 1
    sequence.block_table = list(event.block_ids)
    return sequence


def _blocks_shared(state: EngineState, event: ev.BlocksShared) -> None:
    sequence, parent = _hold(state, event), state.sequence(event.from_sequence_id)
    sequence.num_written, sequence.num_released = parent.num_written, parent.num_released


def _block_copied(state: EngineState, event: ev.BlockCopied) -> None:
    sequence = state.sequence(event.sequence_id)
    _check_block(state, event.source_block)
    _check_block(state, event.target_block)
    place = event.logical_block - sequence.num_released
    if not 0 <= place < len(sequence.block_table):
        raise FoldError(f"{event.sequence_id} has no logical block L{event.logical_block}")
    sequence.block_table[place] = event.target_block
    sequence.num_copies += 1
    refs, written = state.ref_counts, state.written_slots
    refs[event.source_block] -= 1
    refs[event.target_block] += 1
    written[event.target_block] = event.num_slots
    refs.touched[event.source_block] = refs.touched[event.target_block] = written.touched[event.target_block] = 1
    if traces := state.traces:
        traces.hand_out(event.target_block)
        traces.writes[event.target_block] = traces.stamp(state.step)
    state.counters.copies += 1


def _slots_written(state: EngineState, event: ev.SlotsWritten) -> None:
    _, sequence = state.find(event.sequence_id)
    block_size, written = _block_size(state), state.written_slots
    held = sequence.num_released * block_size  # from here on there are blocks
    start, stop = event.start - held, event.stop - held
    if not 0 <= start <= stop <= len(sequence.block_table) * block_size:
        raise FoldError(f"{event.sequence_id} holds no block for positions {event.start}:{event.stop}")
    if start == stop:
        return
    if stop - start == 1:  # a token that was generated: most writes
        place, slot = divmod(start, block_size)
        block_id = sequence.block_table[place]
        written[block_id], written.touched[block_id] = slot + 1, 1
        sequence.num_written = event.stop
        if traces := state.traces:
            traces.writes[block_id] = traces.stamp(state.step)
        return
    for place in range(start // block_size, (stop - 1) // block_size + 1):
        block_id = sequence.block_table[place]
        written[block_id], written.touched[block_id] = min(stop - place * block_size, block_size), 1
        if traces := state.traces:
            traces.writes[block_id] = traces.stamp(state.step)
    sequence.num_written = event.stop


def _blocks_swapped_out(state: EngineState, event: ev.BlocksSwappedOut) -> None:
    sequence = state.sequence(event.sequence_id)
    _release(state, event.block_ids, event.cached_block_ids)
    counts = _count_host(state, event.host_block_ids, 1)
    state.counters.blocks_swapped_out += sum(counts[block_id] == 1 for block_id in event.host_block_ids)
    sequence.block_table, sequence.host_table = [], list(event.host_block_ids)


def _blocks_swapped_in(state: EngineState, event: ev.BlocksSwappedIn) -> None:
    sequence, block_size = state.sequence(event.sequence_id), _block_size(state)
    if sequence.block_table:
        raise FoldError(f"{event.sequence_id} already holds blocks")
    _count_host(state, event.host_block_ids, -1)
    refs, written = state.ref_counts, state.written_slots
    for logical, block_id in enumerate(event.block_ids, sequence.num_released):
        _check_block(state, block_id)
        state.counters.blocks_swapped_in += refs[block_id] == 0
        refs[block_id] += 1
        written[block_id] = min(max(sequence.num_written - logical * block_size, 0), block_size)
        refs.touched[block_id] = written.touched[block_id] = 1
        if traces := state.traces:
            traces.hand_out(block_id)
            traces.writes[block_id] = traces.stamp(state.step)
    sequence.block_table, sequence.host_table = list(event.block_ids), []


def _host_blocks_released(state: EngineState, event: ev.HostBlocksReleased) -> None:
    sequence = state.sequence(event.sequence_id)
    _count_host(state, event.host_block_ids, -1)
    sequence.host_table, sequence.num_written, sequence.num_released = [], 0, 0


def _count_host(state: EngineState, host_block_ids: list[int], change: int) -> list[int]:
    counts = state.host_ref_counts.copy()
    for block_id in host_block_ids:
        if not 0 <= block_id < len(counts):
            raise FoldError(f"host block {block_id} is outside the pool of {len(counts)}")
        counts[block_id] += change
    state.host_ref_counts = counts
    return counts


def _blocks_released(state: EngineState, event: ev.BlocksReleased) -> None:
    sequence = state.sequence(event.sequence_id)
    _release(state, event.block_ids, event.cached_block_ids)
    sequence.block_table = []
    sequence.num_written = sequence.num_released = 0


def _blocks_out_of_window(state: EngineState, event: ev.BlocksOutOfWindow) -> None:
    """A new table: it has changed at its beginning, and whoever keeps the old one sees that it is another."""
    sequence, count = state.sequence(event.sequence_id), len(event.block_ids)
    if sequence.num_released != event.first_logical_block or sequence.block_table[:count] != event.block_ids:
        raise FoldError(f"{event.sequence_id} does not begin with {event.block_ids} at L{event.first_logical_block}")
    _release(state, event.block_ids, event.cached_block_ids)
    sequence.block_table = sequence.block_table[count:]
    sequence.num_released += count


def _release(state: EngineState, block_ids: list[int], cached_block_ids: list[int]) -> None:
    cached, refs, written = frozenset(cached_block_ids), state.ref_counts, state.written_slots
    for block_id in block_ids:
        _check_block(state, block_id)
        refs[block_id] -= 1
        refs.touched[block_id] = 1
        if refs[block_id] == 0 and block_id not in cached:
            written[block_id], written.touched[block_id] = 0, 1


def _blocks_reused(state: EngineState, event: ev.BlocksReused) -> None:
    _hold(state, event).num_written = event.num_tokens
    if traces := state.traces:
        for block_id in event.block_ids:
            traces.hits[block_id] += 1


def _blocks_evicted(state: EngineState, event: ev.BlocksEvicted) -> None:
    for block_id in event.block_ids:
        _check_block(state, block_id)
        state.written_slots[block_id], state.written_slots.touched[block_id] = 0, 1
    state.counters.evictions += len(event.block_ids)


def _check_block(state: EngineState, block_id: int) -> None:
    if not 0 <= block_id < len(state.ref_counts):
        raise FoldError(f"block {block_id} is outside the pool of {len(state.ref_counts)}")


def _block_size(state: EngineState) -> int:
    if state.info is None:
        raise FoldError("the engine has not been announced")
    return state.info.block_size


BLOCK_HANDLERS: dict[type[Event], Handler] = {
    ev.BlocksAllocated: _blocks_allocated,
    ev.BlocksShared: _blocks_shared,
    ev.BlockCopied: _block_copied,
    ev.SlotsWritten: _slots_written,
    ev.BlocksReleased: _blocks_released,
    ev.BlocksOutOfWindow: _blocks_out_of_window,
    ev.BlocksSwappedOut: _blocks_swapped_out,
    ev.BlocksSwappedIn: _blocks_swapped_in,
    ev.HostBlocksReleased: _host_blocks_released,
    ev.BlocksReused: _blocks_reused,
    ev.BlocksEvicted: _blocks_evicted,
}
