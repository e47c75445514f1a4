"""What follows from new KV: candidates fork, tokens are chosen, beams compared, sequences end."""

from typing import Any

from kvscope.engine.beam_search import BeamSearch, num_candidates
from kvscope.engine.beams import Beams
from kvscope.engine.choice import Choice, ChooseTokens, Draw, RankTokens, draw_seed
from kvscope.engine.memory import Memory
from kvscope.engine.outputs import Outputs
from kvscope.engine.request import Request, Sequence
from kvscope.events import types as ev
from kvscope.events.state import Counters
from kvscope.events.types import Event


class Generation:
    """Makes tokens of a step's logits and records them, one sequence at a time."""

    def __init__(
        self,
        memory: Memory,
        outputs: Outputs,
        events: list[Event],
        counters: Counters,
        *,
        choose: ChooseTokens,
        rank: RankTokens | None,
        seed: int,
    ) -> None:
        """`rank` is what beam search needs; `seed` is for requests that bring none."""
        self._memory = memory
        self._outputs = outputs
        self._beams = Beams(memory.tables, outputs, events)
        self._events = events
        self._counters = counters
        self._choose = choose
        self._rank = rank
        self._seed = seed
        self._chosen: dict[str, Choice] = {}  # of this step, by sequence id

    def choose(self, ends: list[tuple[Request, Sequence, Any]]) -> None:
        """Choose the next tokens for all sequences that will go on from these logits, before any of them does."""
        draws = {
            candidate.sequence_id: Draw(logits, request.params, self._noise_key(request, candidate))
            for request, sequence, logits in ends
            if request.search is None
            for candidate in self._heirs(request, sequence)
        }
        self._chosen = dict(zip(draws, self._choose(list(draws.values())), strict=True))

    def go_on(self, request: Request, sequence: Sequence, logits: Any | None, now_ns: int) -> None:
        """Forks, once the prompt is written; and a next token, if the sequence has logits: it reached its end."""
        if request.search is None:
            for candidate in self._fork_if_ready(request, sequence):
                if logits is not None:
                    self._append_token(request, candidate, now_ns)
            return
        if request.search.started:
            self._fork_if_ready(request, sequence)
        if logits is not None:
            self._offer_beam(request, request.search, sequence, logits, now_ns)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, for whatever reason; its blocks go back."""
        sequence.finish_reason = reason
        self._events.append(ev.SequenceFinished(sequence_id=sequence.sequence_id, reason=reason))
        self._memory.tables.release(sequence)
        self._memory.swapper.release(sequence)
        self._outputs.end(sequence)

    def _offer_beam(self, request: Request, search: BeamSearch, sequence: Sequence, logits: Any, now_ns: int) -> None:
        assert self._rank is not None  # else the request was refused
        count = num_candidates(search.width, self._outputs.end_tokens(request))
        self._counters.generated_tokens += len(self._beams.offer(request, sequence, self._rank(logits, count)))
        if request.first_token_ns is None and (search.started or search.hypotheses):
            request.first_token_ns = now_ns
        if search.decided:
            for beam, hypothesis in zip(request.sequences, search.hypotheses, strict=True):
                self.finish(beam, hypothesis.finish_reason)
            request.search = None

    def _fork_if_ready(self, request: Request, sequence: Sequence) -> list[Sequence]:
        """The sequences that choose from this one's logits: itself, or all of them once the prompt is written."""
        heirs = self._heirs(request, sequence)
        request.forked = request.forked or sequence.num_computed >= request.fork_at
        for other in heirs[1:]:
            self._memory.tables.fork(sequence, other)
        return heirs

    @staticmethod
    def _heirs(request: Request, sequence: Sequence) -> list[Sequence]:
        """See `_fork_if_ready`. Does not mutate."""
        if request.forked or sequence.num_computed < request.fork_at:
            return [sequence]
        return [sequence, *(other for other in request.alive_sequences() if other is not sequence)]

    def _append_token(self, request: Request, sequence: Sequence, now_ns: int) -> None:
        choice = self._chosen.pop(sequence.sequence_id)
        said = self._outputs.append(request, sequence, choice)
        if request.first_token_ns is None:
            request.first_token_ns = now_ns
        self._counters.generated_tokens += 1
        self._events.append(
            ev.TokensGenerated(
                sequence_id=sequence.sequence_id, token_ids=[choice.token_id], pieces=[said.piece], text=said.text
            )
        )
        if said.reason is not None:
            self.finish(sequence, said.reason)

    def _noise_key(self, request: Request, sequence: Sequence) -> tuple[object, ...]:
        seed = request.params.seed
        if seed is None:
            seed = draw_seed(self._seed, request.request_id)
        return seed, sequence.index, sequence.num_tokens
