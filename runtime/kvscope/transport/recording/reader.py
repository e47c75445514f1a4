"""Reads a recording up to its last whole batch, and says in one line what is missing.

Files are hostile: checksums are always checked, sizes are checked before anything is unpacked, and every failure of
the parser becomes either a shorter recording with `missing` set, or a RecordingError.
"""

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import zstandard
from mcap.records import Channel, Chunk, DataEnd, Footer, Header, McapRecord, Message
from mcap.stream_reader import StreamReader, breakup_chunk

from kvscope.events.codec import DecodedBatch, decode_batch, decode_state
from kvscope.events.state import EngineState, FullState
from kvscope.events.text import make_printable
from kvscope.events.transposed import read_transposed
from kvscope.events.types import Batch
from kvscope.transport.recording.bookmarks import Bookmark, decode_bookmark
from kvscope.transport.recording.format import (
    BATCH_CHANNELS,
    BOOKMARK_CHANNEL,
    KEYFRAME_CHANNEL,
    MAX_CHUNK_BYTES,
    PACKED_CHANNEL,
    PROFILE,
    SEQUENCE_MODULUS,
    RecordingError,
)
from kvscope.transport.recording.packing import Form, Unpacker

Progress = Callable[[str, int, int], None]  # the file's name, how many bytes of it have been read, its size


def no_progress(name: str, num_bytes: int, size: int) -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class Recording:
    """What could be read. `initial_state` is the state before the first batch; None: from the engine's start."""

    path: Path
    batches: list[tuple[int, Batch]] = field(default_factory=list)
    initial_state: EngineState | None = None
    initial_seq: int | None = None
    num_refused_events: int = 0
    missing: str | None = None
    bookmarks: list[Bookmark] = field(default_factory=list)  # as they were kept, later ones over earlier ones
    has_hole: bool = False  # batches are missing in the middle: it was not just cut short

    @property
    def last_seq(self) -> int | None:
        return self.batches[-1][0] if self.batches else self.initial_seq


class HoleError(RecordingError):
    """A batch that must come next is not there, but a later one is."""


def read_recording(path: Path | str, progress: Progress = no_progress) -> Recording:
    """All whole batches, in order, without holes.

    Raises:
        RecordingError: no such file, not a recording of ours, or nothing in it that can be read.
    """
    path = Path(path)
    shown = make_printable(str(path))
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise RecordingError(f"{shown} is not a file")
        if found.st_size == 0:
            raise RecordingError(f"{shown} is empty")
        with path.open("rb") as file:
            recording = _read(path, shown, file, lambda: progress(shown, file.tell(), found.st_size))
    except OSError as error:
        raise RecordingError(f"cannot read {shown}: {error.strerror}") from None
    if recording.last_seq is None:
        raise RecordingError(f"{shown} holds no whole batch{_because(recording.missing)}")
    return recording


def _read(path: Path, shown: str, file: BinaryIO, progress: Callable[[], None]) -> Recording:
    parser, read = Parser(Recording(path)), 0
    try:
        for record in StreamReader(
            file, emit_chunks=True, validate_crcs=True, record_size_limit=MAX_CHUNK_BYTES
        ).records:
            parser.take(record)
            read = file.tell()
            progress()
        end = file.tell()
        parser.recording.missing = describe_rest(file.seek(0, os.SEEK_END) - end)
    except OSError:
        raise
    except Exception as error:
        if not parser.has_header:
            raise RecordingError(f"{shown} is not an MCAP file") from None
        if not parser.is_ours:
            raise RecordingError(f"{shown} is an MCAP file, but not a kvscope recording") from None
        parser.recording.missing = parser.describe_end(error, file.seek(0, os.SEEK_END) - read)
        parser.recording.has_hole = isinstance(error, HoleError)
    return parser.recording


def describe_rest(num_bytes: int) -> str | None:
    """What it means that so many bytes come after the end."""
    return f"is whole, but {num_bytes:,} bytes after its end are not read: another recording?" if num_bytes else None


class Parser:
    """Turns MCAP records into a recording; raises whatever is wrong with one."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.has_header = self.is_ours = self._has_data_end = False
        self.topics: dict[int, str] = {}
        self._unpacker = Unpacker()

    def take(self, record: McapRecord) -> None:
        if isinstance(record, Header):
            self.has_header, self.is_ours = True, record.profile == PROFILE
        if not self.is_ours:
            raise RecordingError("no header of ours")
        if isinstance(record, DataEnd | Footer):
            self._has_data_end = True
        elif isinstance(record, Chunk):
            for inner in unpack_chunk(record):
                self._take_inner(inner)
        elif isinstance(record, Message) and not self._has_data_end:
            raise RecordingError("a message outside of a chunk has no checksum")

    def _take_inner(self, record: McapRecord) -> None:
        if isinstance(record, Channel):
            self.topics[record.id] = record.topic
        elif isinstance(record, Message):
            topic = self.topics[record.channel_id]
            if topic in BATCH_CHANNELS:
                seq = self._unwrap(record.sequence)
                self._check_next(seq)
                is_packed = topic == PACKED_CHANNEL
                self.take_batch(seq, *(self._unpacker.unpack(record.data) if is_packed else (Form.WIRE, record.data)))
            elif topic == KEYFRAME_CHANNEL:
                self.take_keyframe(self._unwrap(record.sequence), record.data)
            else:
                self.take_other(topic, record)

    @property
    def last_seq(self) -> int | None:
        """Of the last batch that was taken, or of the state before the first."""
        return self.recording.last_seq

    def _unwrap(self, sequence: int) -> int:
        """The 64-bit number, given that numbers only grow."""
        last = self.last_seq
        return sequence if last is None else last + (sequence - last) % SEQUENCE_MODULUS

    def _check_next(self, seq: int) -> None:
        """Raises HoleError unless this batch comes next."""
        last = self.last_seq
        expected = 0 if last is None else last + 1
        if seq != expected:
            raise HoleError(f"batches {expected} to {seq - 1} are not in it")

    def take_batch(self, seq: int, form: Form, data: bytes) -> None:
        batch, num_refused = decode_kept(form, data)
        self.recording.batches.append((seq, batch))
        self.recording.num_refused_events += num_refused

    def take_keyframe(self, seq: int, data: bytes) -> None:
        state = decode_state(data, printable=True)
        if self.last_seq is None:
            self.recording.initial_state, self.recording.initial_seq = state, seq
            return
        batch = Batch(
            epoch=state.epoch,
            step=state.step,
            phase=state.phase,
            time_ns=state.time_ns,
            events=(FullState(state=state),),
        )
        self.recording.batches.append((seq, batch))

    def take_other(self, topic: str, message: Message) -> None:
        if topic == BOOKMARK_CHANNEL and (bookmark := decode_bookmark(message.data)) is not None:
            self.recording.bookmarks.append(bookmark)

    def describe_end(self, error: Exception, num_unread: int) -> str:
        """What is missing, given how many bytes follow the last record that could be taken."""
        reason = make_printable(" ".join(str(error).split())) or type(error).__name__
        if self._has_data_end:
            return f"every batch is there, the index at the end is damaged ({reason})"
        last = self.last_seq
        after = "" if last is None else f" after batch {last}"
        if not num_unread:
            return f"ends abruptly{after}: it is still being written, or its writer was killed"
        return f"ends abruptly{after}; {num_unread:,} bytes that follow are not read ({reason})"


def decode_kept(form: Form, data: bytes) -> DecodedBatch:
    """A batch in either of the forms a recording keeps it in, every string made printable. Raises DecodeError."""
    if form != Form.TRANSPOSED:
        return decode_batch(data, printable=True)
    transposed = read_transposed(data, printable=True)
    return DecodedBatch(transposed.batch(), transposed.num_refused_events)


def unpack_chunk(chunk: Chunk) -> Iterator[McapRecord]:
    """The records inside, once their size and checksum are known to be right."""
    if chunk.uncompressed_size > MAX_CHUNK_BYTES:
        raise RecordingError(f"a chunk claims {chunk.uncompressed_size} bytes; the limit is {MAX_CHUNK_BYTES}")
    # zstandard trusts the size inside the frame over the limit that it is given.
    if chunk.compression != "zstd" or zstandard.frame_content_size(chunk.data) != chunk.uncompressed_size:
        raise RecordingError("a chunk is not compressed as it says")
    if chunk.uncompressed_crc == 0:
        raise RecordingError("a chunk has no checksum")
    yield from breakup_chunk(chunk, validate_crc=True)


def _because(missing: str | None) -> str:
    return f": {missing}" if missing is not None else ""
