"""Choosing tokens: greedy, temperature, top-k, top-p, with noise that depends on nothing but the sequence itself.

Every draw is the Gumbel-max trick (argmax of log-probability plus Gumbel noise, which samples the softmax exactly)
with noise seeded by (seed, candidate, position). So a sequence's tokens do not depend on what else is in the batch,
on the block size, or on having been preempted.
"""

import numpy as np
import torch

from kvscope.engine.choice import Candidate, Choice, Draw, digest
from kvscope.events.types import SamplingParams

MANY_CANDIDATES = 1024  # among so many, the smallest set that reaches top_p is looked for first
MIN_TEMPERATURE = 1e-5  # below, scores would overflow; the draw is greedy long before


def choose_tokens(draws: list[Draw]) -> list[Choice]:
    """Pick a token for each draw, whose logits are float32 `[vocab_size]`. Does not mutate.

    Raises:
        FloatingPointError: a logit is NaN; no choice would mean anything.
    """
    if not draws:
        return []
    rows = torch.stack([draw.logits for draw in draws])
    sampled = [i for i, draw in enumerate(draws) if draw.params.temperature >= MIN_TEMPERATURE]
    if len(sampled) == len(draws):
        rows = _perturbed(rows, draws)
    elif sampled:
        rows[sampled] = _perturbed(rows[sampled], [draws[i] for i in sampled])
    scores, numbers = rows.numpy(), np.arange(len(draws))
    best = scores.argmax(axis=1)  # of NaN and numbers, NaN
    highest = scores[numbers, best]
    if np.isnan(highest).any():
        raise FloatingPointError("the model's logits hold NaN")
    scores[numbers, best] = -np.inf
    margins = highest - scores.max(axis=1)
    return [Choice(*pair) for pair in zip(best.tolist(), margins.tolist(), strict=True)]


def rank_tokens(logits: torch.Tensor, count: int) -> list[Candidate]:
    """The `count` most probable tokens of one row of logits, float32 `[vocab_size]`, best first. Does not mutate.

    Raises:
        FloatingPointError: a logit is NaN; no choice would mean anything.
    """
    if torch.isnan(logits).any():
        raise FloatingPointError("the model's logits hold NaN")
    top = torch.topk(torch.log_softmax(logits, dim=-1), min(count, logits.numel()))
    return [Candidate(*pair) for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


def _perturbed(rows: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Log-probabilities `[num_draws, vocab_size]`, up to a constant, plus Gumbel noise."""
    temperatures = torch.tensor([draw.params.temperature for draw in draws])[:, None]
    scores = _restrict(rows / temperatures, [draw.params for draw in draws])
    uniform = torch.empty(scores.shape, dtype=torch.float64)
    for row, draw in zip(uniform, draws, strict=True):
        torch.rand(row.shape, generator=torch.Generator().manual_seed(digest(*draw.noise_key) >> 1), out=row)
    return scores - uniform.clamp_(1e-300, 1 - 1e-16).log_().neg_().log_().to(scores)


def _restrict(scores: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Scores outside a row's top-k and top-p become -inf; the best token always stays. Mutates `scores`."""
    for row, wanted in zip(scores, params, strict=True):
        if 0 < wanted.top_k < len(row):
            row.masked_fill_(row < torch.topk(row, wanted.top_k).values[-1], float("-inf"))
        if wanted.top_p < 1:
            best, indices = _nucleus(row, wanted.top_p)
            row.fill_(float("-inf")).index_copy_(0, indices, best)
    return scores


def _nucleus(row: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest best scores that hold that share of the probability, and their indices. Rarely sorts all of them."""
    total = torch.logsumexp(row, 0)
    for count in (min(MANY_CANDIDATES, len(row)), len(row)):
        best, indices = torch.topk(row, count)
        probabilities = torch.exp(best - total)
        before = torch.cumsum(probabilities, 0) - probabilities
        inside = int((before < share).sum().clamp_(min=1))
        if inside < count:
            break
    return best[:inside], indices[:inside]
