"""Sampling: exact distributions, and tokens that depend on nothing but the sequence itself."""

from collections import Counter
from typing import Any

import pytest
import torch

from kvscope.engine import sampler
from kvscope.engine.choice import Choice, Draw
from kvscope.engine.model_loader import LoadedModel
from kvscope.engine.sampler import choose_tokens
from kvscope.events.types import SamplingParams

TIE = 1e-4
LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))


def choose_token(logits: torch.Tensor, params: SamplingParams, noise_key: tuple[object, ...]) -> Choice:
    """A draw alone."""
    return choose_tokens([Draw(logits, params, noise_key)])[0]


def draws(params: SamplingParams, count: int = 4_000) -> dict[int, float]:
    chosen = Counter(choose_token(LOGITS, params, (1, 0, position)).token_id for position in range(count))
    return {token: number / count for token, number in chosen.items()}


def test_greedy_takes_the_best_and_tells_the_margin() -> None:
    choice = choose_token(torch.tensor([1.0, 3.0, 2.5]), SamplingParams(temperature=0.0), (0,))
    assert choice == (1, 0.5)


def test_temperature_one_draws_from_the_softmax() -> None:
    shares = draws(SamplingParams(temperature=1.0))
    for token, probability in enumerate([0.5, 0.25, 0.15, 0.1]):
        assert shares[token] == pytest.approx(probability, abs=0.03)  # four standard deviations


def test_temperature_sharpens() -> None:
    weights = torch.tensor([0.5, 0.25, 0.15, 0.1]) ** 2
    shares = draws(SamplingParams(temperature=0.5))
    for token, probability in enumerate((weights / weights.sum()).tolist()):
        assert shares[token] == pytest.approx(probability, abs=0.03)


def test_top_k_keeps_the_best() -> None:
    shares = draws(SamplingParams(top_k=2))
    assert set(shares) == {0, 1}
    assert shares[0] == pytest.approx(2 / 3, abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert set(draws(SamplingParams(top_p=0.5))) == {0}
    assert set(draws(SamplingParams(top_p=0.51))) == {0, 1}
    assert set(draws(SamplingParams(top_p=1.0))) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 5.0])
def test_top_p_of_many_tokens_is_what_sorting_all_gives(top_p: float, sharpness: float) -> None:
    """Also where next to all tokens belong to it."""
    row = sharpness * torch.randn(3_000, generator=torch.Generator().manual_seed(4)) + torch.arange(3_000) * 1e-5
    probabilities, order = torch.sort(torch.softmax(row.double(), 0), descending=True)
    inside = order[torch.cumsum(probabilities, 0) - probabilities < top_p]
    found = sampler._restrict(row[None].clone(), [SamplingParams(top_p=top_p)])[0]
    differing = set(inside.tolist()) ^ set(found.isfinite().nonzero().flatten().tolist())
    assert len(differing) <= 1  # the last one, by rounding
    assert found[inside[0]] == row[inside[0]]


def test_equal_keys_give_equal_noise_and_others_do_not() -> None:
    params = SamplingParams()
    flat = torch.zeros(1_000)
    first = choose_token(flat, params, (5, 0, 7))
    assert choose_token(flat, params, (5, 0, 7)) == first
    others = [(6, 0, 7), (5, 1, 7), (5, 0, 8)]
    assert all(choose_token(flat, params, key).token_id != first.token_id for key in others)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-40, 1e-300])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    assert choose_token(LOGITS, SamplingParams(temperature=temperature), (1, 0, 3)) == choose_token(
        LOGITS, SamplingParams(temperature=0.0), (0,)
    )


def test_nan_is_never_chosen() -> None:
    with pytest.raises(FloatingPointError, match="NaN"):
        choose_token(torch.tensor([0.1, float("nan")]), SamplingParams(temperature=0.0), (0,))


def test_draws_at_once_are_the_draws_alone() -> None:
    """Greedy and sampled ones, with all kinds of restrictions, in any order; the logits stay as they are."""
    options = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6, temperature=1.3),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(top_p=0.01),
    ]
    rows = torch.randn(18, 500, generator=torch.Generator().manual_seed(2)) * 4
    wanted = [Draw(row, options[i % 6], (i, 0, 5)) for i, row in enumerate(rows)]
    before = rows.clone()
    alone = [choose_token(*draw) for draw in wanted]
    for order in (wanted, wanted[::-1], wanted[1:4], wanted[:1]):
        found = dict(zip((draw.noise_key[0] for draw in order), choose_tokens(order), strict=True))
        assert found == {draw.noise_key[0]: alone[draw.noise_key[0]] for draw in order}  # type: ignore[index]
    assert rows.equal(before)
    assert choose_tokens([]) == []


def test_one_row_of_nan_among_others() -> None:
    rows = [Draw(LOGITS * factor, SamplingParams(temperature=0.0), (0,)) for factor in (1, float("nan"))]
    with pytest.raises(FloatingPointError, match="NaN"):
        choose_tokens(rows)


def test_a_vocabulary_of_one() -> None:
    assert choose_token(torch.tensor([0.3]), SamplingParams(), (0,)).token_id == 0


PROMPTS = ["ROMEO:", "To be, or not to be", "My lord, my lord, my lord, my lord", "KING:\nWhat say", "O"]


def sample(fixture: Any, prompts: list[str], n: int) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
    """Every candidate's tokens and choice margins."""
    requests = {
        prompt: fixture.engine.submit(
            prompt, SamplingParams(n=n, max_tokens=24, temperature=0.8, top_p=0.95, seed=11), f"r{i}"
        )
        for i, prompt in enumerate(prompts)
    }
    fixture.run(checked=False)
    fixture.check()
    return {
        (prompt, sequence.index): (sequence.generated, sequence.choice_margins)
        for prompt, request in requests.items()
        for sequence in request.sequences
    }


@pytest.mark.parametrize("n", [1, 3])
def test_sampled_tokens_do_not_depend_on_the_surroundings(real_engine: Any, tiny: LoadedModel, n: int) -> None:
    alone: dict[Any, Any] = {}
    for prompt in PROMPTS:
        alone |= sample(real_engine(tiny, block_size=16), [prompt], n)
    surroundings = {
        "batch": real_engine(tiny, block_size=16),
        "block size": real_engine(tiny, block_size=4),
        "chunks": real_engine(tiny, block_size=8, max_num_batched_tokens=5),
        "preemption": real_engine(tiny, block_size=4, num_gpu_blocks_override=8 + 8 * n),
    }
    for name, fixture in surroundings.items():
        assert_equal_but_for_ties(alone, sample(fixture, PROMPTS, n), name)
    assert surroundings["preemption"].engine.counters.preemptions > 0


def assert_equal_but_for_ties(expected: Any, found: Any, name: str) -> None:
    for key, (tokens, margins) in expected.items():
        for place, (left, right) in enumerate(zip(tokens, found[key][0], strict=False)):
            if left != right:
                assert margins[place] < TIE, f"{name}: {key} differs at token {place} with margin {margins[place]}"
                break
        else:
            assert len(tokens) == len(found[key][0])
