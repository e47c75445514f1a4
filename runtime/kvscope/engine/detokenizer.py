"""Token ids to text: single pieces for slots, and a stream of whole characters for reading."""

import copy
from functools import lru_cache
from typing import Any

MAX_CACHED_PIECES = 1 << 18  # the largest vocabularies; a simulation makes up more tokens than that
_REPLACEMENT = "�"
_MAX_HELD_TOKENS = 8  # no character is spread over more byte tokens than this
_NUM_CONTEXT_TOKENS = 4


class StreamDetokenizer:
    """Turns one sequence's tokens into text, emitting only complete characters.

    Decoding token by token would drop the spaces that SentencePiece tokens carry and break characters whose bytes are
    spread over several tokens. So the tokens since the last complete character are decoded together with a little
    context, and the difference to what was already said is new.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._said = self._decode()
        self._num_held = 0

    def copy(self) -> "StreamDetokenizer":
        """One that goes on from here on its own."""
        twin = copy.copy(self)
        twin._window = self._window.copy()
        return twin

    def push(self, token_id: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        self._window.append(token_id)
        self._num_held += 1
        text = self._decode()
        if text.endswith(_REPLACEMENT) and self._num_held < _MAX_HELD_TOKENS:
            return ""
        return self._say(text)

    def flush(self) -> str:
        """Whatever was held back, once no token will follow."""
        return self._say(self._decode()) if self._num_held else ""

    def _say(self, text: str) -> str:
        new = text[len(self._said) :] if text.startswith(self._said) else text[_common_length(text, self._said) :]
        self._window = self._window[-max(_NUM_CONTEXT_TOKENS, 1) :]
        self._said = self._decode()
        self._num_held = 0
        return new

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _common_length(left: str, right: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class TokenPieces:
    """The text of single tokens, for slots. Cached: a vocabulary is small, and slots are many."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode_cached = lru_cache(MAX_CACHED_PIECES)(self._decode)

    def piece(self, token_id: int) -> str:
        """What the token says by itself; bytes of an incomplete character show as U+FFFD."""
        return self._decode_cached(token_id)

    def _decode(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(token, str) and token.startswith("▁") and not text.startswith(" "):
            return " " + text
        return text
