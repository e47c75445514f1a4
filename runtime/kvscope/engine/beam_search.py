"""Beam search without tensors or blocks: which continuations live on, which are ways to end, and when to stop.

Semantics are those of transformers' `generate` with `num_beams` and `early_stopping=False`, so that scores and tokens
can be compared: a beam scores the sum of its log-probabilities; a finished hypothesis that sum divided by
`length ** length_penalty`; the search ends when `width` hypotheses are finished and the best beam, were it to end
now, would not beat the worst of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvscope.engine.choice import Candidate
from kvscope.events.state import Hypothesis


class Continuation(NamedTuple):
    """Beam `beam` (an index of a sequence) with one token more; `score` is the log-probability of all its tokens."""

    beam: int
    token_id: int
    score: float


class Outcome(NamedTuple):
    """`ended` may be finished hypotheses, `survivors` are next step's beams; both best first."""

    ended: list[Continuation]
    survivors: list[Continuation]


@dataclass(slots=True)
class BeamSearch:
    """What a request remembers between steps.

    `candidates` collects each beam's best next tokens: a step's token budget may be too small for all beams, and only
    together can they be compared.
    """

    width: int
    length_penalty: float
    hypotheses: list[Hypothesis] = field(default_factory=list)  # best first
    scores: dict[int, float] = field(default_factory=lambda: {0: 0.0})  # by beam
    candidates: dict[int, list[Candidate]] = field(default_factory=dict)
    decided: bool = False

    @property
    def started(self) -> bool:
        """The prompt's beam has been split into `width`."""
        return len(self.scores) > 1

    @property
    def complete(self) -> bool:
        """Every beam's candidates are known."""
        return len(self.candidates) == len(self.scores)

    def normalised(self, score: float, length: int) -> float:
        """The score of a hypothesis of that many generated tokens."""
        return float(score / length**self.length_penalty)

    def compare(self, eos_token_ids: frozenset[int], *, at_limit: bool) -> Outcome:
        """Rank all beams' candidates together. At the length limit every continuation is an end.

        Enough candidates per beam (`num_candidates`) leave `width` survivors even if every beam may end. Only ends
        among the `width` best continuations count.
        """
        ranked = self._rank(self.candidates)[: num_candidates(self.width, eos_token_ids)]
        if at_limit:
            return Outcome(ranked[: self.width], [])
        return Outcome(
            [c for c in ranked[: self.width] if c.token_id in eos_token_ids],
            [c for c in ranked if c.token_id not in eos_token_ids][: self.width],
        )

    def is_decided(self, survivors: Sequence[Continuation], length: int) -> bool:
        """Nothing that runs can still enter the hypotheses. `length` counts the survivors' generated tokens."""
        if not survivors:
            return True
        if len(self.hypotheses) < self.width:
            return False
        return self.normalised(survivors[0].score, length) <= self.hypotheses[-1].score

    def _rank(self, candidates: Mapping[int, Sequence[Candidate]]) -> list[Continuation]:
        continuations = [
            Continuation(beam, candidate.token_id, self.scores[beam] + candidate.log_probability)
            for beam, following in sorted(candidates.items())
            for candidate in following
        ]
        return sorted(continuations, key=lambda continuation: -continuation.score)


def num_candidates(width: int, eos_token_ids: frozenset[int]) -> int:
    """How many continuations to look at: `width` of them remain even if all end tokens are among them."""
    return width * max(2, 1 + len(eos_token_ids))


def place_survivors(survivors: Sequence[Continuation]) -> tuple[dict[int, Continuation], list[Continuation]]:
    """Each parent's best child stays in its place; the others need the place of a beam that died."""
    staying: dict[int, Continuation] = {}
    moving: list[Continuation] = []
    for survivor in survivors:
        if survivor.beam in staying:
            moving.append(survivor)
        else:
            staying[survivor.beam] = survivor
    return staying, moving
