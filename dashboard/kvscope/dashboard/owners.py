"""Which request's colour each block has. Pure, but for what is remembered from frame to frame."""

import re
import zlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvscope.dashboard.frames import RequestFrame

NUM_OWNER_COLOURS = 7
NOBODY = 0  # owner code of a block that no table points at
SEVERAL = NUM_OWNER_COLOURS + 1  # owner code of a block held by more than one request


def owner_code(request_id: str) -> int:
    """The same colour for the same request in every frame: by its number, else by a checksum of its name."""
    digits = re.search(r"(\d{1,18})$", request_id)
    number = int(digits.group(1)) - 1 if digits else zlib.crc32(request_id.encode())
    return number % NUM_OWNER_COLOURS + 1


class OwnerCodes:
    """Which request's colour each block has.

    Remembers the last tables: when they have only grown, as in nearly every step, only the new blocks are coloured.
    """

    def __init__(self) -> None:
        self._codes = bytearray()
        self._tables: dict[str, tuple[int, ...]] = {}

    def update(self, num_blocks: int, num_held: int, requests: "Sequence[RequestFrame]") -> bytes:
        tables = {seq.sequence_id: seq.table for request in requests for seq in request.sequences if seq.table}
        if len(self._codes) != num_blocks or not self._grew(tables):
            self._colour_all(num_blocks, num_held, requests)
        else:
            for request in requests:
                for seq in request.sequences:
                    for block_id in seq.table[len(self._tables.get(seq.sequence_id, ())) :]:
                        self._codes[block_id] = request.owner
        self._tables = tables
        return bytes(self._codes)

    def _grew(self, tables: dict[str, tuple[int, ...]]) -> bool:
        """Every table is as it was, or longer by blocks that nobody had before; tables of new sequences count not."""
        if tables.keys() != self._tables.keys():
            return False
        codes = self._codes
        for name, table in tables.items():
            before = self._tables[name]
            if table[: len(before)] != before or any(codes[block_id] for block_id in table[len(before) :]):
                return False
        return True

    def _colour_all(self, num_blocks: int, num_held: int, requests: "Sequence[RequestFrame]") -> None:
        held = [(request.owner, distinct_blocks(request)) for request in requests]
        self._codes = codes = bytearray(num_blocks)
        apart = sum(len(block_ids) for _, block_ids in held) == num_held  # no block belongs to two requests
        for owner, block_ids in held:
            for block_id in block_ids:
                codes[block_id] = owner if apart or not codes[block_id] else SEVERAL


def distinct_blocks(request: "RequestFrame") -> Collection[int]:
    """The blocks a request holds, each once."""
    if len(request.sequences) == 1:
        return request.sequences[0].table
    return set[int]().union(*(sequence.table for sequence in request.sequences))
