"""Random operation sequences over a small pool: after every one, every invariant holds.

The runner is the fake one, which keeps a KV cache of its own and reads every context back through the block table: a
wrong table, a lost copy or an overwritten slot fails at once.
"""

import contextlib
import random
from typing import Any

import pytest

from kvscope.engine.intake import RequestRefusedError
from kvscope.engine.sinks import AuditSink
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Batch, BatchesDropped, BlocksOutOfWindow, SamplingParams

NUM_RUNS = 2_000
OPERATIONS_PER_RUN = 40


def random_params(rng: random.Random) -> SamplingParams:
    if rng.random() < 0.15:
        return SamplingParams(
            beam_width=rng.choice([2, 3, 4]),
            max_tokens=rng.randint(1, 12),
            length_penalty=rng.choice([0.0, 1.0, 2.0]),
            ignore_eos=rng.random() < 0.3,
        )
    return SamplingParams(
        n=rng.choice([1, 1, 2, 3, 4]),
        max_tokens=rng.randint(1, 12),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randint(0, 3),
        stop=rng.choice([(), (" 7",)]),
        ignore_eos=rng.random() < 0.3,
        cache_salt=rng.choice(["", "", "other"]),
    )


def random_prompt(rng: random.Random) -> list[int]:
    """Of two words, so that many prompts begin alike."""
    return [rng.randint(1, 2) for _ in range(rng.randint(0, 14))]


def run_operations(fake_engine: Any, seed: int, **changes: Any) -> Any:
    """One random life of an engine; the checks run after every operation."""
    rng = random.Random(seed)
    fixture = fake_engine(
        **changes,
        num_blocks=rng.randint(3, 16),
        block_size=rng.choice([1, 2, 3, 4]),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(1, 24),
        max_model_len=rng.choice([16, 64]),
        eos=frozenset({0}),
        prefix_caching=rng.random() < 0.6,
        num_host_blocks=rng.choice([0, 2, 20]),
        preemption=rng.choice(["recompute", "swap", "auto"]),
        admission=rng.choice(["now", "worst-case", "watermark"]),
        sliding_window=rng.choice([None, None, 1, 3, 6]),
    )
    engine = fixture.engine
    for number in range(OPERATIONS_PER_RUN):
        operation = rng.choices(["submit", "step", "cancel", "pause"], [3, 10, 1, 0.3])[0]
        if operation == "submit":
            prompt = random_prompt(rng)
            with contextlib.suppress(RequestRefusedError):
                engine.submit("", random_params(rng), f"r{number}", prompt)
        elif operation == "step" and engine.has_work():
            engine.step()
        elif operation == "cancel" and engine.requests:
            engine.cancel(rng.choice(list(engine.requests)))
        elif operation == "pause":
            rng.choice([engine.pause, engine.resume])()
        fixture.check()
    steps = fixture.run()
    assert steps < 1_000, "no livelock"
    assert engine.info.admission != "worst-case" or engine.counters.preemptions == 0
    state = fixture.sink.auditor.state
    assert state.num_free_blocks() + state.num_cached_blocks() == engine.info.num_blocks
    return fixture


@pytest.mark.parametrize("chunk", range(20))
def test_invariants_hold_after_any_operations(fake_engine: Any, chunk: int) -> None:
    copies = preemptions = finished = hits = evictions = out_of_window = 0
    for seed in range(chunk * NUM_RUNS // 20, (chunk + 1) * NUM_RUNS // 20):
        try:
            fixture = run_operations(fake_engine, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        copies += fixture.engine.counters.copies
        preemptions += fixture.engine.counters.preemptions
        finished += len(fixture.engine.finished_order)
        hits += fixture.engine.counters.prefix_hit_tokens
        evictions += fixture.engine.counters.evictions
        out_of_window += sum(isinstance(e, BlocksOutOfWindow) for b in fixture.sink.batches for e in b.events)
    assert copies > 0
    assert hits > 0
    assert evictions > 0
    assert out_of_window > 0
    assert preemptions > 0
    assert finished > 0


class LossySink(AuditSink):
    """Loses a quarter of the batches, and asks for a full state as a publisher does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.needs_full_state = True  # it joins late: the engine's first batch went elsewhere
        self.num_lost = self.num_healed = 0
        self._rng, self._untold = random.Random(seed), 0

    def publish(self, batch: Batch) -> bool:
        heals = any(isinstance(event, FullState) for event in batch.events)
        if self._rng.random() < 0.25 or (self.needs_full_state and not heals):
            self.needs_full_state = True
            self.num_lost += 1
            self._untold += 1 + sum(e.num_batches for e in batch.events if isinstance(e, BatchesDropped))
            return False
        self.needs_full_state = False
        self.num_healed += heals
        return super().publish(batch)

    def take_dropped(self) -> int:
        untold, self._untold = self._untold, 0
        return untold


def test_lost_batches_are_healed_and_counted(fake_engine: Any) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        fixture = fake_engine(num_blocks=8, prefix_caching=True)
        fixture.engine._sink = sink = LossySink(seed)
        for number in range(25):
            if rng.random() < 0.3:
                with contextlib.suppress(RequestRefusedError):
                    fixture.engine.submit("", random_params(rng), f"r{number}", random_prompt(rng))
            elif fixture.engine.has_work():
                fixture.engine.step()
            if not sink.needs_full_state and sink.auditor.state.epoch:
                assert sink.auditor.state == fixture.engine.state()
        while sink.needs_full_state:
            fixture.engine.heal()
        assert sink.auditor.state == fixture.engine.state()
        assert sink.auditor.state.counters.dropped_batches == sink.num_lost
        assert sink.auditor.findings == []


def test_fold_of_all_batches_is_the_engines_state(fake_engine: Any) -> None:
    """From scratch, not along the way: the recorded batches alone rebuild the state, and no change goes unnoted."""
    for seed in range(50):
        fixture = run_operations(fake_engine, seed)
        state = EngineState()
        for batch in fixture.sink.batches:
            before = [(column, column.tolist()) for column in (state.ref_counts, state.written_slots)]
            state = apply_batch(state, batch)
            for column, old in before:
                changed = {place for place, number in enumerate(column) if number != old[place]}
                assert changed <= {*column.take_touched().tolist()}
                assert not any(column.touched)
        assert state == fixture.engine.state()
