"""Beam search on block tables: beams fork and die every step, and share the blocks of their common history.

A beam lives in one of the request's sequences. Of a beam's children the best stays in its sequence, with its table;
each further one takes over the sequence of a beam that died, by sharing the parent's table. Nothing is copied here:
whoever writes into a shared block next gets a private copy then, as with any sharing.
"""

from kvscope.engine.beam_search import BeamSearch, Continuation, place_survivors
from kvscope.engine.block_tables import BlockTables
from kvscope.engine.choice import Candidate, Choice
from kvscope.engine.outputs import Outputs
from kvscope.engine.request import Request, Sequence
from kvscope.events import types as ev
from kvscope.events.fold import keep_best
from kvscope.events.state import Hypothesis
from kvscope.events.types import Event


class Beams:
    """Carries out what `BeamSearch` decides, and records it."""

    def __init__(self, tables: BlockTables, outputs: Outputs, events: list[Event]) -> None:
        self._tables = tables
        self._outputs = outputs
        self._events = events

    def offer(self, request: Request, sequence: Sequence, candidates: list[Candidate]) -> list[Sequence]:
        """One beam's next tokens; with the last beam's, the search takes a step.

        Returns the sequences that got a token then. Once the search is decided, they hold the hypotheses instead.
        """
        search = request.search
        assert search is not None
        search.candidates[sequence.index] = candidates
        if not search.complete:
            return []
        outcome = search.compare(
            self._outputs.end_tokens(request), at_limit=self._outputs.reaches_limit(request, sequence)
        )
        search.candidates = {}
        for continuation in outcome.ended:
            self._note_hypothesis(request, search, continuation)
        if search.is_decided(outcome.survivors, len(sequence.generated) + 1):
            self._take_hypotheses(request, search)
            return []
        return self._continue(request, search, outcome.survivors)

    def _note_hypothesis(self, request: Request, search: BeamSearch, end: Continuation) -> None:
        beam = request.sequences[end.beam]
        said = self._outputs.preview(request, beam, end.token_id)
        hypothesis = Hypothesis(
            token_ids=[*beam.generated, end.token_id],
            pieces=[*beam.pieces, said.piece],
            text=beam.text + said.text,
            score=search.normalised(end.score, len(beam.generated) + 1),
            finish_reason=said.reason or "length",
        )
        search.hypotheses = keep_best([*search.hypotheses, hypothesis], search.width)
        self._events.append(
            ev.HypothesisFinished(
                request_id=request.request_id,
                from_sequence_id=beam.sequence_id,
                token_id=end.token_id,
                piece=said.piece,
                text=said.text,
                score=hypothesis.score,
                reason=hypothesis.finish_reason,
            )
        )

    def _take_hypotheses(self, request: Request, search: BeamSearch) -> None:
        for sequence, hypothesis in zip(request.sequences, search.hypotheses, strict=True):
            sequence.generated, sequence.pieces = list(hypothesis.token_ids), list(hypothesis.pieces)
            sequence.text, sequence.score = hypothesis.text, hypothesis.score
        search.decided = True
        self._events.append(ev.BeamSearchFinished(request_id=request.request_id))

    def _continue(self, request: Request, search: BeamSearch, survivors: list[Continuation]) -> list[Sequence]:
        staying, moving = place_survivors(survivors)
        vacant = [sequence for sequence in request.sequences if sequence.index not in staying]
        for sequence in vacant:
            self._tables.release(sequence)
        placed = dict(staying)
        for sequence, survivor in zip(vacant, moving, strict=True):
            self._fork(request.sequences[survivor.beam], sequence)
            placed[sequence.index] = survivor
        search.scores = {index: survivor.score for index, survivor in placed.items()}
        request.forked = True
        for sequence in request.sequences:
            self._append(request, sequence, placed[sequence.index])
        return request.sequences

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        self._events.append(ev.SequenceForked(sequence_id=child.sequence_id, from_sequence_id=parent.sequence_id))
        self._tables.fork(parent, child)
        self._outputs.fork(parent, child)
        child.score = parent.score

    def _append(self, request: Request, sequence: Sequence, survivor: Continuation) -> None:
        said = self._outputs.append(request, sequence, Choice(survivor.token_id, 0.0))
        sequence.score = survivor.score
        self._events.append(
            ev.TokensGenerated(
                sequence_id=sequence.sequence_id,
                token_ids=[survivor.token_id],
                pieces=[said.piece],
                text=said.text,
                score=survivor.score,
            )
        )
