"""A stretch of a live engine's past: a copy of the state, and the batches that follow it.

Batches are kept as they came over the wire, and packed together once nothing is added any more: an event's name and
the names of its fields are in every one of them, so that a tenth is left.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import zstandard

from kvscope.events.keyframe import Keyframe, PackedKeyframe
from kvscope.events.types import Batch

BYTES_PER_WIRE_BYTE = 2  # the batch, and the tokens it brought, which copies of the state go on sharing
BYTES_PER_BATCH = 128
PACKED_BYTES_PER_WIRE_BYTE, PACKED_BYTES_PER_BATCH = 0.25, 40  # the same of packed ones, but for what is packed
_LEVEL = 1  # the view waits meanwhile

Kept = bytes | Batch  # encoded, but for batches that hold a full state


@dataclass(slots=True)
class HistoryColumns:
    """Numbers of every batch: see `Columns`. What a survey would add is not known."""

    seqs: "array[int]" = field(default_factory=lambda: array("q"))
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    times_ns: "array[int]" = field(default_factory=lambda: array("q"))
    num_events: "array[int]" = field(default_factory=lambda: array("q"))
    held: "array[int]" = field(default_factory=lambda: array("q"))
    kinds: "array[int]" = field(default_factory=lambda: array("B"))
    checkpoints: "array[int]" = field(default_factory=lambda: array("q"))
    num_blocks: int = 0

    def add(self, seq: int, batch: Batch) -> None:
        self.seqs.append(seq)
        self.steps.append(batch.step)
        self.times_ns.append(batch.time_ns)
        self.num_events.append(len(batch.events))

    def extend(self, other: "HistoryColumns") -> None:
        self.seqs += other.seqs
        self.steps += other.steps
        self.times_ns += other.times_ns
        self.num_events += other.num_events


class PackedBatches:
    """Batches that were kept, in one piece; never changed."""

    def __init__(self, batches: Sequence[Kept]) -> None:
        encoded = [batch if isinstance(batch, bytes) else b"" for batch in batches]
        self._whole = {place: batch for place, batch in enumerate(batches) if isinstance(batch, Batch)}
        self._ends = array("I", accumulate(map(len, encoded)))
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(encoded))
        self._packed = bytes(memoryview(packed))  # what zstandard returns keeps the room that nothing packed would take

    @property
    def num_bytes(self) -> int:
        """Of those that are packed."""
        return len(self._packed)

    def __len__(self) -> int:
        return len(self._ends)

    def unpack(self) -> list[Kept]:
        data = zstandard.ZstdDecompressor().decompress(self._packed)
        unpacked: list[Kept] = [data[start:end] for start, end in pairwise((0, *self._ends))]
        for place, batch in self._whole.items():
            unpacked[place] = batch
        return unpacked


@dataclass(slots=True)
class Segment:
    """The next one begins where its batches end."""

    keyframe: Keyframe | PackedKeyframe
    seq: int | None  # of the batch before
    columns: HistoryColumns = field(default_factory=HistoryColumns)
    num_events: int = 0
    num_bytes: int = 0  # of the batches, roughly, in memory
    _batches: list[Kept] = field(default_factory=list)
    _packed: PackedBatches | None = None

    def __len__(self) -> int:
        return len(self.columns.seqs)

    @property
    def total_bytes(self) -> int:
        """With the copy of the state."""
        return self.num_bytes + self.keyframe.num_bytes

    def add(self, seq: int, batch: Batch, kept: Kept, num_bytes: int) -> None:
        self.columns.add(seq, batch)
        self._batches.append(kept)
        self.num_events += len(batch.events)
        self.num_bytes += num_bytes

    def pack(self) -> None:
        """Nothing will be added."""
        if isinstance(self.keyframe, Keyframe):
            self.keyframe = self.keyframe.packed()
        num_bytes = sum(len(batch) for batch in self._batches if isinstance(batch, bytes))
        saved = (BYTES_PER_WIRE_BYTE - PACKED_BYTES_PER_WIRE_BYTE) * num_bytes
        saved += (BYTES_PER_BATCH - PACKED_BYTES_PER_BATCH) * len(self)
        self._packed, self._batches = PackedBatches(self._batches), []
        self.num_bytes += self._packed.num_bytes - int(saved)

    def freeze(self) -> PackedBatches | list[Kept]:
        """The batches that it has now; a list may get more."""
        return self._batches if self._packed is None else self._packed
