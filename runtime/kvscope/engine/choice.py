"""What choosing a token gives, and the seeds of the draws. No torch: an engine without a model chooses too."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from kvscope.events.types import SamplingParams


class Choice(NamedTuple):
    """`margin` is the score of the chosen token minus that of the runner-up: near 0 means either would be right."""

    token_id: int
    margin: float


class Candidate(NamedTuple):
    """A token that may come next, with its log-probability."""

    token_id: int
    log_probability: float


class Draw(NamedTuple):
    """A token to be chosen: from one sequence's logits (whatever the runner makes), by the request's options."""

    logits: Any
    params: SamplingParams
    noise_key: tuple[object, ...]
    """Names the draw; equal keys give equal noise."""


# All draws of a step at once; each choice depends on its own draw alone.
ChooseTokens = Callable[[list[Draw]], list[Choice]]
# From one sequence's logits, its most probable next tokens, best first: what beam search compares.
RankTokens = Callable[[Any, int], list[Candidate]]


def draw_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that brought none."""
    return digest("request", engine_seed, request_id) >> 1


def digest(*key: object) -> int:
    """64 well-mixed bits of a key."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")
