"""Beam search: the beams of transformers' `generate`, on blocks that are shared, copied and given back every step."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from kvscope.engine.model_loader import LoadedModel
from kvscope.events import types as ev
from kvscope.events.types import SamplingParams

PROMPTS = ["ROMEO:", "To be, or not to be", "KING RICHARD III:\nNow is the winter", "a"]
SCORE_TOLERANCE = 1e-4


def reference_beams(loaded: LoadedModel, prompt: str, params: SamplingParams) -> list[tuple[list[int], float]]:
    """transformers' own beam search on its own cache: tokens and score of every hypothesis, best first."""
    model, ids = loaded.model, loaded.tokenizer(prompt, return_tensors="pt")
    paged = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        output = model.generate(
            **ids,
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            length_penalty=params.length_penalty,
            max_new_tokens=params.max_tokens,
            return_dict_in_generate=True,
            output_scores=True,
            repetition_penalty=1.0,
            eos_token_id=None if params.ignore_eos else sorted(loaded.eos_token_ids),
            pad_token_id=0,
        )
    finally:
        model.set_attn_implementation(paged)
    num_prompt = ids["input_ids"].shape[1]
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    return [
        (row[num_prompt : num_prompt + length].tolist(), score)
        for row, length, score in zip(output.sequences, lengths, output.sequences_scores.tolist(), strict=True)
    ]


def check_beams(request: Any, expected: list[tuple[list[int], float]]) -> None:
    """Scores equal within the tolerance; tokens equal, but for the order of hypotheses whose scores are that close."""
    ours = [(sequence.generated, sequence.score) for sequence in request.sequences]
    for (_, score), (_, wanted) in zip(ours, expected, strict=True):
        assert score == pytest.approx(wanted, abs=SCORE_TOLERANCE)
    for tokens, score in ours:
        near = [other for other, wanted in expected if abs(wanted - score) < SCORE_TOLERANCE]
        assert tokens in near or abs(expected[-1][1] - score) < SCORE_TOLERANCE  # a tie with the one left out


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("beam_width", [2, 4, 7])
def test_equal_to_transformers(real_engine: Any, tiny: LoadedModel, beam_width: int, length_penalty: float) -> None:
    fixture = real_engine(tiny, block_size=4)
    params = SamplingParams(beam_width=beam_width, max_tokens=16, length_penalty=length_penalty)
    requests = [fixture.engine.submit(prompt, params, f"r{i}") for i, prompt in enumerate(PROMPTS)]
    fixture.run()
    for prompt, request in zip(PROMPTS, requests, strict=True):
        check_beams(request, reference_beams(tiny, prompt, params))


@pytest.mark.parametrize("num_ends", [1, 2, 3])
def test_ends_early_as_transformers_does(real_engine: Any, tiny: LoadedModel, num_ends: int) -> None:
    frequent = [token for text in (",", "\n", " the") for token in tiny.tokenizer(text).input_ids[-1:]]
    ends = dataclasses.replace(tiny, eos_token_ids=frozenset(frequent[:num_ends]))
    fixture = real_engine(ends, block_size=4)
    lengths = set()
    for number, (prompt, penalty) in enumerate(itertools.product(PROMPTS, [0.0, 1.0, 2.0])):
        params = SamplingParams(beam_width=3, max_tokens=16, length_penalty=penalty)
        request = fixture.engine.submit(prompt, params, f"r{number}")
        fixture.run()
        check_beams(request, reference_beams(ends, prompt, params))
        lengths |= {len(sequence.generated) for sequence in request.sequences}
    assert len(lengths) > 2


def test_beams_are_the_same_under_preemption_and_a_small_budget(real_engine: Any, tiny: LoadedModel) -> None:
    params = SamplingParams(beam_width=4, max_tokens=16)
    fixture = real_engine(tiny, block_size=4, num_gpu_blocks_override=24, max_num_batched_tokens=9)
    requests = [fixture.engine.submit(prompt, params, f"r{i}") for i, prompt in enumerate(PROMPTS)]
    fixture.run()
    assert fixture.engine.counters.preemptions > 0
    for prompt, request in zip(PROMPTS, requests, strict=True):
        check_beams(request, reference_beams(tiny, prompt, params))


def test_beams_preempted_between_each_others_offers_are_the_undisturbed_ones(fake_engine: Any) -> None:
    """A budget of fewer tokens than there are beams: some have offered their candidates when all lose their blocks."""
    params = SamplingParams(beam_width=4, max_tokens=8, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9]

    def hypotheses(**changes: Any) -> tuple[Any, int]:
        fixture = fake_engine(block_size=2, prefix_caching=True, **changes)
        scheduler, preempt, cut_short = fixture.engine.scheduler, fixture.engine.scheduler._preempt, []

        def look(victim: Any, *rest: Any) -> None:
            cut_short.append(bool(victim.search.candidates))
            preempt(victim, *rest)

        scheduler._preempt = look
        requests = [fixture.engine.submit("", params, f"r{number}", [*prompt, number]) for number in range(3)]
        fixture.run()
        return [[(s.generated, s.score) for s in r.sequences] for r in requests], sum(cut_short)

    undisturbed, _ = hypotheses(num_blocks=200, max_num_seqs=12)
    disturbed = 0
    for num_blocks, budget in itertools.product((19, 20, 21, 22, 24), range(2, 8)):
        found, num_cut_short = hypotheses(num_blocks=num_blocks, max_num_seqs=12, max_num_batched_tokens=budget)
        assert found == undisturbed
        disturbed += num_cut_short
    assert disturbed > 3


def test_common_history_is_shared_and_copied_only_where_beams_part(fake_engine: Any) -> None:
    """A full block is never copied; after every step each beam holds what its history says."""
    fixture = fake_engine(num_blocks=40, max_model_len=64)
    fixture.engine.submit("", SamplingParams(beam_width=4, max_tokens=20, ignore_eos=True), "r1", [1, 2, 3, 4, 5, 6])
    shared_lengths = []
    while fixture.engine.has_work():
        fixture.engine.step()
        fixture.check()
        tables = [sequence.block_table for sequence in fixture.engine.requests["r1"].sequences]
        shared_lengths.append(sum(len(set(column)) < len(column) for column in zip(*tables, strict=False)))
    events = [event for batch in fixture.sink.batches for event in batch.events]
    assert sum(isinstance(event, ev.SequenceForked) for event in events) > 5
    assert any(isinstance(event, ev.BlockCopied) for event in events)
    assert max(shared_lengths) > 2, "more is shared than the prompt"


def test_without_an_end_token_every_hypothesis_has_max_tokens(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=40)
    request = fixture.engine.submit("", SamplingParams(beam_width=3, max_tokens=5), "r1", [1, 2, 3])
    fixture.run()
    assert [len(sequence.generated) for sequence in request.sequences] == [5, 5, 5]
    assert {sequence.finish_reason for sequence in request.sequences} == {"length"}
    scores = [sequence.score for sequence in request.sequences]
    assert scores == sorted(scores, reverse=True)


def test_cancelled_in_the_middle_gives_everything_back(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=40)
    fixture.engine.submit("", SamplingParams(beam_width=4, max_tokens=20), "r1", [1, 2, 3])
    for _ in range(6):
        fixture.engine.step()
    fixture.engine.cancel("r1")
    fixture.check()
    assert fixture.engine.scheduler.pool.num_free_blocks == 40


def test_exhaustive_search_when_the_width_covers_everything(fake_engine: Any) -> None:
    """With as many beams as there are continuations of the first token, two tokens are searched completely."""
    fixture = fake_engine(num_blocks=200, max_num_seqs=64)
    runner = fixture.engine._runner
    request = fixture.engine.submit("", SamplingParams(beam_width=25, max_tokens=2, ignore_eos=True), "r1", [1])
    fixture.run()
    first = torch.log_softmax(logits_after(runner, [1]), -1)
    best = sorted(
        (
            (first[a] + torch.log_softmax(logits_after(runner, [1, a]), -1)[b]).item() / 2
            for a in torch.topk(first, 25).indices.tolist()
            for b in range(runner.VOCABULARY)
        ),
        reverse=True,
    )[:25]
    assert [sequence.score for sequence in request.sequences] == pytest.approx(best, abs=1e-5)


def logits_after(runner: Any, tokens: list[int]) -> torch.Tensor:
    context = tuple((token, position) for position, token in enumerate(tokens))
    generator = torch.Generator().manual_seed(hash(context) & 0x7FFFFFFF)
    return torch.randn(runner.VOCABULARY, generator=generator)
