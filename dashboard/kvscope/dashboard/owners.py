"""Which request's colour each block has. Pure, but for what is remembered from frame to frame."""

import re
import zlib
from array import array
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from operator import methodcaller
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from kvscope.dashboard.column_copies import ColumnCopies

if TYPE_CHECKING:
    from kvscope.dashboard.copies import RequestFrame, SequenceFrame

NUM_OWNER_COLOURS = 7
NOBODY = 0  # owner code of a block that no table points at
SEVERAL = NUM_OWNER_COLOURS + 1  # owner code of a block held by more than one request
MAX_UNASKED = 32  # pictures


def owner_code(request_id: str) -> int:
    """The same colour for the same request in every frame: by its number, else by a checksum of its name."""
    digits = re.search(r"(\d{1,18})$", request_id)
    number = int(digits.group(1)) - 1 if digits else zlib.crc32(request_id.encode())
    return number % NUM_OWNER_COLOURS + 1


class Owners:
    """Which request's colour each block has in one picture. Found when somebody asks: the far zoom never does."""

    def __init__(self, codes: "OwnerCodes", num_blocks: int, requests: "Sequence[RequestFrame]") -> None:
        self._find = partial(codes.update, num_blocks, requests)

    @cached_property
    def codes(self) -> NDArray[np.uint8]:
        """One for each block, as an array that stays as it is while somebody holds it."""
        return self._find()

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice | NDArray[np.intp]) -> NDArray[np.uint8]: ...
    def __getitem__(self, place: int | slice | NDArray[np.intp]) -> int | NDArray[np.uint8]:
        return self.codes[place]

    def __repr__(self) -> str:
        return repr(self.codes)


class OwnerCodes:
    """What is remembered of `Owners` from frame to frame: only requests that have changed are looked at.

    Each table entry adds the number r of its request to its block: the block's n entries are all of one request
    exactly when n * sum(r^2) = sum(r)^2 (Cauchy-Schwarz), and that request is sum(r) / n.
    """

    def __init__(self, letter: str = "P") -> None:
        """`letter` is the pool's: see copies.py."""
        self._table_of: Callable[[SequenceFrame], Sequence[int]] = methodcaller("table_in", letter)
        self._lock = Lock()  # who asks may be in another thread than who builds frames
        self._num_unasked = 0
        self._requests: dict[str, RequestFrame] = {}
        self._numbers: dict[str, int] = {}  # of requests that hold blocks: small, so that squares fit into 64 bits
        self._unused: list[int] = []
        self._colours = np.zeros(1, np.uint8)  # by request number
        self._clear(0)

    def _clear(self, num_blocks: int) -> None:
        self._requests, self._numbers, self._unused = {}, {}, []
        self._codes = np.zeros(num_blocks, np.uint8)
        self._copies, self._latest = ColumnCopies(), self._codes.copy()
        # Per block, summed over table entries: one, the number of the request, and its square.
        self._sums = [np.zeros(num_blocks, np.int64) for _ in range(3)]

    def look(self, num_blocks: int, requests: "Sequence[RequestFrame]") -> Owners:
        """The owners by these tables. Now and then they are found at once: who asks does not wait for all of them."""
        owners = Owners(self, num_blocks, requests)
        self._num_unasked += 1
        if self._num_unasked >= MAX_UNASKED:
            owners.codes  # noqa: B018  it is found by being asked for
        return owners

    def update(self, num_blocks: int, requests: "Sequence[RequestFrame]") -> NDArray[np.uint8]:
        """The codes by these tables, which may be older than the last ones."""
        with self._lock:
            self._num_unasked = 0
            return self._update(num_blocks, requests)

    def _update(self, num_blocks: int, requests: "Sequence[RequestFrame]") -> NDArray[np.uint8]:
        if len(self._codes) != num_blocks:
            self._clear(num_blocks)
        before, self._requests = self._requests, {request.request_id: request for request in requests}
        changes = _Changes(array("i"), [], [], [])
        for name in before.keys() - self._requests.keys():
            self._recount(before[name], None, changes)
        for request in requests:
            known = before.get(request.request_id)
            if known is not request:
                self._recount(known, request, changes)
        if changes.blocks:
            blocks = np.asarray(changes.blocks)
            self._count(blocks, *(np.repeat(column, changes.lengths) for column in (changes.numbers, changes.signs)))
            self._latest = self._copies.take(self._codes, blocks)
        return self._latest

    def _recount(self, before: "RequestFrame | None", now: "RequestFrame | None", changes: "_Changes") -> None:
        """Note which table entries of a request have come and gone, and give it a number while it has some."""
        request = now or before
        assert request is not None
        number = self._numbers.get(request.request_id)
        old = list(map(self._table_of, before.sequences)) if before is not None else []
        new = list(map(self._table_of, now.sequences)) if now is not None else []
        for last, table in zip_longest(old, new, fillvalue=()):
            if table is not last:
                if number is None:
                    number = self._new_number(request)
                common = len(last) if table[: len(last)] == last else 0
                if len(last) > common:
                    changes.add(last[common:], number, -1)
                if len(table) > common:
                    changes.add(table[common:], number, 1)
        if number is not None and not any(new):
            self._unused.append(self._numbers.pop(request.request_id))

    def _new_number(self, request: "RequestFrame") -> int:
        number = self._unused.pop() if self._unused else len(self._numbers) + 1
        self._numbers[request.request_id] = number
        if number >= len(self._colours):
            self._colours = np.resize(self._colours, 2 * number)
        self._colours[number] = request.owner
        return number

    def _count(self, blocks: NDArray[np.int32], numbers: NDArray[np.int64], signs: NDArray[np.int64]) -> None:
        """Add (or, sign -1, take away) a table entry of a request's number at each of these blocks."""
        for sums, values in zip(self._sums, (signs, signs * numbers, signs * numbers * numbers), strict=True):
            np.add.at(sums, blocks, values)
        entries, total, squares = (sums[blocks] for sums in self._sums)
        alone = np.where(entries > 0, self._colours[total // np.maximum(entries, 1)], NOBODY)
        self._codes[blocks] = np.where(entries * squares == total * total, alone, SEVERAL)


class _Changes(NamedTuple):
    """Table entries that have come (1) or gone (-1): all of them at once, since a numpy call costs as much as many.

    They come in stretches of one request and one sign.
    """

    blocks: "array[int]"
    numbers: list[int]
    signs: list[int]
    lengths: list[int]

    def add(self, blocks: Sequence[int], number: int, sign: int) -> None:
        self.blocks.extend(blocks)
        self.numbers.append(number)
        self.signs.append(sign)
        self.lengths.append(len(blocks))


def distinct_blocks(request: "RequestFrame") -> Collection[int]:
    """The blocks a request holds, each once."""
    if len(request.sequences) == 1:
        return request.sequences[0].table
    return set[int]().union(*(sequence.table for sequence in request.sequences))
