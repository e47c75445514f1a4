"""What sequences say: their tokens as pieces for slots and as a text of whole characters, up to a stop string."""

from typing import Any, NamedTuple

from kvscope.engine.choice import Choice
from kvscope.engine.detokenizer import StreamDetokenizer, TokenPieces
from kvscope.engine.request import Request, Sequence
from kvscope.engine.stop_strings import cut_at_stop, first_stop
from kvscope.events.types import FinishReason


class Said(NamedTuple):
    """What one token adds to a sequence, and whether it ends it."""

    piece: str
    text: str
    reason: FinishReason | None


class Outputs:
    """The detokenizers of all sequences that are alive."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._pieces = TokenPieces(tokenizer)
        self._detokenizers: dict[str, StreamDetokenizer] = {}

    def pieces(self, token_ids: list[int]) -> list[str]:
        return [self._pieces.piece(token_id) for token_id in token_ids]

    def begin(self, sequence: Sequence) -> None:
        """Make ready for a sequence's first token."""
        self._detokenizers[sequence.sequence_id] = StreamDetokenizer(self._tokenizer, sequence.prompt_token_ids)

    def end(self, sequence: Sequence) -> None:
        del self._detokenizers[sequence.sequence_id]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child has said what the parent has, and goes on from there."""
        child.generated, child.pieces, child.text = parent.generated.copy(), parent.pieces.copy(), parent.text
        self._detokenizers[child.sequence_id] = self._detokenizers[parent.sequence_id].copy()

    def end_tokens(self, request: Request) -> frozenset[int]:
        """Tokens that end a sequence of this request."""
        return frozenset() if request.params.ignore_eos else self._eos_token_ids

    def reaches_limit(self, request: Request, sequence: Sequence) -> bool:
        """Whether one token more is the last that may be generated."""
        return (
            len(sequence.generated) + 1 >= request.params.max_tokens or sequence.num_tokens + 1 >= self._max_model_len
        )

    def append(self, request: Request, sequence: Sequence, choice: Choice) -> Said:
        """Add a chosen token to the sequence. Mutates it."""
        said = self._say(request, sequence, self._detokenizers[sequence.sequence_id], choice.token_id)
        sequence.generated.append(choice.token_id)
        sequence.choice_margins.append(choice.margin)
        sequence.pieces.append(said.piece)
        sequence.text += said.text
        return said

    def preview(self, request: Request, sequence: Sequence, token_id: int) -> Said:
        """What the token would add. Does not mutate."""
        return self._say(request, sequence, self._detokenizers[sequence.sequence_id].copy(), token_id)

    def _say(self, request: Request, sequence: Sequence, detokenizer: StreamDetokenizer, token_id: int) -> Said:
        ended = token_id in self.end_tokens(request)
        text = "" if ended else detokenizer.push(token_id)
        reason: FinishReason | None = None
        if ended or first_stop(sequence.text + text, request.params.stop) is not None:
            reason = "stop"
        elif self.reaches_limit(request, sequence):
            reason = "length"
        if reason is not None:
            text += detokenizer.flush()
        return Said(self._pieces.piece(token_id), cut_at_stop(sequence.text, text, request.params.stop), reason)
