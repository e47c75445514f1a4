"""Choosing tokens: greedy, temperature, top-k, top-p, with noise that depends on nothing but the sequence itself.

Every draw is the Gumbel-max trick (argmax of log-probability plus Gumbel noise, which samples the softmax exactly)
with noise seeded by (seed, candidate, position). So a sequence's tokens do not depend on what else is in the batch,
on the block size, or on having been preempted.
"""

import numpy as np
import torch

from kvscope.engine.choice import Candidate, Choice, digest
from kvscope.events.types import SamplingParams

MIN_TEMPERATURE = 1e-5  # below, scores would overflow; the draw is greedy long before


def choose_token(logits: torch.Tensor, params: SamplingParams, noise_key: tuple[object, ...]) -> Choice:
    """Pick a token from one row of logits, float32 `[vocab_size]`. Does not mutate.

    `noise_key` names the draw; equal keys give equal noise.

    Raises:
        FloatingPointError: a logit is NaN; no choice would mean anything.
    """
    greedy = params.temperature < MIN_TEMPERATURE
    scores = (logits if greedy else _perturbed(logits, params, noise_key)).numpy()
    best = int(scores.argmax())  # of NaN and numbers, NaN
    if np.isnan(scores[best]):
        raise FloatingPointError("the model's logits hold NaN")
    second = max(scores[:best].max(initial=-np.inf), scores[best + 1 :].max(initial=-np.inf))
    return Choice(best, float(scores[best] - second))


def rank_tokens(logits: torch.Tensor, count: int) -> list[Candidate]:
    """The `count` most probable tokens of one row of logits, float32 `[vocab_size]`, best first. Does not mutate.

    Raises:
        FloatingPointError: a logit is NaN; no choice would mean anything.
    """
    if torch.isnan(logits).any():
        raise FloatingPointError("the model's logits hold NaN")
    top = torch.topk(torch.log_softmax(logits, dim=-1), min(count, logits.numel()))
    return [Candidate(*pair) for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


def _perturbed(logits: torch.Tensor, params: SamplingParams, noise_key: tuple[object, ...]) -> torch.Tensor:
    scores = _restrict(logits / params.temperature, params)
    generator = torch.Generator().manual_seed(digest(*noise_key) >> 1)
    uniform = torch.rand(scores.shape, generator=generator, dtype=torch.float64)
    gumbel = -torch.log(-torch.log(uniform.clamp_(1e-300, 1 - 1e-16)))
    return scores + gumbel.to(scores)


def _restrict(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scores outside top-k and top-p become -inf; the best token always stays."""
    if 0 < params.top_k < scores.numel():
        kth_best = torch.topk(scores, params.top_k).values[-1]
        scores = scores.masked_fill(scores < kth_best, float("-inf"))
    if params.top_p < 1:
        ordered, indices = torch.sort(scores, descending=True)
        probabilities = torch.softmax(ordered, dim=-1)
        before = torch.cumsum(probabilities, dim=-1) - probabilities
        scores = scores.index_fill(0, indices[before >= params.top_p], float("-inf"))
    return scores
