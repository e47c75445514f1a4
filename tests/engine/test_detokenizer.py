"""Streaming text: what is said piece by piece is what decoding everything at once says, in whole characters."""

import random
from typing import Any

import pytest
import transformers

from kvscope.engine.detokenizer import StreamDetokenizer, TokenPieces
from kvscope.engine.model_hub import resolve_model

TEXTS = [
    "To be, or not to be: that is the question",
    "naïve café, Ünïcödé — “quotes” …",
    "日本語のテキスト and 한국어",
    "emoji 👩‍👩‍👧‍👦 family, 🇩🇪 flag, 🤖🤖",
    "tabs\tand\n\nnewlines  and   spaces",
    "\u202eright to left\u202c",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(resolve_model("tiny-shakespeare"))


def stream(tokenizer: Any, prompt: list[int], tokens: list[int]) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_stream_says_the_text(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text)
    whole = tokenizer.decode(tokens)
    assert "".join(stream(tokenizer, [], tokens)) == whole
    for split in range(1, len(tokens)):
        said = "".join(stream(tokenizer, tokens[:split], tokens[split:]))
        assert whole.endswith(said)
        assert len(said) >= len(whole) - len(tokenizer.decode(tokens[:split]))


@pytest.mark.parametrize("text", TEXTS)
def test_only_whole_characters_are_said(tokenizer: Any, text: str) -> None:
    said = stream(tokenizer, [], tokenizer.encode(text))
    assert "".join(said) == text
    assert not any("\ufffd" in part for part in said)


def test_any_tokens_in_any_order(tokenizer: Any) -> None:
    """Random tokens are mostly broken bytes: nothing may be lost or said twice, and nothing held for ever."""
    rng = random.Random(5)
    for _ in range(200):
        tokens = [rng.randrange(1, tokenizer.vocab_size) for _ in range(rng.randint(1, 40))]
        said = "".join(stream(tokenizer, [], tokens))
        whole = tokenizer.decode(tokens)
        assert said.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_a_stream_that_never_completes_is_said_all_the_same(tokenizer: Any) -> None:
    """A model that emits half characters for ever must not make every step slower."""
    half = tokenizer.encode("日")[0]
    detokenizer = StreamDetokenizer(tokenizer, [])
    for _ in range(200):
        detokenizer.push(half)
        assert len(detokenizer._window) < 20


def test_pieces_show_what_a_token_says_by_itself(tokenizer: Any) -> None:
    pieces = TokenPieces(tokenizer)
    tokens = tokenizer.encode("My lord, what")
    assert "".join(pieces.piece(token) for token in tokens) == "My lord, what"
    assert pieces.piece(tokens[0]) is pieces.piece(tokens[0])
