"""One sample of every event kind, and a small pool to fold into."""

from collections.abc import Callable

import pytest

from kvscope.events import types as ev
from kvscope.events.audit import Auditor
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Batch, Event

EPOCH = bytes(range(16))
INFO = ev.EngineInfo(
    name="lab",
    model="tiny",
    device="cpu",
    dtype="float32",
    attention_backend="torch",
    block_size=4,
    num_blocks=6,
    bytes_per_block=4096,
    num_layers=2,
    num_kv_heads=2,
    head_size=16,
    vocab_size=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=128,
    seed=0,
    kvscope_version="0.1.0",
)
STARTED = ev.EngineStarted(wall_time_ns=1_700_000_000_000_000_000, schema_version=1, info=INFO)


def submitted(request_id: str, n: int = 1) -> ev.RequestSubmitted:
    return ev.RequestSubmitted(
        request_id=request_id,
        prompt="once upon",
        prompt_token_ids=[1, 2],
        prompt_pieces=["once", " upon"],
        params=ev.SamplingParams(n=n, stop=("\n",)),
    )


SAMPLES: tuple[Event, ...] = (
    STARTED,
    ev.EngineStopped(reason="done"),
    ev.EnginePaused(),
    ev.EngineResumed(),
    ev.BreakpointsChanged(events=["copy-on-write"], free_below=12),
    ev.BatchesDropped(num_batches=3),
    ev.AuditFinding(rule=1, message="P0"),
    submitted("r1", n=2),
    ev.RequestRefused(request_id="r2", reason="too long"),
    ev.RequestWaiting(request_id="r1", kind="blocks", needed=3, available=1),
    ev.RequestAdmitted(request_id="r1"),
    ev.RequestPreempted(request_id="r1", for_request_id="r0", blocks_needed=1, blocks_gained=2, tokens_lost=7),
    ev.RequestFinished(request_id="r1"),
    ev.SequenceFinished(sequence_id="r1.0", reason="length"),
    ev.SequenceForked(sequence_id="r1.1", from_sequence_id="r1.0"),
    ev.HypothesisFinished(
        request_id="r1", from_sequence_id="r1.0", token_id=7, piece=".", text=".", score=-0.75, reason="stop"
    ),
    ev.BeamSearchFinished(request_id="r1"),
    ev.BlocksAllocated(sequence_id="r1.0", first_logical_block=0, block_ids=[3, 0, 5]),
    ev.BlocksShared(sequence_id="r1.1", from_sequence_id="r1.0", block_ids=[3, 0]),
    ev.BlockCopied(sequence_id="r1.1", logical_block=1, source_block=0, target_block=2, num_slots=2),
    ev.SlotsWritten(sequence_id="r1.0", start=0, stop=6),
    ev.BlocksReused(sequence_id="r1.0", block_ids=[3, 0], num_tokens=8),
    ev.BlocksEvicted(block_ids=[4, 1], for_sequence_id="r1.0"),
    ev.PrefixLookup(
        request_id="r1",
        num_tokens=12,
        num_hit_tokens=8,
        miss="evicted",
        num_common_tokens=3,
        evicted_at_step=5,
        evicted_for="r0.0",
    ),
    ev.BlocksSwappedOut(
        sequence_id="r1.0", block_ids=[3, 0], host_block_ids=[1], freed_block_ids=[3, 0], cached_block_ids=[3]
    ),
    ev.BlocksSwappedIn(sequence_id="r1.0", host_block_ids=[1], block_ids=[2]),
    ev.HostBlocksReleased(sequence_id="r1.0", host_block_ids=[1]),
    ev.BlocksReleased(sequence_id="r1.0", block_ids=[3, 0], freed_block_ids=[0], cached_block_ids=[0]),
    ev.BlocksOutOfWindow(
        sequence_id="r1.0", first_logical_block=2, block_ids=[3, 0], freed_block_ids=[0], cached_block_ids=[0]
    ),
    ev.StepScheduled(sequence_ids=["r1.0"], num_scheduled_tokens=[6]),
    ev.TokensGenerated(sequence_id="r1.0", token_ids=[42], pieces=[" a"], text=" a", score=-0.5),
    ev.StepCompleted(elapsed_ns=1_500_000, num_tokens=6),
)


def make_batch(*events: Event, epoch: bytes = EPOCH, step: int = 7) -> Batch:
    return Batch(epoch=epoch, step=step, phase="plan", time_ns=123_456_789, events=events)


@pytest.fixture
def batch_of() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture
def samples() -> tuple[Event, ...]:
    """One of every kind, the full state last."""
    state = apply_batch(EngineState(), make_batch(STARTED, submitted("r1")))
    return (*SAMPLES, FullState(state=state))


@pytest.fixture
def pool() -> Auditor:
    """Six free blocks of four slots; `r1` (two sequences) and `r2` are running. Nothing found yet."""
    auditor = Auditor()
    running = (ev.RequestAdmitted(request_id="r1"), ev.RequestAdmitted(request_id="r2"))
    assert auditor.observe(make_batch(STARTED, submitted("r1", n=2), submitted("r2"), *running)) == []
    return auditor
