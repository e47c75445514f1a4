"""A real stream: an engine with a fake runner and a clock that counts, on a pool so small that everything happens."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kvscope.engine.engine import Engine
from kvscope.engine.sampler import choose_tokens
from kvscope.engine.sinks import AuditSink
from kvscope.events.types import Batch, Event, SamplingParams
from kvscope.transport.recording import Recording

from ..engine.conftest import FakeRunner, FakeTokenizer, fake_info

Change = Callable[[Event], Iterable[Event]]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # two full blocks of four, and two slots of a third
MS = 1_000_000


def run_engine(
    num_blocks: int,
    requests: list[tuple[list[int], dict[str, object]]],
    *,
    together: bool,
    steps_between: int = 0,
    **changes: object,
) -> list[Batch]:
    """Requests `r1, r2, ...`, all at once or one after the other, or overlapping: a few steps apart.

    The clock moves 1 ms whenever it is read.
    """
    info = fake_info(**{"num_blocks": num_blocks, "prefix_caching": True, **changes})
    sink, clock = AuditSink(keep=True), itertools.count()
    runner = FakeRunner(info.num_blocks, info.block_size)
    engine = Engine(info, runner, FakeTokenizer(), sink, choose=choose_tokens, clock_ns=lambda: next(clock) * MS)
    for number, (prompt, options) in enumerate(requests, 1):
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **options})
        engine.submit("words", params, f"r{number}", list(prompt))
        steps = 0
        while engine.has_work() and (not together or steps < steps_between):
            engine.step()
            steps += 1
    while engine.has_work():
        engine.step()
    engine.stop("over")
    assert sink.auditor.findings == []
    return sink.batches


def recording_of(batches: Iterable[Batch]) -> Recording:
    return Recording(Path("run.mcap"), list(enumerate(batches)))


def edited(recording: Recording, change: Change) -> Recording:
    """The same recording with each event replaced by what `change` makes of it."""
    batches = [
        Batch(
            epoch=batch.epoch,
            step=batch.step,
            phase=batch.phase,
            time_ns=batch.time_ns,
            events=tuple(new for event in batch.events for new in change(event)),
        )
        for _, batch in recording.batches
    ]
    return recording_of(batches)


@pytest.fixture(scope="session")
def calm() -> Recording:
    """Two candidates share a prompt and are copied on write; then the same prompt hits the prefix cache."""
    requests = [(PROMPT, {"n": 2, "max_tokens": 3}), (PROMPT, {"max_tokens": 4})]
    return recording_of(run_engine(16, requests, together=False))


@pytest.fixture(scope="session")
def crowded() -> Recording:
    """Three requests that do not fit together: waiting, preemption, eviction."""
    prompts = [list(range(start, start + 6)) for start in (5, 15, 25)]
    return recording_of(run_engine(7, [(prompt, {"max_tokens": 12}) for prompt in prompts], together=True))
