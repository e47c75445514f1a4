"""Up to 64 candidates of one prompt: shared, copied where they part, preempted together."""

from typing import Any

import pytest

from kvscope.events import types as ev
from kvscope.events.types import SamplingParams

N = 64
PROMPT = [1, 2, 3, 4, 5, 6]


def params(seed: int = 3) -> SamplingParams:
    return SamplingParams(n=N, max_tokens=6, temperature=1.0, seed=seed, ignore_eos=True)


def test_sixty_four_candidates_share_the_prompt_and_copy_what_they_write_into(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=300, max_num_seqs=N, max_num_batched_tokens=128)
    request = fixture.engine.submit("", params(), "r", PROMPT)
    fixture.engine.step()
    fixture.check()
    assert sorted(fixture.engine.scheduler.pool.ref_counts, reverse=True)[:3] == [N, N, 0]
    fixture.engine.step()
    fixture.check()
    assert fixture.engine.counters.copies == N - 1, "the last holder of the partial block writes in place"
    fixture.run()
    assert len({tuple(sequence.generated) for sequence in request.sequences}) > N // 2


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_all_of_them_give_way_together_and_say_the_same_afterwards(fake_engine: Any, preemption: str) -> None:
    alone = fake_engine(num_blocks=300, max_num_seqs=2 * N)
    expected = alone.engine.submit("", params(), "r", PROMPT)
    alone.run(checked=False)
    fixture = fake_engine(
        num_blocks=200, max_num_seqs=2 * N, max_num_batched_tokens=256, num_host_blocks=300, preemption=preemption
    )
    fixture.engine.submit("", params(seed=4), "older", PROMPT)
    request = fixture.engine.submit("", params(), "r", PROMPT)
    fixture.run()
    events = [event for batch in fixture.sink.batches for event in batch.events]
    assert {event.mode for event in events if isinstance(event, ev.RequestPreempted)} == {preemption}
    assert [s.generated for s in request.sequences] == [s.generated for s in expected.sequences]
