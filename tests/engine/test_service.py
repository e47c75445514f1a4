"""Engine control from outside: submit, cancel, pause, resume, step N. Waits on conditions, never on durations."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvscope.engine.service import EngineService
from kvscope.events import types as ev
from kvscope.events.state import FullState
from kvscope.events.types import SamplingParams
from kvscope.transport.requests import ControlRefused

PATIENCE_S = 20.0
LONG = SamplingParams(max_tokens=30, ignore_eos=True)


class Served:
    """A service running in its own thread."""

    def __init__(self, fixture: Any, **options: Any) -> None:
        self.fixture, self.engine = fixture, fixture.engine
        self.service = EngineService(self.engine, **options)
        self.thread = threading.Thread(target=self.service.run)
        self.thread.start()

    def stop(self) -> None:
        self.service.stop("test ended")
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def events(self, kind: type[ev.Event]) -> list[Any]:
        return [event for batch in list(self.fixture.sink.batches) for event in batch.events if isinstance(event, kind)]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.002)


@pytest.fixture
def served(fake_engine: Any) -> Iterator[Served]:
    served = Served(fake_engine(num_blocks=32))
    yield served
    served.stop()
    served.fixture.check()


def test_a_prompt_runs_to_its_end(served: Served) -> None:
    assert served.service.submit("1 2 3", LONG, None) == "r1"
    assert served.service.submit("1 2 3", LONG, None) == "r2"
    wait_until(lambda: len(served.events(ev.RequestFinished)) == 2)
    assert served.engine.requests["r1"].sequences[0].finish_reason == "length"


def test_a_refusal_is_answered_and_seen_by_all(served: Served) -> None:
    with pytest.raises(ControlRefused, match="the prompt is empty"):
        served.service.submit("", LONG, None)
    wait_until(lambda: served.events(ev.RequestRefused))
    with pytest.raises(ControlRefused, match="request id"):
        served.service.submit("1", LONG, "a/../b")


def test_paused_means_no_step_and_step_runs_exactly_as_many(served: Served) -> None:
    served.service.pause()
    wait_until(lambda: served.engine.status == "paused")
    served.service.submit("1 2 3", LONG, "r1")
    wait_until(lambda: "r1" in served.engine.requests)
    assert served.engine.step_number == 0
    for expected in (1, 2, 7):
        served.service.step(expected - served.engine.step_number)
        wait_until(lambda expected=expected: len(served.events(ev.StepCompleted)) == expected)
        time.sleep(0.01)  # a step too many would come at once
        assert served.engine.step_number == expected
    served.service.resume()
    wait_until(lambda: served.events(ev.RequestFinished))


def test_step_right_after_pause_is_in_order(served: Served) -> None:
    served.service.submit("1 2 3", LONG, "r1")
    served.service.pause()
    served.service.step(1)
    wait_until(lambda: served.engine.status == "paused")
    wait_until(lambda: served.events(ev.StepCompleted))


def test_steps_add_up_and_resuming_forgets_them(served: Served) -> None:
    served.service.pause()
    served.service.submit("1 2 3", SamplingParams(max_tokens=60, ignore_eos=True), "r1")
    for _ in range(3):
        served.service.step(2)
    wait_until(lambda: len(served.events(ev.StepCompleted)) == 6)
    served.service.step(10_000)
    served.service.resume()
    served.service.pause()
    wait_until(lambda: served.engine.status == "paused")
    step = served.engine.step_number
    served.service.submit("4 5 6", LONG, "r2")
    wait_until(lambda: "r2" in served.engine.requests)
    assert served.engine.step_number == step


def test_an_engine_that_was_started_paused_can_be_stepped(fake_engine: Any) -> None:
    fixture = fake_engine()
    fixture.engine.pause()
    served = Served(fixture)
    served.service.submit("1 2 3", SamplingParams(max_tokens=4), "r1")
    served.service.step(1)
    wait_until(lambda: served.events(ev.StepCompleted))
    served.stop()


def test_an_id_is_given_once(fake_engine: Any) -> None:
    """The engine's thread does not run: what was promised is still in the queue."""
    service = EngineService(fake_engine(num_blocks=32).engine)
    assert service.submit("1 2", LONG, "r1") == "r1"
    assert service.submit("1 2", LONG, None) == "r2"
    with pytest.raises(ControlRefused, match="a request r2 exists already"):
        service.submit("1 2", LONG, "r2")
    service.cancel("r1")  # promised, so it can be cancelled


def test_cancel_right_after_submit(served: Served) -> None:
    served.service.pause()
    served.service.submit("1 2 3", LONG, "r1")
    served.service.cancel("r1")
    wait_until(lambda: served.events(ev.RequestFinished))
    assert served.engine.requests["r1"].sequences[0].finish_reason == "cancelled"


def test_the_queue_is_bounded(fake_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope.engine.service.MAX_WAITING_REQUESTS", 3)
    service = EngineService(fake_engine(num_blocks=32).engine)
    for _ in range(3):
        service.submit("1 2", LONG, None)
    with pytest.raises(ControlRefused, match="3 requests are waiting already"):
        service.submit("1 2", LONG, None)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(
    fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine().engine
    monkeypatch.setattr(engine.intake, "_tokenizer", None)  # encoding would fail
    with pytest.raises(ControlRefused, match="has 1000000 characters; more than 8192 cannot fit"):
        EngineService(engine).submit("x" * 1_000_000, LONG, None)
    with pytest.raises(ControlRefused, match="not valid UTF-8"):
        EngineService(engine).submit("x \udcff", LONG, None)


def test_a_token_that_the_model_does_not_know_is_refused(served: Served) -> None:
    """A tokenizer may know more than the model has embeddings for; on a GPU that would be the end of the engine."""
    with pytest.raises(
        ControlRefused, match="the prompt holds token 50, which the tokenizer knows and the model does not"
    ):
        served.service.submit("1 50 2", LONG, None)


def test_stepping_a_running_engine_is_refused(served: Served) -> None:
    with pytest.raises(ControlRefused, match="pause it first"):
        served.service.step(1)
    served.service.pause()
    with pytest.raises(ControlRefused, match="1 to"):
        served.service.step(0)


def test_cancel_gives_every_block_back(served: Served) -> None:
    served.service.pause()
    served.service.submit("1 2 3 4 5 6", SamplingParams(n=3, max_tokens=20, ignore_eos=True), "r1")
    served.service.step(4)
    wait_until(lambda: len(served.events(ev.StepCompleted)) == 4)
    assert served.engine.scheduler.pool.num_free_blocks < 32
    served.service.cancel("r1")
    wait_until(lambda: served.events(ev.RequestFinished))
    assert served.engine.scheduler.pool.num_free_blocks == 32
    with pytest.raises(ControlRefused, match="no request"):
        served.service.cancel("r9")


def test_a_failing_step_is_said_in_the_last_batch(fake_engine: Any) -> None:
    fixture = fake_engine()
    service = EngineService(fixture.engine)
    service.submit("1 2 3", LONG.__class__(max_tokens=4), "r1")

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    fixture.engine._runner.run = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        service.run()
    (stopped,) = [event for event in fixture.sink.batches[-1].events if isinstance(event, ev.EngineStopped)]
    assert stopped.reason == "RuntimeError: the device is gone"


def test_a_loss_is_healed_while_the_engine_is_idle(served: Served) -> None:
    """The last batch before idleness is dropped; viewers must not stay LIVE over the hole."""
    served.service.submit("1 2 3", SamplingParams(max_tokens=2, ignore_eos=True), "r1")
    wait_until(lambda: served.events(ev.RequestFinished))
    served.fixture.sink.needs_full_state = True
    wait_until(lambda: served.events(FullState))
    served.fixture.sink.needs_full_state = False
    assert served.events(FullState)[0].state.requests["r1"].status == "finished"


def test_a_paced_engine_keeps_its_distance(fake_engine: Any) -> None:
    served = Served(fake_engine(num_blocks=32), max_steps_per_second=50)
    served.service.submit("1 2 3", SamplingParams(max_tokens=6, ignore_eos=True), "r1")
    wait_until(lambda: served.events(ev.RequestFinished))
    served.stop()
    times = [batch.time_ns for batch in served.fixture.sink.batches if batch.phase == "plan"]
    assert all(later - earlier >= 0.019e9 for earlier, later in itertools.pairwise(times))


@pytest.mark.slow
def test_prompts_are_encoded_while_tokens_are_decoded(real_engine: Any, tiny: Any) -> None:
    """A tokenizer in two threads at once raises "Already borrowed"; so encoding has an instance of its own."""
    served = Served(real_engine(tiny, block_size=4))
    assert served.engine.intake._tokenizer is not served.engine._outputs._tokenizer
    names = [
        served.service.submit("My lord, " * 60, SamplingParams(max_tokens=12, ignore_eos=True), None) for _ in range(40)
    ]
    wait_until(lambda: len(served.events(ev.RequestFinished)) == len(names))
    served.stop()
