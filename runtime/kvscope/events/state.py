"""State is a fold over events: no clock, no IO, no torch.

The live view, replay, the auditor and the tests all apply events through here. The engine can also export its own
`EngineState`; after every batch the two are equal (invariant 8).
"""

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from kvscope.events import types as ev
from kvscope.events.columns import Column
from kvscope.events.types import Batch, EngineInfo, Event, SamplingParams

MAX_FINISHED_REQUESTS = 32  # how many ended requests stay readable; older ones leave the state


_TOO_LARGE = "a number of a block does not fit into 32 bits"


class FoldError(Exception):
    """The event cannot be applied to this state: a gap, or a broken publisher."""


class WaitingReason(msgspec.Struct, frozen=True):
    kind: str
    needed: int
    available: int


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """A way to end that beam search has found; `score` is length-normalised."""

    token_ids: list[int]
    pieces: list[str]
    text: str
    score: float
    finish_reason: str


class SequenceState(msgspec.Struct, kw_only=True):
    """One candidate of a request. `block_table[i]` is the physical block of logical block i."""

    sequence_id: str
    block_table: list[int] = []
    num_written: int = 0  # positions 0:num_written have KV
    token_ids: list[int] = []  # generated only
    pieces: list[str] = []
    text: str = ""
    num_copies: int = 0
    finish_reason: str | None = None
    host_table: list[int] = []  # where its KV is while swapped out
    score: float | None = None  # beam search: log-probability; of an ended one, its hypothesis' score


class RequestState(msgspec.Struct, kw_only=True):
    """States: waiting -> running -> finished; running -> preempted -> running."""

    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    prompt_pieces: list[str]
    params: SamplingParams
    sequences: list[SequenceState]
    status: str = "waiting"
    waiting: WaitingReason | None = None
    num_preemptions: int = 0
    submitted_ns: int = 0
    first_token_ns: int | None = None
    finished_ns: int | None = None
    hypotheses: list[Hypothesis] = []  # beam search: the best ways to end so far, best first


class Counters(msgspec.Struct, kw_only=True):
    """Totals over the engine's life."""

    copies: int = 0
    preemptions: int = 0
    refusals: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    dropped_batches: int = 0
    audit_findings: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    evictions: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0


class Breakpoints(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine pauses at: these events, and the moment in which fewer than `free_below` blocks are free."""

    events: tuple[str, ...] = ()
    free_below: int | None = None


class EngineState(msgspec.Struct, kw_only=True):
    """Everything a viewer shows. `ref_counts[b]` and `written_slots[b]` are indexed by physical block id.

    A block is held (ref count >= 1), cached (ref count 0, written slots kept) or free (ref count 0, nothing written).
    """

    epoch: bytes = b""
    step: int = 0
    phase: str = "life"
    time_ns: int = 0
    status: str = "starting"  # starting -> running <-> paused -> stopped
    wall_time_ns: int = 0
    schema_version: int = 0  # the engine's; newer than ours: some of its events may be unknown here
    info: EngineInfo | None = None
    ref_counts: Column = msgspec.field(default_factory=Column)
    written_slots: Column = msgspec.field(default_factory=Column)
    requests: dict[str, RequestState] = {}
    finished_order: list[str] = []
    counters: Counters = msgspec.field(default_factory=Counters)
    step_elapsed_ns: int = 0
    host_ref_counts: list[int] = []  # by host block; a fold replaces the list, so that keyframes may share it
    pause_reason: str = ""  # the breakpoint's, while paused at one
    breakpoints: Breakpoints = Breakpoints()

    def sequence(self, sequence_id: str) -> SequenceState:
        """Raises FoldError for a sequence nobody announced."""
        return self.find(sequence_id)[1]

    def find(self, sequence_id: str) -> tuple[RequestState, SequenceState]:
        """The same, with its request."""
        request_id, _, index = sequence_id.rpartition(".")
        try:
            request = self.requests[request_id]
            return request, request.sequences[int(index)]
        except (KeyError, ValueError, IndexError):
            raise FoldError(f"unknown sequence {sequence_id!r}") from None

    def request(self, request_id: str) -> RequestState:
        """Raises FoldError for a request nobody announced."""
        try:
            return self.requests[request_id]
        except KeyError:
            raise FoldError(f"unknown request {request_id!r}") from None

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds and that keep nothing."""
        return len(self.ref_counts) - int(np.count_nonzero(self.ref_counts.numbers)) - self.num_cached_blocks()

    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds, with content kept for the prefix cache."""
        return int(np.count_nonzero((self.ref_counts.numbers == 0) & (self.written_slots.numbers != 0)))

    def holders(self, block_id: int) -> list[tuple[str, int]]:
        """`(sequence_id, logical_block)` of every table entry that points at the block."""
        return [holder for request in self.requests.values() for holder in holders_in(request, block_id)]


def holders_in(request: RequestState, block_id: int) -> list[tuple[str, int]]:
    """`(sequence_id, logical_block)` of every table entry of one request that points at the block."""
    return [
        (sequence.sequence_id, logical)
        for sequence in request.sequences
        if block_id in sequence.block_table  # at C speed; most tables do not have it
        for logical, held in enumerate(sequence.block_table)
        if held == block_id
    ]


class FullState(Event, frozen=True):
    """The engine's own state, sent after dropped batches; it replaces whatever the receiver had."""

    state: EngineState


def apply_batch(state: EngineState, batch: Batch) -> EngineState:
    """Fold one batch into the state. Mutates and returns it (a FullState event returns a new one).

    Raises:
        FoldError: an event does not fit; the state is then unusable and a snapshot must replace it.
    """
    begin_batch(state, batch)
    handlers = _HANDLERS
    try:
        for event in batch.events:  # as `apply_event` does, without a call for each
            kind = type(event)
            if kind in handlers:
                handlers[kind](state, event)
            elif kind is FullState:
                state = apply_event(state, event)
    except OverflowError:
        raise FoldError(_TOO_LARGE) from None
    return state


def begin_batch(state: EngineState, batch: Batch) -> None:
    """Take over a batch's header. Raises FoldError when it comes from another life of the engine."""
    if state.epoch and batch.epoch != state.epoch:
        raise FoldError("the batch belongs to another engine life")
    state.epoch, state.step, state.phase, state.time_ns = batch.epoch, batch.step, batch.phase, batch.time_ns


def apply_event(state: EngineState, event: Event) -> EngineState:
    """Fold one event; `state.time_ns` and `state.step` must already be the batch's."""
    if isinstance(event, FullState):
        return copy.deepcopy(event.state)  # the event may be folded by others too
    handler = _HANDLERS.get(type(event))
    if handler is not None:
        try:
            handler(state, event)
        except OverflowError:
            raise FoldError(_TOO_LARGE) from None
    return state


def _engine_started(state: EngineState, event: ev.EngineStarted) -> None:
    state.info, state.wall_time_ns, state.status = event.info, event.wall_time_ns, "running"
    state.schema_version = event.schema_version
    state.ref_counts, state.written_slots = Column.zeros(event.info.num_blocks), Column.zeros(event.info.num_blocks)
    state.host_ref_counts = [0] * event.info.num_host_blocks


def _engine_stopped(state: EngineState, event: ev.EngineStopped) -> None:
    state.status = "stopped"


def _engine_paused(state: EngineState, event: ev.EnginePaused) -> None:
    state.status, state.pause_reason = "paused", event.reason


def _engine_resumed(state: EngineState, event: ev.EngineResumed) -> None:
    state.status, state.pause_reason = "running", ""


def _breakpoints_changed(state: EngineState, event: ev.BreakpointsChanged) -> None:
    state.breakpoints = Breakpoints(events=tuple(event.events), free_below=event.free_below)


def _batches_dropped(state: EngineState, event: ev.BatchesDropped) -> None:
    state.counters.dropped_batches += event.num_batches


def _audit_finding(state: EngineState, event: ev.AuditFinding) -> None:
    state.counters.audit_findings += 1


def _request_submitted(state: EngineState, event: ev.RequestSubmitted) -> None:
    state.requests[event.request_id] = RequestState(
        request_id=event.request_id,
        prompt=event.prompt,
        prompt_token_ids=event.prompt_token_ids,
        prompt_pieces=event.prompt_pieces,
        params=event.params,
        sequences=[
            SequenceState(sequence_id=f"{event.request_id}.{index}") for index in range(event.params.num_sequences)
        ],
        submitted_ns=state.time_ns,
    )


def _request_refused(state: EngineState, event: ev.RequestRefused) -> None:
    state.counters.refusals += 1


def _request_waiting(state: EngineState, event: ev.RequestWaiting) -> None:
    state.request(event.request_id).waiting = WaitingReason(event.kind, event.needed, event.available)


def _request_admitted(state: EngineState, event: ev.RequestAdmitted) -> None:
    request = state.request(event.request_id)
    request.status, request.waiting = "running", None


def _request_preempted(state: EngineState, event: ev.RequestPreempted) -> None:
    request = state.request(event.request_id)
    request.status = "preempted"
    request.num_preemptions += 1
    state.counters.preemptions += 1


def _request_finished(state: EngineState, event: ev.RequestFinished) -> None:
    request = state.request(event.request_id)
    request.status, request.waiting, request.finished_ns = "finished", None, state.time_ns
    state.finished_order.append(event.request_id)
    if len(state.finished_order) > MAX_FINISHED_REQUESTS:
        del state.requests[state.finished_order.pop(0)]


def _sequence_finished(state: EngineState, event: ev.SequenceFinished) -> None:
    state.sequence(event.sequence_id).finish_reason = event.reason


def _sequence_forked(state: EngineState, event: ev.SequenceForked) -> None:
    """New lists: keyframes keep the old ones."""
    child, parent = state.sequence(event.sequence_id), state.sequence(event.from_sequence_id)
    child.token_ids, child.pieces = parent.token_ids.copy(), parent.pieces.copy()
    child.text, child.score = parent.text, parent.score


def _hypothesis_finished(state: EngineState, event: ev.HypothesisFinished) -> None:
    request, beam = state.request(event.request_id), state.sequence(event.from_sequence_id)
    hypothesis = Hypothesis(
        token_ids=[*beam.token_ids, event.token_id],
        pieces=[*beam.pieces, event.piece],
        text=beam.text + event.text,
        score=event.score,
        finish_reason=event.reason,
    )
    request.hypotheses = keep_best([*request.hypotheses, hypothesis], request.params.beam_width)
    if request.first_token_ns is None:
        request.first_token_ns = state.time_ns


def keep_best(hypotheses: list[Hypothesis], count: int) -> list[Hypothesis]:
    """The `count` best, best first; of equals the earlier."""
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:count]


def _beam_search_finished(state: EngineState, event: ev.BeamSearchFinished) -> None:
    request = state.request(event.request_id)
    for sequence, hypothesis in zip(request.sequences, request.hypotheses, strict=False):
        sequence.token_ids, sequence.pieces = hypothesis.token_ids.copy(), hypothesis.pieces.copy()
        sequence.text, sequence.score = hypothesis.text, hypothesis.score
    request.hypotheses = []


def _blocks_allocated(state: EngineState, event: ev.BlocksAllocated) -> None:
    table = state.sequence(event.sequence_id).block_table
    if len(table) != event.first_logical_block:
        raise FoldError(
            f"{event.sequence_id} has {len(table)} blocks, the event continues at L{event.first_logical_block}"
        )
    for block_id in event.block_ids:
        _check_block(state, block_id)
        state.ref_counts[block_id] += 1
        state.written_slots[block_id] = 0
    table.extend(event.block_ids)


def _blocks_shared(state: EngineState, event: ev.BlocksShared) -> None:
    sequence = state.sequence(event.sequence_id)
    if sequence.block_table:
        raise FoldError(f"{event.sequence_id} already holds blocks")
    for block_id in event.block_ids:
        _check_block(state, block_id)
        state.ref_counts[block_id] += 1
    sequence.block_table = list(event.block_ids)
    sequence.num_written = state.sequence(event.from_sequence_id).num_written


def _block_copied(state: EngineState, event: ev.BlockCopied) -> None:
    sequence = state.sequence(event.sequence_id)
    _check_block(state, event.source_block)
    _check_block(state, event.target_block)
    if not 0 <= event.logical_block < len(sequence.block_table):
        raise FoldError(f"{event.sequence_id} has no logical block L{event.logical_block}")
    sequence.block_table[event.logical_block] = event.target_block
    sequence.num_copies += 1
    state.ref_counts[event.source_block] -= 1
    state.ref_counts[event.target_block] += 1
    state.written_slots[event.target_block] = event.num_slots
    state.counters.copies += 1


def _slots_written(state: EngineState, event: ev.SlotsWritten) -> None:
    _, sequence = state.find(event.sequence_id)
    block_size = _block_size(state)
    if not 0 <= event.start <= event.stop <= len(sequence.block_table) * block_size:
        raise FoldError(f"{event.sequence_id} holds no block for positions {event.start}:{event.stop}")
    if event.start == event.stop:
        return
    if event.stop - event.start == 1:  # a token that was generated: most writes
        logical, slot = divmod(event.start, block_size)
        state.written_slots[sequence.block_table[logical]] = slot + 1
        sequence.num_written = event.stop
        return
    for logical in range(event.start // block_size, (event.stop - 1) // block_size + 1):
        block_id = sequence.block_table[logical]
        state.written_slots[block_id] = min(event.stop - logical * block_size, block_size)
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
    for logical, block_id in enumerate(event.block_ids):
        _check_block(state, block_id)
        state.counters.blocks_swapped_in += state.ref_counts[block_id] == 0
        state.ref_counts[block_id] += 1
        state.written_slots[block_id] = min(max(sequence.num_written - logical * block_size, 0), block_size)
    sequence.block_table, sequence.host_table = list(event.block_ids), []


def _host_blocks_released(state: EngineState, event: ev.HostBlocksReleased) -> None:
    sequence = state.sequence(event.sequence_id)
    _count_host(state, event.host_block_ids, -1)
    sequence.host_table, sequence.num_written = [], 0


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
    sequence.num_written = 0


def _release(state: EngineState, block_ids: list[int], cached_block_ids: list[int]) -> None:
    cached = frozenset(cached_block_ids)
    for block_id in block_ids:
        _check_block(state, block_id)
        state.ref_counts[block_id] -= 1
        if state.ref_counts[block_id] == 0 and block_id not in cached:
            state.written_slots[block_id] = 0


def _blocks_reused(state: EngineState, event: ev.BlocksReused) -> None:
    sequence = state.sequence(event.sequence_id)
    if sequence.block_table:
        raise FoldError(f"{event.sequence_id} already holds blocks")
    for block_id in event.block_ids:
        _check_block(state, block_id)
        state.ref_counts[block_id] += 1
    sequence.block_table = list(event.block_ids)
    sequence.num_written = event.num_tokens


def _blocks_evicted(state: EngineState, event: ev.BlocksEvicted) -> None:
    for block_id in event.block_ids:
        _check_block(state, block_id)
        state.written_slots[block_id] = 0
    state.counters.evictions += len(event.block_ids)


def _prefix_lookup(state: EngineState, event: ev.PrefixLookup) -> None:
    state.counters.prefix_lookup_tokens += event.num_tokens
    state.counters.prefix_hit_tokens += event.num_hit_tokens


def _tokens_generated(state: EngineState, event: ev.TokensGenerated) -> None:
    request, sequence = state.find(event.sequence_id)
    sequence.token_ids += event.token_ids
    sequence.pieces += event.pieces
    sequence.text += event.text
    if event.score is not None:
        sequence.score = event.score
    state.counters.generated_tokens += len(event.token_ids)
    if request.first_token_ns is None:
        request.first_token_ns = state.time_ns


def _step_completed(state: EngineState, event: ev.StepCompleted) -> None:
    state.step_elapsed_ns = event.elapsed_ns
    state.counters.computed_tokens += event.num_tokens


def _check_block(state: EngineState, block_id: int) -> None:
    if not 0 <= block_id < len(state.ref_counts):
        raise FoldError(f"block {block_id} is outside the pool of {len(state.ref_counts)}")


def _block_size(state: EngineState) -> int:
    if state.info is None:
        raise FoldError("the engine has not been announced")
    return state.info.block_size


_HANDLERS: dict[type[Event], Callable[[EngineState, Any], None]] = {
    ev.EngineStarted: _engine_started,
    ev.EngineStopped: _engine_stopped,
    ev.EnginePaused: _engine_paused,
    ev.EngineResumed: _engine_resumed,
    ev.BreakpointsChanged: _breakpoints_changed,
    ev.BatchesDropped: _batches_dropped,
    ev.AuditFinding: _audit_finding,
    ev.RequestSubmitted: _request_submitted,
    ev.RequestRefused: _request_refused,
    ev.RequestWaiting: _request_waiting,
    ev.RequestAdmitted: _request_admitted,
    ev.RequestPreempted: _request_preempted,
    ev.RequestFinished: _request_finished,
    ev.SequenceFinished: _sequence_finished,
    ev.SequenceForked: _sequence_forked,
    ev.HypothesisFinished: _hypothesis_finished,
    ev.BeamSearchFinished: _beam_search_finished,
    ev.BlocksAllocated: _blocks_allocated,
    ev.BlocksShared: _blocks_shared,
    ev.BlockCopied: _block_copied,
    ev.SlotsWritten: _slots_written,
    ev.BlocksReleased: _blocks_released,
    ev.BlocksSwappedOut: _blocks_swapped_out,
    ev.BlocksSwappedIn: _blocks_swapped_in,
    ev.HostBlocksReleased: _host_blocks_released,
    ev.BlocksReused: _blocks_reused,
    ev.BlocksEvicted: _blocks_evicted,
    ev.PrefixLookup: _prefix_lookup,
    ev.TokensGenerated: _tokens_generated,
    ev.StepCompleted: _step_completed,
}
