"""A recording that stays on disk: batches are decoded when somebody looks at them, a few chunks at a time.

A file that was closed properly carries an index, and is open at once. A torn one, or one without an index, is scanned
first: every chunk's checksum, every batch's header, no event.
"""

import os
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, Protocol, overload

from mcap.records import Chunk, Message
from mcap.stream_reader import StreamReader

from kvscope.events.checkpoint import decode_checkpoint
from kvscope.events.codec import DecodeError, decode_state
from kvscope.events.fold import apply_batch
from kvscope.events.fold_transposed import apply_transposed
from kvscope.events.state import EngineState, FullState
from kvscope.events.transposed import read_transposed
from kvscope.events.types import Batch
from kvscope.transport.healing import receivable
from kvscope.transport.recording.bookmarks import Bookmark, decode_bookmark
from kvscope.transport.recording.columns import BatchColumns
from kvscope.transport.recording.deltas import parse_packed, unpack
from kvscope.transport.recording.format import (
    BATCH_CHANNELS,
    BOOKMARK_CHANNEL,
    CHECKPOINT_CHANNEL,
    KEYFRAME_CHANNEL,
    MAX_CHUNK_BYTES,
    SEQUENCE_MODULUS,
    TRANSPOSED_CHANNEL,
    RecordingError,
)
from kvscope.transport.recording.reader import decode_kept, unpack_chunk
from kvscope.transport.refusals import Refusals

CACHED_CHUNKS = 4
CACHED_BATCHES = 256


class Layout(NamedTuple):
    """Where everything is: the chunks' `(offset, length)`, the channels' topics, and a row for every batch."""

    chunks: Sequence[tuple[int, int]]
    topics: dict[int, str]
    columns: BatchColumns
    marked: Sequence[int] = ()  # chunks that hold bookmarks


class _Messages(NamedTuple):
    """What one chunk holds, apart from a state before the first batch."""

    batches: list[tuple[str, int, bytes]]  # topic, number modulo 2**32, data
    checkpoints: dict[int, bytes]  # by that number
    initial: bytes | None
    bookmarks: list[Bookmark]


class StoredRecording:
    """A `Track` whose batches are on disk. Any thread may read. Every read may raise RecordingError."""

    def __init__(
        self, path: Path, file: int, layout: Layout, *, missing: str | None = None, has_hole: bool = False
    ) -> None:
        self.path, self.missing, self.has_hole = path, missing, has_hole
        self.columns = layout.columns
        self._file, self._layout = file, layout
        self._lock = threading.Lock()
        self._chunks: OrderedDict[int, _Messages] = OrderedDict()
        self._decoded: OrderedDict[int, Batch] = OrderedDict()
        self._refusals = Refusals()
        self._base: tuple[int, bytes] | None = None  # the checkpoint that others were made from, unpacked
        self.batches: Sequence[tuple[int, Batch]] = StoredBatches(self)
        initial = self._messages(0).initial if layout.chunks else None
        self.bookmarks = [bookmark for chunk in layout.marked for bookmark in self._messages(chunk).bookmarks]
        self.initial_state = decode_state(initial, printable=True) if initial is not None else None
        first = self.columns.seqs[0] if len(self.columns) else 0
        self.initial_seq = first - 1 if initial is not None else None

    @property
    def last_seq(self) -> int | None:
        return self.columns.seqs[-1] if len(self.columns) else self.initial_seq

    @property
    def num_refused_events(self) -> int:
        """Of the batches that were looked at so far."""
        return self._refusals.total

    def close(self) -> None:
        """Nothing can be read afterwards. Idempotent."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def batch(self, position: int) -> tuple[int, Batch]:
        """The batch after `position` others, and its number."""
        with self._lock:
            seq = self.columns.seqs[position]
            found = self._decoded.get(position)
            if found is None:
                found = self._decode(position, seq)
                self._decoded[position] = found
                if len(self._decoded) > CACHED_BATCHES:
                    self._decoded.popitem(last=False)
            return seq, found

    def fold(self, state: EngineState, position: int) -> EngineState:
        """The state after the batch after `position` others, without an object for every event where that is spared.

        Raises:
            FoldError: it does not fit; the state is then unusable.
        """
        with self._lock:
            topic, data = self._kept(position, self.columns.seqs[position])
        if topic != TRANSPOSED_CHANNEL:
            return apply_batch(state, receivable(self.batch(position)[1]))
        batch = read_transposed(data, printable=True)
        self._refusals.add(position, batch.num_refused_events)
        return apply_transposed(state, batch)

    def checkpoint(self, number: int) -> EngineState:
        """The state where `columns.checkpoints[number]` says."""
        with self._lock:
            seq = self._seq_before(self.columns.checkpoints[number])
            packed = parse_packed(self._checkpoint_message(number, seq))
            base_raw = b"" if packed.base is None else self._unpack_base(packed.base)
            raw = unpack(packed, base_raw)
        return decode_checkpoint(raw)

    def mentions(self, position: int, needles: Sequence[bytes]) -> bool:
        """Whether the bytes of the batch after `position` others hold one of these; a full state may hold anything."""
        with self._lock:
            topic, data = self._kept(position, self.columns.seqs[position])
        return topic == KEYFRAME_CHANNEL or any(needle in data for needle in needles)

    def _unpack_base(self, seq: int) -> bytes:
        if self._base is None or self._base[0] != seq:
            position = bisect_left(self.columns.seqs, seq) + 1
            number = bisect_left(self.columns.checkpoints, position)
            if number >= len(self.columns.checkpoints) or self.columns.checkpoints[number] != position:
                raise RecordingError("a checkpoint needs one that is not there")
            packed = parse_packed(self._checkpoint_message(number, seq))
            if packed.base is not None:
                raise RecordingError("a checkpoint needs one that needs another")
            self._base = seq, unpack(packed, b"")
        return self._base[1]

    def _seq_before(self, position: int) -> int:
        return self.columns.seqs[position - 1] if position else -1

    def _checkpoint_message(self, number: int, seq: int) -> bytes:
        found = self._messages(self.columns.checkpoint_chunks[number]).checkpoints.get(seq % SEQUENCE_MODULUS)
        if found is None:
            raise RecordingError("a checkpoint is not where the index says")
        return found

    def _kept(self, position: int, seq: int) -> tuple[str, bytes]:
        """A batch's topic and its bytes."""
        chunk = self.columns.chunks[position]
        place = position - bisect_left(self.columns.chunks, chunk)
        batches = self._messages(chunk).batches
        if place >= len(batches) or batches[place][1] != seq % SEQUENCE_MODULUS:
            raise RecordingError(f"batch {seq} is not where the index says")
        return batches[place][0], batches[place][2]

    def _decode(self, position: int, seq: int) -> Batch:
        topic, data = self._kept(position, seq)
        if topic == KEYFRAME_CHANNEL:
            return full_state_batch(decode_state(data, printable=True))
        batch, num_refused = decode_kept(topic, data)
        self._refusals.add(position, num_refused)
        return batch

    def _messages(self, chunk: int) -> _Messages:
        found = self._chunks.get(chunk)
        if found is None:
            found = self._read(chunk)
            self._chunks[chunk] = found
            if len(self._chunks) > CACHED_CHUNKS:
                self._chunks.popitem(last=False)
        else:
            self._chunks.move_to_end(chunk)
        return found

    def _read(self, number: int) -> _Messages:
        offset, length = self._layout.chunks[number]
        try:
            data = os.pread(self._file, min(length, MAX_CHUNK_BYTES), offset)
            record = next(iter(StreamReader(BytesIO(data), skip_magic=True, emit_chunks=True).records))
            if not isinstance(record, Chunk):
                raise RecordingError("no chunk is where the index says")
            return sort_messages(record, self._layout.topics, is_first=number == 0)
        except (RecordingError, DecodeError):
            raise
        except Exception as error:
            raise RecordingError(f"a chunk cannot be read ({error})") from None


def sort_messages(chunk: Chunk, topics: dict[int, str], *, is_first: bool) -> _Messages:
    """What a chunk holds, its checksum checked."""
    messages = _Messages([], {}, None, [])
    initial = None
    for message in unpack_chunk(chunk):
        if not isinstance(message, Message):
            continue
        topic = topics.get(message.channel_id)
        if topic == CHECKPOINT_CHANNEL:
            messages.checkpoints[message.sequence] = message.data
        elif topic == BOOKMARK_CHANNEL:
            messages.bookmarks.extend(filter(None, [decode_bookmark(message.data)]))
        elif topic == KEYFRAME_CHANNEL and is_first and not messages.batches and initial is None:
            initial = message.data
        elif topic == KEYFRAME_CHANNEL or topic in BATCH_CHANNELS:
            messages.batches.append((topic, message.sequence, message.data))
    return messages._replace(initial=initial)


def full_state_batch(state: EngineState) -> Batch:
    """A batch that only replaces the state: where batches are missing, or one was too large."""
    return Batch(
        epoch=state.epoch,
        step=state.step,
        phase=state.phase,
        time_ns=state.time_ns,
        events=(FullState(state=state),),
    )


class _Stored(Protocol):
    columns: BatchColumns

    def batch(self, position: int) -> tuple[int, Batch]: ...


class StoredBatches(Sequence[tuple[int, Batch]]):
    """A recording's batches as a sequence."""

    def __init__(self, recording: _Stored) -> None:
        self._recording = recording

    def __len__(self) -> int:
        return len(self._recording.columns)

    @overload
    def __getitem__(self, index: int) -> tuple[int, Batch]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, Batch]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, Batch] | Sequence[tuple[int, Batch]]:
        if isinstance(index, slice):
            return [self._recording.batch(position) for position in range(*index.indices(len(self)))]
        return self._recording.batch(range(len(self))[index])

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        return map(self._recording.batch, range(len(self)))
