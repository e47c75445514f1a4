"""State is a fold: what each event does to it, and which events do not fit."""

import copy
from collections.abc import Callable

import pytest

from kvscope.events import types as ev
from kvscope.events.audit import Auditor
from kvscope.events.fold import MAX_FINISHED_REQUESTS, apply_batch
from kvscope.events.state import Breakpoints, EngineState, FoldError, FullState
from kvscope.events.types import Batch, Event

MakeBatch = Callable[..., Batch]


def fold(auditor: Auditor, batch_of: MakeBatch, *events: Event) -> EngineState:
    return apply_batch(auditor.state, batch_of(*events))


def allocate(sequence_id: str, blocks: list[int], first: int = 0) -> ev.BlocksAllocated:
    return ev.BlocksAllocated(sequence_id=sequence_id, first_logical_block=first, block_ids=blocks)


def write(sequence_id: str, start: int, stop: int) -> ev.SlotsWritten:
    return ev.SlotsWritten(sequence_id=sequence_id, start=start, stop=stop)


def test_reserved_then_written_are_two_facts(pool: Auditor, batch_of: MakeBatch) -> None:
    state = fold(pool, batch_of, allocate("r1.0", [3, 0]))
    assert state.ref_counts == [1, 0, 0, 1, 0, 0]
    assert state.written_slots == [0] * 6
    state = fold(pool, batch_of, write("r1.0", 0, 6))
    assert state.written_slots == [2, 0, 0, 4, 0, 0]
    assert state.sequence("r1.0").num_written == 6
    assert state.num_free_blocks() == 4


def test_share_copy_and_release(pool: Auditor, batch_of: MakeBatch) -> None:
    share = ev.BlocksShared(sequence_id="r1.1", from_sequence_id="r1.0", block_ids=[0, 1])
    state = fold(pool, batch_of, allocate("r1.0", [0, 1]), write("r1.0", 0, 6), share)
    assert list(state.ref_counts[:3]) == [2, 2, 0]
    assert state.sequence("r1.1").num_written == 6
    copied = ev.BlockCopied(sequence_id="r1.0", logical_block=1, source_block=1, target_block=2, num_slots=2)
    state = fold(pool, batch_of, copied)
    assert list(state.ref_counts[:3]) == [2, 1, 1]
    assert list(state.written_slots[:3]) == [4, 2, 2]
    assert state.sequence("r1.0").block_table == [0, 2]
    assert state.sequence("r1.1").block_table == [0, 1]
    assert state.holders(0) == [("r1.0", 0), ("r1.1", 0)]
    state = fold(pool, batch_of, ev.BlocksReleased(sequence_id="r1.0", block_ids=[0, 2], freed_block_ids=[2]))
    assert list(state.ref_counts[:3]) == [1, 1, 0]
    assert list(state.written_slots[:3]) == [4, 2, 0]
    assert state.counters.copies == 1


def test_the_life_of_a_request(pool: Auditor, batch_of: MakeBatch) -> None:
    waiting = ev.RequestWaiting(request_id="r1", kind="blocks", needed=3, available=1)
    assert fold(pool, batch_of, waiting).request("r1").waiting is not None
    preempted = ev.RequestPreempted(
        request_id="r1", for_request_id="r2", blocks_needed=1, blocks_gained=2, tokens_lost=3
    )
    state = fold(pool, batch_of, preempted)
    assert (state.request("r1").status, state.counters.preemptions) == ("preempted", 1)
    state = fold(pool, batch_of, ev.RequestAdmitted(request_id="r1"))
    assert (state.request("r1").status, state.request("r1").waiting) == ("running", None)
    tokens = ev.TokensGenerated(sequence_id="r1.0", token_ids=[7, 8], pieces=[" a", "b"], text=" ab")
    state = fold(pool, batch_of, tokens, ev.SequenceFinished(sequence_id="r1.0", reason="stop"))
    assert state.sequence("r1.0").text == " ab"
    assert state.sequence("r1.0").finish_reason == "stop"
    assert state.counters.generated_tokens == 2
    state = fold(pool, batch_of, ev.RequestFinished(request_id="r1"))
    assert (state.request("r1").status, state.finished_order) == ("finished", ["r1"])


def test_status_of_the_engine(pool: Auditor, batch_of: MakeBatch) -> None:
    for event, status in (
        (ev.EnginePaused(), "paused"),
        (ev.EngineResumed(), "running"),
        (ev.EngineStopped(reason="bye"), "stopped"),
    ):
        assert fold(pool, batch_of, event).status == status


def test_a_pause_keeps_its_reason_until_resumed(pool: Auditor, batch_of: MakeBatch) -> None:
    changed = ev.BreakpointsChanged(events=["eviction"], free_below=3)
    state = fold(pool, batch_of, changed, ev.EnginePaused(reason="eviction at step 4"))
    assert (state.pause_reason, state.breakpoints) == (
        "eviction at step 4",
        Breakpoints(events=("eviction",), free_below=3),
    )
    state = fold(pool, batch_of, ev.EngineResumed())
    assert (state.pause_reason, state.breakpoints.events) == ("", ("eviction",))


def test_counters(pool: Auditor, batch_of: MakeBatch) -> None:
    state = fold(
        pool,
        batch_of,
        ev.RequestRefused(request_id="r9", reason="too long"),
        ev.BatchesDropped(num_batches=4),
        ev.AuditFinding(rule=1, message="x"),
        ev.StepScheduled(sequence_ids=[], num_scheduled_tokens=[]),
        ev.StepCompleted(elapsed_ns=5, num_tokens=3),
    )
    counters = state.counters
    assert (counters.refusals, counters.dropped_batches, counters.audit_findings) == (1, 4, 1)
    assert (state.step_elapsed_ns, counters.computed_tokens) == (5, 3)


def test_old_requests_leave_the_state(pool: Auditor, batch_of: MakeBatch, samples: tuple[Event, ...]) -> None:
    [template] = [event for event in samples if isinstance(event, ev.RequestSubmitted)]
    for number in range(MAX_FINISHED_REQUESTS + 5):
        fields = {name: getattr(template, name) for name in template.__struct_fields__}
        request_id = f"x{number}"
        fold(pool, batch_of, ev.RequestSubmitted(**{**fields, "request_id": request_id}))
        fold(pool, batch_of, ev.RequestFinished(request_id=request_id))
    assert "x4" not in pool.state.requests
    assert "x5" in pool.state.requests


def test_full_state_replaces_everything(pool: Auditor, batch_of: MakeBatch) -> None:
    truth = copy.deepcopy(pool.state)
    truth.counters.copies = 99
    wrong = EngineState()
    assert apply_batch(wrong, batch_of(FullState(state=truth))).counters.copies == 99


MISFITS: dict[str, Event] = {
    "another first logical block": allocate("r1.0", [0], first=1),
    "allocated outside": allocate("r1.0", [6]),
    "unknown sequence": allocate("r7.0", [0]),
    "no such candidate": allocate("r1.2", [0]),
    "not a sequence id": allocate("r1", [0]),
    "written without block": write("r1.0", 0, 1),
    "copied without block": ev.BlockCopied(
        sequence_id="r1.0", logical_block=0, source_block=0, target_block=1, num_slots=1
    ),
    "copied from outside": ev.BlockCopied(
        sequence_id="r1.0", logical_block=0, source_block=9, target_block=1, num_slots=1
    ),
    "released outside": ev.BlocksReleased(sequence_id="r1.0", block_ids=[9], freed_block_ids=[]),
    "shared from nobody": ev.BlocksShared(sequence_id="r1.1", from_sequence_id="r8.0", block_ids=[0]),
    "unknown request": ev.RequestFinished(request_id="r8"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit(name: str, pool: Auditor, batch_of: MakeBatch) -> None:
    with pytest.raises(FoldError):
        fold(pool, batch_of, MISFITS[name])


def test_another_life_does_not_fit(pool: Auditor, batch_of: MakeBatch) -> None:
    with pytest.raises(FoldError, match="life"):
        apply_batch(pool.state, batch_of(epoch=b"another life 123"))


def test_memory_before_the_announcement_does_not_fit(batch_of: MakeBatch, samples: tuple[Event, ...]) -> None:
    [submitted] = [event for event in samples if isinstance(event, ev.RequestSubmitted)]
    with pytest.raises(FoldError):
        apply_batch(EngineState(), batch_of(submitted, write("r1.0", 0, 1)))


def test_folding_does_not_change_the_events(pool: Auditor, batch_of: MakeBatch) -> None:
    batch = batch_of(allocate("r1.0", [0]), write("r1.0", 0, 3), allocate("r1.0", [1], first=1))
    before = copy.deepcopy(batch)
    apply_batch(pool.state, batch)
    assert batch == before
