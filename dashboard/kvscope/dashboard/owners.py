"""Which request's colour each block has. Pure, but for what is remembered from frame to frame."""

import re
import zlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvscope.dashboard.copies import RequestFrame

NUM_OWNER_COLOURS = 7
NOBODY = 0  # owner code of a block that no table points at
SEVERAL = NUM_OWNER_COLOURS + 1  # owner code of a block held by more than one request


def owner_code(request_id: str) -> int:
    """The same colour for the same request in every frame: by its number, else by a checksum of its name."""
    digits = re.search(r"(\d{1,18})$", request_id)
    number = int(digits.group(1)) - 1 if digits else zlib.crc32(request_id.encode())
    return number % NUM_OWNER_COLOURS + 1


class OwnerCodes:
    """Which request's colour each block has, kept from frame to frame: only tables that have changed are looked at.

    Each table entry adds the number r of its request to its block: the block's n entries are all of one request
    exactly when n * sum(r^2) = sum(r)^2 (Cauchy-Schwarz), and that request is sum(r) / n.
    """

    def __init__(self, letter: str = "P") -> None:
        """`letter` is the pool's: see copies.py."""
        self._letter = letter
        self._tables: dict[str, tuple[int, tuple[int, ...]]] = {}  # by sequence: number of its request, table
        self._numbers: dict[str, int] = {}  # of requests that hold blocks: small, so that squares fit into 64 bits
        self._unused: list[int] = []
        self._colours = np.zeros(1, np.uint8)  # by request number
        self._clear(0)

    def _clear(self, num_blocks: int) -> None:
        self._tables, self._numbers, self._unused = {}, {}, []
        self._codes = np.zeros(num_blocks, np.uint8)
        # Per block, summed over table entries: one, the number of the request, and its square.
        self._sums = [np.zeros(num_blocks, np.int64) for _ in range(3)]

    def update(self, num_blocks: int, requests: "Sequence[RequestFrame]") -> NDArray[np.uint8]:
        """The codes for these tables, as an array of their own."""
        if len(self._codes) != num_blocks:
            self._clear(num_blocks)
        pool = self._letter
        held = {
            request.request_id: request for request in requests if any(seq.table_in(pool) for seq in request.sequences)
        }
        tables: dict[str, tuple[int, tuple[int, ...]]] = {}
        for request_id, request in held.items():
            number = self._numbers.get(request_id) or self._new_number(request_id)
            self._colours[number] = request.owner
            held_here = ((seq.sequence_id, seq.table_in(pool)) for seq in request.sequences)
            tables |= {name: (number, table) for name, table in held_here if table}
        self._recolour(tables)
        self._tables = tables
        for request_id in self._numbers.keys() - held.keys():
            self._unused.append(self._numbers.pop(request_id))
        return self._codes.copy()

    def _new_number(self, request_id: str) -> int:
        number = self._unused.pop() if self._unused else len(self._numbers) + 1
        self._numbers[request_id] = number
        if number >= len(self._colours):
            self._colours = np.resize(self._colours, 2 * number)
        return number

    def _recolour(self, tables: dict[str, tuple[int, tuple[int, ...]]]) -> None:
        """Count what has changed out and in: all of it at once, since a numpy call costs as much as many entries."""
        blocks: list[int] = []
        numbers: list[int] = []
        signs: list[int] = []
        for name in self._tables.keys() | tables.keys():
            before, now = self._tables.get(name, (0, ())), tables.get(name, (0, ()))
            if before[0] == now[0] and before[1] is now[1]:
                continue
            common = len(before[1]) if before[0] == now[0] and now[1][: len(before[1])] == before[1] else 0
            for (number, table), sign in ((before, -1), (now, 1)):
                if count := len(table) - common:
                    blocks += table[common:]
                    numbers += [number] * count
                    signs += [sign] * count
        if blocks:
            self._count(np.array(blocks, np.intp), np.array(numbers, np.int64), np.array(signs, np.int64))

    def _count(self, blocks: NDArray[np.intp], numbers: NDArray[np.int64], signs: NDArray[np.int64]) -> None:
        """Add (or, sign -1, take away) a table entry of a request's number at each of these blocks."""
        for sums, values in zip(self._sums, (signs, signs * numbers, signs * numbers * numbers), strict=True):
            np.add.at(sums, blocks, values)
        entries, total, squares = (sums[blocks] for sums in self._sums)
        alone = np.where(entries > 0, self._colours[total // np.maximum(entries, 1)], NOBODY)
        self._codes[blocks] = np.where(entries * squares == total * total, alone, SEVERAL)


def distinct_blocks(request: "RequestFrame") -> Collection[int]:
    """The blocks a request holds, each once."""
    if len(request.sequences) == 1:
        return request.sequences[0].table
    return set[int]().union(*(sequence.table for sequence in request.sequences))
