"""What a recording's index says of every batch, as columns: where it lies, and what a timeline shows of it.

The recorder attaches it to the file in parts; a file without it is scanned for most of it.
"""

from array import array
from typing import NamedTuple

import msgspec
import zstandard

from kvscope.transport.recording.format import RecordingError

PART_BATCHES = 1 << 16  # so that a recorder never holds more than this
MAX_PART_BYTES = 64 << 20


class Mark(NamedTuple):
    """One batch. `held` blocks after it, and its highest `Notable`; None: not looked at."""

    step: int
    time_ns: int
    num_events: int
    held: int | None = None
    kind: int | None = None


_TYPECODES = {
    "seqs": "q", "steps": "q", "times_ns": "q", "num_events": "q", "held": "q", "kinds": "B", "chunks": "q",
    "checkpoints": "q", "checkpoint_chunks": "q",
}  # fmt: skip
_PER_BATCH = ("seqs", "steps", "times_ns", "num_events", "chunks")


class BatchColumns:
    """Row i is batch i of the recording; `chunks[i]` numbers the file's chunks.

    `checkpoints[k]` batches come before checkpoint k, which lies in `checkpoint_chunks[k]`. `held` and `kinds` are as
    long as the rest, or empty where nobody has looked.
    """

    def __init__(self) -> None:
        self.seqs, self.steps, self.times_ns, self.num_events = array("q"), array("q"), array("q"), array("q")
        self.held, self.kinds, self.chunks = array("q"), array("B"), array("q")
        self.checkpoints, self.checkpoint_chunks = array("q"), array("q")
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, seq: int, mark: Mark, chunk: int) -> None:
        self.seqs.append(seq)
        self.steps.append(mark.step)
        self.times_ns.append(mark.time_ns)
        self.num_events.append(mark.num_events)
        self.chunks.append(chunk)
        if mark.held is not None and mark.kind is not None:
            self.held.append(mark.held)
            self.kinds.append(mark.kind)

    def extend(self, other: "BatchColumns") -> None:
        """Append a later part; its checkpoints count from the start of the file already."""
        for name in _TYPECODES:
            getattr(self, name).extend(getattr(other, name))
        self.num_blocks = max(self.num_blocks, other.num_blocks)

    def encode(self) -> bytes:
        columns = {name: getattr(self, name).tobytes() for name in _TYPECODES}
        return zstandard.compress(msgspec.msgpack.encode((self.num_blocks, columns)), 3)

    @classmethod
    def decode(cls, data: bytes) -> "BatchColumns":
        """Raises RecordingError when it is not what `encode` made."""
        columns = cls()
        try:
            if zstandard.frame_content_size(data) > MAX_PART_BYTES:
                raise RecordingError("the index is too large")
            raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_PART_BYTES)
            columns.num_blocks, lists = msgspec.msgpack.decode(raw, type=tuple[int, dict[str, bytes]])
            for name in _TYPECODES:
                getattr(columns, name).frombytes(lists[name])
        except (zstandard.ZstdError, msgspec.MsgspecError, ValueError, KeyError) as error:
            raise RecordingError(f"the index cannot be read ({error})") from None
        return columns

    def check(self, num_chunks: int) -> None:
        """Raises RecordingError when it cannot be the index of a file with so many chunks."""
        lengths = {len(getattr(self, name)) for name in _PER_BATCH}
        surveyed = {len(self.held), len(self.kinds)}
        sound = (
            len(lengths) == 1
            and surveyed in ({0}, lengths)
            and len(self.checkpoints) == len(self.checkpoint_chunks)
            and _is_sorted(self.seqs)
            and all(map(_is_sorted, (self.chunks, self.checkpoints, self.checkpoint_chunks)))
            and all(0 <= chunk < num_chunks for column in (self.chunks, self.checkpoint_chunks) for chunk in column)
            and all(0 <= position <= len(self) for position in self.checkpoints)
            and min(self.num_events, default=0) >= 0
        )
        if not sound:
            raise RecordingError("the index contradicts itself")


def _is_sorted(column: "array[int]") -> bool:
    return all(map(int.__le__, column, column[1:]))
