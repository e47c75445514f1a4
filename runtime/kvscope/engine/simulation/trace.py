"""A trace: when requests came, how long they were, and which of them begin alike. Held in columns, validated at once.

A million requests fit in some 100 MB; the token ids of a prompt are made when it is submitted, not before.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvscope.events.text import make_printable

Ints = npt.NDArray[np.int64]

NS_PER_S = 1_000_000_000
MAX_TOKENS = 1 << 20  # of a prompt, or of an output
MAX_SPAN_S = 10 * 365 * 86_400  # from the first arrival to the last
GENERATED_TOKEN = 0  # no model, no content: every token generated is this one


class TraceError(ValueError):
    """Not a trace, or not all of it. One line that names the file and the line."""

    def __init__(self, message: str) -> None:
        super().__init__(make_printable(message))


class Row(NamedTuple):
    """One request as a file tells it. `hash_ids` name the chunks of its prompt; chunks of the same id are equal."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: Iterable[int] = ()


class Trace:
    """Requests `0:len` in the order of arrival; the first one arrives at 0."""

    def __init__(self, rows: Iterable[Row], label: str, chunk_size: int) -> None:
        """Consumes the rows; what `rows` raises comes through. Raises TraceError when there are none."""
        self.label, self.chunk_size = label, chunk_size
        arrivals, prompts, outputs = array("d"), array("q"), array("q")
        chunks, num_chunks = array("q"), array("q")
        for row in rows:
            arrivals.append(row.arrival_s)
            prompts.append(row.num_prompt_tokens)
            outputs.append(row.num_output_tokens)
            before = len(chunks)
            chunks.extend(row.hash_ids)
            num_chunks.append(len(chunks) - before)
        if not arrivals:
            raise TraceError(f"{label}: no requests in it")
        seconds = np.frombuffer(arrivals)
        if seconds.max() - seconds.min() > MAX_SPAN_S:
            raise TraceError(f"{label}: more than ten years from the first arrival to the last; wrong unit?")
        self._order = np.argsort(seconds, kind="stable")
        self.arrivals_ns: Ints = np.rint((seconds[self._order] - seconds.min()) * NS_PER_S).astype(np.int64)
        self._prompts, self._outputs = np.frombuffer(prompts, np.int64), np.frombuffer(outputs, np.int64)
        self._chunk_ends: Ints = np.cumsum(np.frombuffer(num_chunks, np.int64))
        names, self._chunks = _renumbered(chunks)
        self._first_unshared = names + 1  # tokens below name chunks, tokens from here on name requests

    def __len__(self) -> int:
        return len(self._order)

    def hurry(self, factor: float) -> None:
        """Let every request arrive this many times as fast."""
        self.arrivals_ns = np.rint(self.arrivals_ns / factor).astype(np.int64)

    @property
    def end_token(self) -> int:
        """Ends an output that is shorter than what was asked for; in no prompt."""
        return self._first_unshared + len(self)

    @property
    def vocab_size(self) -> int:
        return self.end_token + 1

    def longest(self, max_tokens: int | None) -> int:
        """Tokens of the longest request, prompt and output, or prompt and what every request asks for."""
        outputs = np.maximum(self._outputs, 1) if max_tokens is None else max_tokens
        return int((self._prompts + outputs).max())

    @property
    def num_without_output(self) -> int:
        return int((self._outputs == 0).sum())

    def num_output_tokens(self, number: int) -> int:
        """At least one: a request ends with a token."""
        return max(int(self._outputs[self._order[number]]), 1)

    def prompt_token_ids(self, number: int) -> list[int]:
        """All tokens of a chunk are the chunk's number, and what has no chunk is the request's own: prompts begin
        alike exactly as far as their hash ids do."""
        row = int(self._order[number])
        start = int(self._chunk_ends[row - 1]) if row else 0
        num_tokens = int(self._prompts[row])
        token_ids: list[int] = []
        for chunk in self._chunks[start : self._chunk_ends[row]].tolist():
            token_ids += [chunk + 1] * min(self.chunk_size, num_tokens - len(token_ids))
        return token_ids + [self._first_unshared + row] * (num_tokens - len(token_ids))


def _renumbered(chunks: "array[int]") -> tuple[int, Ints]:
    """How many different ids there are, and each as a number below that."""
    names, numbers = np.unique(np.frombuffer(chunks, np.int64), return_inverse=True)
    return len(names), numbers.astype(np.int64)
