"""Requests and sequences as frozen values. A sequence is copied only when it has changed since the last frame."""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from kvscope.dashboard.owners import owner_code
from kvscope.events.state import RequestState, SequenceState, WaitingReason
from kvscope.events.types import SamplingParams

DEVICE, HOST = "P", "H"  # the two pools, as the names of their blocks begin
LONG_TABLE = 64  # from here on numpy finds a block sooner

_owner_code = lru_cache(maxsize=1024)(owner_code)


class Pieces(Sequence[str]):
    """Token texts of a prompt and of what followed, up to now.

    The state's lists are kept, not copied: a fold only ever appends to them, or replaces them by others.
    """

    __slots__ = ("_generated", "_length", "_prompt")

    def __init__(self, prompt: Sequence[str], generated: Sequence[str]) -> None:
        self._prompt, self._generated, self._length = prompt, generated, len(prompt) + len(generated)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(self._length)))
        place = range(self._length)[index]  # a negative one counts from our end, not from the list's
        return self._prompt[place] if place < len(self._prompt) else self._generated[place - len(self._prompt)]

    def __repr__(self) -> str:
        return repr(tuple(self))


class BlockTable(tuple[int, ...]):
    """A block table as it was; one that stays the same from frame to frame is turned into a column once."""

    @cached_property
    def blocks(self) -> NDArray[np.intp]:
        """The same numbers, to index a pool's columns with."""
        return np.array(self, np.intp)

    def __contains__(self, block_id: object) -> bool:
        return bool((self.blocks == block_id).any()) if len(self) > LONG_TABLE else super().__contains__(block_id)


class SequenceFrame(NamedTuple):
    """One candidate. `pieces` are the prompt's token texts followed by the generated ones."""

    sequence_id: str
    table: tuple[int, ...]
    num_written: int
    pieces: Sequence[str]
    num_prompt_tokens: int
    text: str
    num_copies: int
    finish_reason: str | None
    score: float | None = None  # of a beam: see SequenceState
    host_table: tuple[int, ...] = ()  # while swapped out
    num_released: int = 0  # logical blocks before the tables' first: they fell out of the sliding window

    @property
    def num_generated(self) -> int:
        return len(self.pieces) - self.num_prompt_tokens

    def table_in(self, letter: str) -> tuple[int, ...]:
        """Its blocks in one of the two pools, from logical block `num_released` on."""
        return self.host_table if letter == HOST else self.table

    def block(self, logical: int, letter: str = DEVICE) -> int | None:
        """Where a logical block is in that pool, if it is there."""
        table, place = self.table_in(letter), logical - self.num_released
        return table[place] if 0 <= place < len(table) else None


class RequestFrame(NamedTuple):
    request_id: str
    prompt: str
    status: str  # waiting, running, preempted, finished
    waiting: WaitingReason | None
    num_preemptions: int
    params: SamplingParams
    sequences: tuple[SequenceFrame, ...]
    owner: int  # colour code, see owners.py
    submitted_ns: int = 0
    first_token_ns: int | None = None
    finished_ns: int | None = None
    num_hypotheses: int = 0  # ways to end that beam search has found

    @property
    def first_token_wait_ns(self) -> int | None:
        return None if self.first_token_ns is None else max(self.first_token_ns - self.submitted_ns, 0)


class _Copy(NamedTuple):
    """A frame, and the live lists that it was made from: held here, so that no other list can get their identity."""

    frame: SequenceFrame
    table: list[int]
    pieces: list[str]
    prompt_pieces: list[str]
    host_table: list[int]


class SequenceCopies:
    """The requests and sequences of the last frame, for the next one."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestFrame] = {}
        self._last: dict[str, _Copy] = {}
        self._next: dict[str, _Copy] = {}

    def next_frame(self, requests: Iterable[RequestFrame]) -> None:
        """All sequences have been copied into these requests; those that were not asked for are forgotten."""
        self._last, self._next = self._next, {}
        self.requests = {request.request_id: request for request in requests}

    def copy(self, sequence: SequenceState, prompt_pieces: list[str]) -> SequenceFrame:
        """The last frame's value while nothing has changed, else a new one, with the old table while that is the same.

        The same list of the same length has the same entries, but for copies on write, which are counted.
        """
        known = self._last.get(sequence.sequence_id)
        if known is not None and _is_same(sequence, prompt_pieces, known):
            self._next[sequence.sequence_id] = known
            return known.frame
        frame = SequenceFrame(  # by position: names cost as much as all the rest of it, thousands of times a second
            sequence.sequence_id,
            known.frame.table
            if known is not None and _has_same_table(sequence, known)
            else BlockTable(sequence.block_table),
            sequence.num_written,
            known.frame.pieces
            if known is not None and _has_same_pieces(sequence, prompt_pieces, known)
            else Pieces(prompt_pieces, sequence.pieces),
            len(prompt_pieces),
            sequence.text,
            sequence.num_copies,
            sequence.finish_reason,
            sequence.score,
            BlockTable(sequence.host_table) if sequence.host_table else (),
            sequence.num_released,
        )
        self._next[sequence.sequence_id] = _Copy(
            frame, sequence.block_table, sequence.pieces, prompt_pieces, sequence.host_table
        )
        return frame


def _has_same_table(sequence: SequenceState, known: _Copy) -> bool:
    return (
        sequence.block_table is known.table
        and len(known.table) == len(known.frame.table)
        and sequence.num_copies == known.frame.num_copies
    )


def _has_same_pieces(sequence: SequenceState, prompt_pieces: list[str], known: _Copy) -> bool:
    return (
        sequence.pieces is known.pieces
        and prompt_pieces is known.prompt_pieces
        and len(prompt_pieces) + len(known.pieces) == len(known.frame.pieces)
    )


def _is_same(sequence: SequenceState, prompt_pieces: list[str], known: _Copy) -> bool:
    frame = known.frame
    return (
        sequence.num_written == frame.num_written
        and sequence.text is frame.text
        and _has_same_pieces(sequence, prompt_pieces, known)
        and _has_same_table(sequence, known)
        and sequence.finish_reason == frame.finish_reason
        and sequence.score == frame.score
        and sequence.host_table is known.host_table
    )


def copy_request(request: RequestState, sequences: SequenceCopies) -> RequestFrame:
    """The last frame's value while nothing has changed, else a new one. Call with the view's lock held."""
    prompt_pieces, request_id = request.prompt_pieces, request.request_id
    frame = RequestFrame(
        request_id,
        request.prompt,
        request.status,
        request.waiting,
        request.num_preemptions,
        request.params,
        tuple([sequences.copy(sequence, prompt_pieces) for sequence in request.sequences]),
        _owner_code(request_id),
        request.submitted_ns,
        request.first_token_ns,
        request.finished_ns,
        len(request.hypotheses),
    )
    known = sequences.requests.get(request_id)
    return known if known == frame else frame
