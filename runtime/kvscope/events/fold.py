"""State is a fold over events: no clock, no IO, no torch.

The live view, replay, the auditor and the tests all apply events through here. The engine can also export its own
`EngineState`; after every batch the two are equal (invariant 8).
"""

import copy
from functools import lru_cache
from typing import Any

from kvscope.events import types as ev
from kvscope.events.columns import Column
from kvscope.events.fold_blocks import BLOCK_HANDLERS, Handler
from kvscope.events.state import (
    Breakpoints,
    EngineState,
    FoldError,
    FullState,
    Hypothesis,
    RequestState,
    SequenceState,
    WaitingReason,
)
from kvscope.events.types import Batch, Event

MAX_FINISHED_REQUESTS = 32  # how many ended requests stay readable; older ones leave the state
_TOO_LARGE = "a number of a block does not fit into 32 bits"


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
        other = copy.deepcopy(event.state)  # the event may be folded by others too
        if state.traces:
            other.trace()
        return other
    handler = _HANDLERS.get(type(event))
    if handler is not None:
        try:
            handler(state, event)
        except OverflowError:
            raise FoldError(_TOO_LARGE) from None
    return state


def folds(kind: type[Event]) -> bool:
    """Whether events of that kind change a state."""
    return kind in _HANDLERS or kind is FullState


def _engine_started(state: EngineState, event: ev.EngineStarted) -> None:
    state.info, state.wall_time_ns, state.status = event.info, event.wall_time_ns, "running"
    state.schema_version = event.schema_version
    state.ref_counts, state.written_slots = Column.zeros(event.info.num_blocks), Column.zeros(event.info.num_blocks)
    state.host_ref_counts = [0] * event.info.num_host_blocks
    if state.traces:
        state.trace()


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


def _prefix_lookup(state: EngineState, event: ev.PrefixLookup) -> None:
    state.counters.prefix_lookup_tokens += event.num_tokens
    state.counters.prefix_hit_tokens += event.num_hit_tokens


@lru_cache(1 << 12)
def _same(value: Any) -> Any:
    """One object for equal ones: a viewer keeps half an hour of tokens, and most of them are a few hundred words."""
    return value


def _tokens_generated(state: EngineState, event: ev.TokensGenerated) -> None:
    request, sequence = state.find(event.sequence_id)
    sequence.token_ids += map(_same, event.token_ids)
    sequence.pieces += map(_same, event.pieces)
    sequence.text += event.text
    if event.score is not None:
        sequence.score = event.score
    state.counters.generated_tokens += len(event.token_ids)
    if request.first_token_ns is None:
        request.first_token_ns = state.time_ns


def _step_completed(state: EngineState, event: ev.StepCompleted) -> None:
    state.step_elapsed_ns = event.elapsed_ns
    state.counters.computed_tokens += event.num_tokens


_HANDLERS: dict[type[Event], Handler] = {
    **BLOCK_HANDLERS,
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
    ev.PrefixLookup: _prefix_lookup,
    ev.TokensGenerated: _tokens_generated,
    ev.StepCompleted: _step_completed,
}
