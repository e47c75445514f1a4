"""The auditor: checks the invariants of a paged pool over a stream of events.

It runs on whatever can be folded: the live stream, a recording, the events of a test. `check_event` looks at one
event against the state just before it; `check_state` looks at a whole state. Neither mutates.

    1  ref count = number of table entries; free + held + cached = pool
    2  only a free block is handed out; where the allocator is contiguous, a table is one run of blocks
    3  no write to a shared block; written positions are a prefix without holes; no needless copy
    4  what a layer will still read is not given up
    5  a reused block is fully written, and something is left to compute
    6  a copy preserves exactly the written slots
    7  an idle engine, and a sequence that has ended, hold nothing
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvscope.events import types as ev
from kvscope.events.fold import apply_event, begin_batch
from kvscope.events.state import EngineState, FoldError, SequenceState
from kvscope.events.types import Batch, Event

MAX_FINDINGS = 10_000
MAX_BLOCKS_CHECKED_EVERY_BATCH = 20_000
STEPS_BETWEEN_CHECKS = 64  # of larger ones; single events are always checked
BLOCKS_PER_STEP_BETWEEN_CHECKS = 2_000  # from 128,000 on a check costs the same per step


class Finding(NamedTuple):
    """One broken invariant. `rule` is its number above."""

    rule: int
    message: str
    step: int


def keep_first(findings: list[Finding], found: list[Finding]) -> None:
    """Add to `findings`, up to the limit: the first ones tell what went wrong, and a stream may bring them forever."""
    findings += found[: max(MAX_FINDINGS - len(findings), 0)]


class Auditor:
    """Folds a stream and collects what is wrong with it."""

    def __init__(self, state: EngineState | None = None) -> None:
        self.state = state if state is not None else EngineState()
        self.findings: list[Finding] = []
        self._standing: list[Finding] = []  # what is wrong with the state now; told once

    def observe(self, batch: Batch) -> list[Finding]:
        """Check and fold one batch; the new findings are returned and kept.

        Raises:
            FoldError: the batch cannot be applied at all.
        """
        begin_batch(self.state, batch)
        found = [finding for event in batch.events for finding in self.observe_event(event)]
        return found + self.finish_batch()

    def observe_event(self, event: Event) -> list[Finding]:
        """Check and fold one event of a batch whose header has been applied with `begin_batch`."""
        found = check_event(self.state, event)
        self.state = apply_event(self.state, event)
        if found:
            keep_first(self.findings, found)
        return found

    def finish_batch(self) -> list[Finding]:
        """Check the whole state, once the batch's last event is folded; the larger a pool, the more seldom."""
        num_blocks = len(self.state.ref_counts)
        interval = max(num_blocks // BLOCKS_PER_STEP_BETWEEN_CHECKS, STEPS_BETWEEN_CHECKS)
        if num_blocks > MAX_BLOCKS_CHECKED_EVERY_BATCH and self.state.step % interval:
            return []
        standing = check_state(self.state)
        told = {(finding.rule, finding.message) for finding in self._standing}
        found = [finding for finding in standing if (finding.rule, finding.message) not in told]
        self._standing = standing
        keep_first(self.findings, found)
        return found


def check_event(state: EngineState, event: Event) -> list[Finding]:
    """What is wrong with this event, given the state just before it."""
    check = _CHECKS.get(type(event))
    if check is None:
        return []
    return [Finding(rule, message, state.step) for rule, message in check(state, event)]


def _tell_finding(state: EngineState, event: ev.AuditFinding) -> list[tuple[int, str]]:
    return [(event.rule, event.message)]


def _check_eviction(state: EngineState, event: ev.BlocksEvicted) -> list[tuple[int, str]]:
    return [(2, f"P{b} evicted, but it is not cached") for b in event.block_ids if not _is_cached(state, b)]


def _check_allocation(state: EngineState, event: ev.BlocksAllocated) -> list[tuple[int, str]]:
    messages = [(2, f"P{b} handed out while held") for b in event.block_ids if _refs(state, b) > 0]
    messages += [(2, f"P{b} handed out while cached") for b in event.block_ids if _is_cached(state, b)]
    if len({*event.block_ids}) < len(event.block_ids):
        messages += [(2, f"P{b} handed out twice") for b, n in Counter(event.block_ids).items() if n > 1]
    return messages + _check_run(state, event)


def _check_run(state: EngineState, event: ev.BlocksAllocated) -> list[tuple[int, str]]:
    """Of an allocator that promises it: a table lies in one piece."""
    if state.info is None or state.info.allocator != "contiguous":
        return []
    table = [*state.sequence(event.sequence_id).block_table, *event.block_ids]
    in_one_piece = all(block_id == table[0] + logical for logical, block_id in enumerate(table))
    return [] if in_one_piece else [(2, f"{event.sequence_id} does not lie in one run of blocks: {table}")]


def _check_copy(state: EngineState, event: ev.BlockCopied) -> list[tuple[int, str]]:
    messages = []
    source, target, block_size = event.source_block, event.target_block, _block_size(state)
    if _refs(state, target) > 0 or _is_cached(state, target):
        messages.append((2, f"P{target} handed out as a copy while held or cached"))
    if _refs(state, source) <= 1:
        messages.append((3, f"P{source} copied although {event.sequence_id} is its last holder"))
    if event.num_slots >= block_size:
        messages.append((3, f"P{source} copied although it is full"))
    if 0 <= source < len(state.written_slots) and event.num_slots != state.written_slots[source]:
        messages.append(
            (6, f"P{source} has {state.written_slots[source]} written slots, {event.num_slots} were copied")
        )
    sequence = state.sequence(event.sequence_id)
    table, place = sequence.block_table, event.logical_block - sequence.num_released
    if not 0 <= place < len(table) or table[place] != source:
        messages.append((6, f"L{event.logical_block} of {event.sequence_id} was not P{source}"))
    return messages


def _check_write(state: EngineState, event: ev.SlotsWritten) -> list[tuple[int, str]]:
    sequence, block_size = state.sequence(event.sequence_id), _block_size(state)
    messages = []
    if event.start != sequence.num_written:
        messages.append((3, f"{event.sequence_id} wrote from {event.start}, its KV ends at {sequence.num_written}"))
    first, last = event.start // block_size, (max(event.stop, event.start + 1) - 1) // block_size
    messages += [
        (3, f"{event.sequence_id} wrote into shared P{block_id} (ref count {_refs(state, block_id)})")
        for block_id in sequence.blocks(first, last + 1)
        if _refs(state, block_id) > 1
    ]
    return messages


def _check_share(state: EngineState, event: ev.BlocksShared | ev.SequenceForked) -> list[tuple[int, str]]:
    if isinstance(event, ev.SequenceForked):
        num_held = len(state.sequence(event.sequence_id).block_table)
        message = f"{event.sequence_id} takes over another's tokens and still holds {num_held} blocks"
        return [(1, message)] if num_held else []
    held = state.sequence(event.from_sequence_id).block_table[: len(event.block_ids)]
    if held == event.block_ids:
        return []
    return [(1, f"{event.sequence_id} shares blocks that {event.from_sequence_id} does not hold")]


def _check_reuse(state: EngineState, event: ev.BlocksReused) -> list[tuple[int, str]]:
    block_size, request = _block_size(state), state.request(event.sequence_id.rpartition(".")[0])
    messages = [
        (5, f"{event.sequence_id} reuses P{b}, which has {state.written_slots[b]} of {block_size} slots written")
        for b in event.block_ids
        if 0 <= b < len(state.written_slots) and state.written_slots[b] != block_size
    ]
    if event.num_tokens != len(event.block_ids) * block_size:
        messages.append((5, f"{event.sequence_id} reuses {event.num_tokens} tokens in {len(event.block_ids)} blocks"))
    if event.num_tokens >= len(request.prompt_token_ids) + len(state.sequence(event.sequence_id).token_ids):
        messages.append((5, f"{event.sequence_id} reuses all its tokens: nothing is left to compute"))
    return messages


def _check_host_release(state: EngineState, event: ev.HostBlocksReleased) -> list[tuple[int, str]]:
    return _check_host_table(state, event.sequence_id, event.host_block_ids)


def _check_swap_out(state: EngineState, event: ev.BlocksSwappedOut) -> list[tuple[int, str]]:
    """As a release; and every written block is moved, into host blocks that are free or hold the same block's copy."""
    sequence, block_size = state.sequence(event.sequence_id), _block_size(state)
    messages = _check_release(state, event)
    if sequence.num_released + len(event.host_block_ids) != -(-sequence.num_written // block_size):
        messages.append(
            (6, f"{event.sequence_id} moves {len(event.host_block_ids)} blocks for {sequence.num_written} positions")
        )
    siblings = _host_blocks_of(state, event.sequence_id)
    messages += [
        (2, f"host block {b} handed out while held")
        for b in event.host_block_ids
        if 0 <= b < len(state.host_ref_counts) and state.host_ref_counts[b] and b not in siblings
    ]
    return messages


def _check_swap_in(state: EngineState, event: ev.BlocksSwappedIn) -> list[tuple[int, str]]:
    request = state.request(event.sequence_id.rpartition(".")[0])
    messages = _check_host_table(state, event.sequence_id, event.host_block_ids)
    if len(event.block_ids) != len(event.host_block_ids):
        messages.append((6, f"{event.sequence_id} gets {len(event.block_ids)} blocks for {event.host_block_ids}"))
    siblings = {block_id for sequence in request.sequences for block_id in sequence.block_table}
    messages += [
        (2, f"P{b} handed out for a swap while held or cached")
        for b in event.block_ids
        if (_refs(state, b) > 0 and b not in siblings) or _is_cached(state, b)
    ]
    return messages


def _check_host_table(state: EngineState, sequence_id: str, host_block_ids: list[int]) -> list[tuple[int, str]]:
    table = state.sequence(sequence_id).host_table
    return [] if table == host_block_ids else [(1, f"{sequence_id} gives up host {host_block_ids}, it holds {table}")]


def _host_blocks_of(state: EngineState, sequence_id: str) -> set[int]:
    request = state.request(sequence_id.rpartition(".")[0])
    return {block_id for sequence in request.sequences for block_id in sequence.host_table}


def _check_release(
    state: EngineState, event: ev.BlocksReleased | ev.BlocksSwappedOut | ev.BlocksOutOfWindow
) -> list[tuple[int, str]]:
    messages = []
    table = state.sequence(event.sequence_id).block_table
    if isinstance(event, ev.BlocksOutOfWindow):  # only the table's beginning: the fold insists on it
        messages += _check_window(state, event)
    elif table != event.block_ids:
        messages.append((1, f"{event.sequence_id} released {event.block_ids}, its table is {table}"))
    not_full = [
        b
        for b in event.cached_block_ids
        if 0 <= b < len(state.written_slots) and state.written_slots[b] != _block_size(state)
    ]
    if not_full or not set(event.cached_block_ids) <= set(event.freed_block_ids):
        messages.append((5, f"{event.sequence_id} leaves {event.cached_block_ids} cached, which are not free and full"))
    freed = [block_id for block_id in event.block_ids if _refs(state, block_id) == 1]
    if freed != event.freed_block_ids:
        messages.append((1, f"blocks {freed} reach ref count 0, the event says {event.freed_block_ids}"))
    return messages


def _check_window(state: EngineState, event: ev.BlocksOutOfWindow) -> list[tuple[int, str]]:
    """The next position to be computed reads the `window - 1` before it; later ones read no further back."""
    window = state.info.sliding_window if state.info is not None else None
    num_written = state.sequence(event.sequence_id).num_written
    first_read = max(num_written - window + 1, 0) if window is not None else 0
    stop = (event.first_logical_block + len(event.block_ids)) * _block_size(state)
    if stop <= first_read:
        return []
    return [(4, f"{event.sequence_id} gives up positions to {stop - 1}, its next token reads from {first_read} on")]


def check_state(state: EngineState) -> list[Finding]:
    """Invariants 1, 3 and 7 over the whole state; O(pool + table entries)."""
    sequences = [sequence for request in state.requests.values() for sequence in request.sequences]
    messages = [message for sequence in sequences for message in _check_sequence(state, sequence)]
    # Table by table, so that a thread that draws gets its turn in between.
    held = np.concatenate([np.zeros(0, np.int64), *[np.fromiter(each.block_table, np.int64) for each in sequences]])
    entries = np.bincount(held, minlength=len(state.ref_counts))
    refs, written = state.ref_counts.numbers, state.written_slots.numbers
    if not np.array_equal(refs, entries):
        messages += [
            (1, f"P{block_id} has ref count {count}, {entries[block_id]} table entries point at it")
            for block_id, count in enumerate(state.ref_counts)
            if count != entries[block_id]
        ]
    messages += _check_host(state)
    kept = np.flatnonzero((written != 0) & (refs == 0))
    if kept.size:
        messages += [
            (5, f"P{block_id} is cached with {written[block_id]} written slots: only full blocks are kept")
            for block_id in kept[written[kept] != _block_size(state)]
        ]
    active = any(request.status == "running" for request in state.requests.values())
    if not active and held.size:
        messages.append((7, f"nothing runs, yet {np.count_nonzero(entries)} blocks are held"))
    return [Finding(rule, message, state.step) for rule, message in messages]


def _check_host(state: EngineState) -> list[tuple[int, str]]:
    """Invariant 1 over the host pool."""
    entries = Counter(
        block_id
        for request in state.requests.values()
        if request.status == "preempted"
        for sequence in request.sequences
        for block_id in sequence.host_table
    )
    return [
        (1, f"host block {block_id} has ref count {count}, {entries[block_id]} table entries point at it")
        for block_id, count in enumerate(state.host_ref_counts)
        if count != entries[block_id]
    ]


def _check_sequence(state: EngineState, sequence: SequenceState) -> list[tuple[int, str]]:
    num_blocks, messages = len(sequence.block_table) + len(sequence.host_table), []
    if sequence.num_written and sequence.num_written > (sequence.num_released + num_blocks) * _block_size(state):
        messages.append(
            (3, f"{sequence.sequence_id} has KV for {sequence.num_written} positions in {num_blocks} blocks")
        )
    if num_blocks and sequence.finish_reason is not None:
        messages.append((7, f"{sequence.sequence_id} has ended and still holds {num_blocks} blocks"))
    return messages


def _refs(state: EngineState, block_id: int) -> int:
    return state.ref_counts[block_id] if 0 <= block_id < len(state.ref_counts) else 0


def _is_cached(state: EngineState, block_id: int) -> bool:
    return (
        0 <= block_id < len(state.written_slots)
        and not state.ref_counts[block_id]
        and state.written_slots[block_id] > 0
    )


def _block_size(state: EngineState) -> int:
    if state.info is None:
        raise FoldError("the engine has not been announced")
    return state.info.block_size


_CHECKS: dict[type[Event], Callable[[EngineState, Any], list[tuple[int, str]]]] = {
    ev.AuditFinding: _tell_finding,
    ev.BlocksSwappedOut: _check_swap_out,
    ev.BlocksSwappedIn: _check_swap_in,
    ev.HostBlocksReleased: _check_host_release,
    ev.BlocksAllocated: _check_allocation,
    ev.BlockCopied: _check_copy,
    ev.SlotsWritten: _check_write,
    ev.BlocksShared: _check_share,
    ev.SequenceForked: _check_share,
    ev.BlocksReused: _check_reuse,
    ev.BlocksEvicted: _check_eviction,
    ev.BlocksReleased: _check_release,
    ev.BlocksOutOfWindow: _check_release,
}
