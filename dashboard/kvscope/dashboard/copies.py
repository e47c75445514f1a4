"""Requests and sequences as frozen values. A sequence is copied only when it has changed since the last frame."""

from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import chain, count, repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, overload

import msgspec
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


if TYPE_CHECKING:
    _Integers = array[int]
else:
    _Integers = array


class BlockTable(_Integers):
    """A block table as it was: numbers of 32 bits, side by side in memory.

    The collector of cycles looks at every number of a tuple or a list, and of these there are hundreds of thousands.
    """

    __slots__ = ()

    @property
    def blocks(self) -> NDArray[np.int32]:
        """The same memory, to index a pool's columns with."""
        return np.asarray(self)

    def __contains__(self, block_id: object) -> bool:
        return bool((self.blocks == block_id).any()) if len(self) > LONG_TABLE else super().__contains__(block_id)


class SequenceFrame(NamedTuple):
    """One candidate. `pieces` are the prompt's token texts followed by the generated ones."""

    sequence_id: str
    table: Sequence[int]
    num_written: int
    pieces: Sequence[str]
    num_prompt_tokens: int
    text: str
    num_copies: int
    finish_reason: str | None
    score: float | None = None  # of a beam: see SequenceState
    host_table: Sequence[int] = ()  # while swapped out
    num_released: int = 0  # logical blocks before the tables' first: they fell out of the sliding window

    @property
    def num_generated(self) -> int:
        return len(self.pieces) - self.num_prompt_tokens

    def table_in(self, letter: str) -> Sequence[int]:
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


class _SequenceCopy(msgspec.Struct, eq=False):
    """A sequence's frame, and what the live values were when it was made.

    Of a list its length is noted: the state replaces lists or appends to them, but for copies on write and blocks that
    left the window, which are counted. Facts are equal where nothing has changed, and no list is looked into for that.
    """

    frame: SequenceFrame
    facts: tuple[object, ...]


class _Copy(msgspec.Struct, eq=False):
    """The same of a request."""

    frame: RequestFrame
    facts: tuple[object, ...]
    sequences: list[_SequenceCopy]


class RequestCopies:
    """The requests of the last frame, for the next one."""

    def __init__(self) -> None:
        self._last: dict[str, _Copy] = {}
        self.places: Mapping[str, int] = {}  # of the latest tuple

    def copy(
        self, requests: Mapping[str, RequestState], changed: Collection[str | None] | None = None
    ) -> tuple[RequestFrame, ...]:
        """The last frame's values while nothing has changed, else new ones. Call with the view's lock held.

        Since the last time only `changed` may have, by name, and new ones have come; None: anything.
        """
        last = self._last
        if changed is None or list(requests) != list(last):
            self._last = {
                name: known
                if (known := last.get(name)) is not None and changed is not None and name not in changed
                else _copy(request, known)
                for name, request in requests.items()
            }
            self.places = MappingProxyType(dict(zip(requests, count(), strict=False)))
        else:
            last |= {name: _copy(requests[name], last[name]) for name in changed if name in last}
        return tuple([copy.frame for copy in self._last.values()])


def _copy(request: RequestState, known: _Copy | None) -> _Copy:
    """With the known one while nothing has changed. Made from tuples: with arguments each costs twice as much."""
    before = known.sequences if known is not None else []
    pieces, paired = request.prompt_pieces, chain(before, repeat(None))
    copied = list(map(_copy_sequence, request.sequences, repeat(pieces), paired))
    facts = (
        request.request_id,
        request.prompt,
        request.status,
        request.waiting,
        request.num_preemptions,
        request.params,
        request.submitted_ns,
        request.first_token_ns,
        request.finished_ns,
        len(request.hypotheses),
    )
    if known is not None and known.facts == facts and before == copied:
        return known
    frames = tuple([copy.frame for copy in copied])
    frame = tuple.__new__(RequestFrame, (*facts[:6], frames, _owner_code(request.request_id), *facts[6:]))
    return _Copy(frame, facts, copied)


def _copy_sequence(sequence: SequenceState, prompt_pieces: Sequence[str], known: _SequenceCopy | None) -> _SequenceCopy:
    """With the old table, or token texts, while these are the same."""
    table, pieces, host_table = sequence.block_table, sequence.pieces, sequence.host_table
    of_table = table, len(table), sequence.num_copies, sequence.num_released
    of_text = prompt_pieces, pieces, len(pieces)
    facts = (
        of_table,
        of_text,
        sequence.num_written,
        sequence.text,
        sequence.finish_reason,
        sequence.score,
        host_table,
    )
    if known is not None and known.facts == facts:
        known.facts = facts  # of a state from elsewhere that says the same: its lists are quick to compare next time
        return known
    frame = tuple.__new__(
        SequenceFrame,
        (
            sequence.sequence_id,
            known.frame.table if known is not None and known.facts[0] == of_table else BlockTable("i", table),
            sequence.num_written,
            known.frame.pieces if known is not None and known.facts[1] == of_text else Pieces(prompt_pieces, pieces),
            len(prompt_pieces),
            sequence.text,
            sequence.num_copies,
            sequence.finish_reason,
            sequence.score,
            BlockTable("i", host_table) if host_table else (),
            sequence.num_released,
        ),
    )
    return _SequenceCopy(frame, facts)
