"""Each breakpoint pauses the engine at the step in which its event happened, no step earlier or later."""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kvscope.engine.service import EngineService
from kvscope.events import types as ev
from kvscope.events.fold import apply_batch
from kvscope.events.notable import BREAKPOINTS
from kvscope.events.state import Breakpoints, EngineState
from kvscope.events.types import Batch
from kvscope.transport.requests import ControlRefused

PATIENCE_S = 20.0


class World(NamedTuple):
    """An engine's settings, and its work: (number of prompt tokens, sampling parameters)."""

    settings: dict[str, Any]
    work: list[tuple[int, dict[str, Any]]]
    leaks: bool = False  # a block that nobody holds has a holder all the same


CROWD = [(7, {"max_tokens": 6}), (7, {"max_tokens": 6})]
WORLDS = {
    "copy-on-write": World({"num_blocks": 32}, [(4, {"max_tokens": 3}), (6, {"n": 3, "max_tokens": 8})]),
    "preemption": World({"num_blocks": 4}, CROWD),
    "eviction": World({"num_blocks": 6, "prefix_caching": True, "max_num_seqs": 1}, [(n, {}) for n in (13, 14, 15)]),
    "audit finding": World({"num_blocks": 32}, CROWD, leaks=True),
}


def build(make: Callable[..., Any], world: World) -> Any:
    fixture = make(**world.settings)
    if world.leaks:
        fixture.engine.scheduler.pool.allocate(1)
    for number, (num_prompt, options) in enumerate(world.work, 1):
        params = ev.SamplingParams(**{"ignore_eos": True, "max_tokens": 4, **options})
        fixture.engine.submit("", params, f"w{number}", [number + i % 9 for i in range(num_prompt)])
    return fixture


def serve_until(service: EngineService, condition: Callable[[], object]) -> None:
    """Let the service run until the condition holds; what was asked of it before comes first."""
    thread = threading.Thread(target=service.run)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    held = condition()
    service.stop("test ended")
    thread.join(PATIENCE_S)
    assert held, "the condition never held"


def pauses(fixture: Any) -> list[ev.EnginePaused]:
    return [event for batch in fixture.sink.batches for event in batch.events if isinstance(event, ev.EnginePaused)]


def steps_of(batches: list[Batch], kind: type[ev.Event]) -> list[int]:
    return [batch.step for batch in batches if any(isinstance(event, kind) for event in batch.events)]


@pytest.mark.parametrize("name", WORLDS)
def test_it_pauses_at_the_step_of_the_event(name: str, fake_engine: Callable[..., Any]) -> None:
    free_run = build(fake_engine, WORLDS[name])
    free_run.run(checked=False)
    expected = steps_of(free_run.sink.batches, BREAKPOINTS[name])
    fixture = build(fake_engine, WORLDS[name])
    service = EngineService(fixture.engine)
    service.set_breakpoints(Breakpoints(events=(name,)))
    serve_until(service, lambda: pauses(fixture))
    assert fixture.engine.step_number == expected[0] > 0
    assert pauses(fixture) == [ev.EnginePaused(reason=f"{name} at step {expected[0]}")]
    assert WORLDS[name].leaks or fixture.sink.auditor.state == fixture.engine.state()


def test_it_stays_set_and_pauses_again_and_again(fake_engine: Callable[..., Any]) -> None:
    """Every step with a copy is one pause; steps that were asked for end there too."""
    world = WORLDS["copy-on-write"]._replace(work=[(6, {"n": 3}), (13, {"n": 2, "max_tokens": 9}), (5, {"n": 2})])
    free_run = build(fake_engine, world._replace(settings={"num_blocks": 32, "max_num_seqs": 3}))
    free_run.run(checked=False)
    expected = steps_of(free_run.sink.batches, ev.BlockCopied)
    assert len(expected) > 1
    fixture = build(fake_engine, world._replace(settings={"num_blocks": 32, "max_num_seqs": 3}))
    service, engine = EngineService(fixture.engine), fixture.engine
    service.set_breakpoints(Breakpoints(events=("copy-on-write",)))
    resumed = 0

    def every_pause_answered() -> bool:
        nonlocal resumed
        if len(pauses(fixture)) > resumed and engine.status == "paused" and resumed < len(expected):
            resumed += 1
            assert engine.step_number == expected[resumed - 1]
            assert engine.pause_reason.endswith(f" at step {expected[resumed - 1]}")
            if resumed == 1:
                service.step(100)
            else:
                service.resume()
        return not engine.has_work() and resumed == len(expected)

    serve_until(service, every_pause_answered)
    assert len(pauses(fixture)) == len(expected)


@pytest.mark.parametrize("free_below", [3, 5, 12])
def test_free_blocks_falling_below(free_below: int, fake_engine: Callable[..., Any]) -> None:
    world = World({"num_blocks": 12}, [(9, {"max_tokens": 9}), (5, {"max_tokens": 14}), (17, {"max_tokens": 5})])
    free_run = build(fake_engine, world)
    free_run.run(checked=False)
    state, expected = EngineState(), 0
    for batch in free_run.sink.batches:
        state = apply_batch(state, batch)
        if not expected and state.num_free_blocks() + state.num_cached_blocks() < free_below:
            expected = state.step
    fixture = build(fake_engine, world)
    service = EngineService(fixture.engine)
    service.set_breakpoints(Breakpoints(free_below=free_below))
    serve_until(service, lambda: pauses(fixture))
    assert fixture.engine.step_number == expected > 0
    assert pauses(fixture)[0].reason.endswith(f"free blocks, below {free_below}, at step {expected}")


def test_cached_blocks_count_as_free(fake_engine: Callable[..., Any]) -> None:
    """They can be handed out, as in what a waiting request says; else a warm prefix cache would hide every shortage."""
    work = [(13, {"max_tokens": 8}), (14, {"max_tokens": 8}), (15, {"max_tokens": 8})]
    fixture = build(fake_engine, World({"num_blocks": 8, "prefix_caching": True, "max_num_seqs": 1}, work))
    fixture.run(checked=False)
    pool = fixture.engine.scheduler.pool
    assert pool.num_free_blocks < 4 <= pool.num_available_blocks
    params = ev.SamplingParams(ignore_eos=True, max_tokens=8)
    fixture.engine.submit("", params, "w4", [9] * 16)
    service = EngineService(fixture.engine)
    service.set_breakpoints(Breakpoints(free_below=4))
    serve_until(service, lambda: pauses(fixture) or not fixture.engine.has_work())
    assert pauses(fixture)[0].reason.startswith("3 free blocks, below 4, at step ")


def test_a_refusal_pauses_before_the_next_step(fake_engine: Callable[..., Any]) -> None:
    fixture = build(fake_engine, WORLDS["copy-on-write"])
    service = EngineService(fixture.engine)
    service.set_breakpoints(Breakpoints(events=("refusal",)))
    with pytest.raises(ControlRefused):
        service.submit("", ev.SamplingParams(), None)
    serve_until(service, lambda: pauses(fixture))
    assert pauses(fixture) == [ev.EnginePaused(reason="refusal at step 0")]
    assert fixture.engine.step_number == 0


def test_cleared_means_no_pause(fake_engine: Callable[..., Any]) -> None:
    fixture = build(fake_engine, WORLDS["preemption"])
    service = EngineService(fixture.engine)
    service.set_breakpoints(Breakpoints(events=tuple(BREAKPOINTS), free_below=2))
    service.set_breakpoints(Breakpoints())
    serve_until(service, lambda: not fixture.engine.has_work())
    assert pauses(fixture) == []
    assert fixture.sink.auditor.state.breakpoints == Breakpoints()


def test_more_free_blocks_than_there_are(fake_engine: Callable[..., Any]) -> None:
    service = EngineService(fake_engine(num_blocks=6).engine)
    with pytest.raises(ControlRefused, match="free_below is 7; the pool has 6 blocks"):
        service.set_breakpoints(Breakpoints(free_below=7))
