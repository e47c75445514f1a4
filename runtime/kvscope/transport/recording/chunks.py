"""Reads a recording's messages chunk by chunk and its batches frame by frame; the last few of both are kept."""

import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from typing import NamedTuple

from mcap.records import Chunk, Message
from mcap.stream_reader import StreamReader

from kvscope.events.codec import DecodeError
from kvscope.transport.recording.bookmarks import Bookmark, decode_bookmark
from kvscope.transport.recording.columns import BatchColumns
from kvscope.transport.recording.format import (
    BATCH_CHANNELS,
    BOOKMARK_CHANNEL,
    CHECKPOINT_CHANNEL,
    KEYFRAME_CHANNEL,
    MAX_CHUNK_BYTES,
    PACKED_CHANNEL,
    SEQUENCE_MODULUS,
    RecordingError,
)
from kvscope.transport.recording.packing import Form, Frame, parse_batch
from kvscope.transport.recording.reader import unpack_chunk

CACHED_CHUNKS = CACHED_FRAMES = 4


class Layout(NamedTuple):
    """Where everything is: the chunks' `(offset, length)`, the channels' topics, and a row for every batch."""

    chunks: Sequence[tuple[int, int]]
    topics: dict[int, str]
    columns: BatchColumns
    marked: Sequence[int] = ()  # chunks that hold bookmarks


class Kept(NamedTuple):
    """A batch as it is kept: its bytes, and what they are; None: a full state in its place."""

    form: Form | None
    data: bytes


class _Messages(NamedTuple):
    """What one chunk holds, apart from a state before the first batch."""

    batches: list[tuple[str, int, bytes]]  # topic, number modulo 2**32, data
    checkpoints: dict[int, bytes]  # by that number
    initial: bytes | None
    bookmarks: list[Bookmark]


class Chunks:
    """Of a file that was laid out like this. Every read may raise RecordingError; one thread at a time."""

    def __init__(self, file: int, layout: Layout) -> None:
        self._file, self._layout, self._columns = file, layout, layout.columns
        self._messages = lru_cache(CACHED_CHUNKS)(self._read)  # by number
        self._frames: OrderedDict[int, tuple[Frame, list[Kept]]] = OrderedDict()  # by the position of the first batch

    def close(self) -> None:
        """Nothing can be read afterwards. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def initial(self) -> bytes | None:
        """The state before the first batch."""
        return self._messages(0).initial if self._layout.chunks else None

    def bookmarks(self) -> list[Bookmark]:
        return [bookmark for chunk in self._layout.marked for bookmark in self._messages(chunk).bookmarks]

    def checkpoint(self, number: int, seq: int) -> bytes:
        """Checkpoint `number`, the one after batch `seq`, as it is kept."""
        found = self._messages(self._columns.checkpoint_chunks[number]).checkpoints.get(seq % SEQUENCE_MODULUS)
        if found is None:
            raise RecordingError("a checkpoint is not where the index says")
        return found

    def batch(self, position: int) -> Kept:
        """The batch after `position` others."""
        topic, message = self._message(position)
        if topic != PACKED_CHANNEL:
            return Kept(None if topic == KEYFRAME_CHANNEL else Form.WIRE, message)
        place = parse_batch(message).place
        first = position - place
        frame, batches = self._frames.pop(first) if first in self._frames else (Frame(), list[Kept]())
        for following in range(first + len(batches), position + 1):
            topic, message = self._message(following)
            packed = parse_batch(message)
            batches.append(Kept(packed.form, frame.unpack(packed)))
        self._frames[first] = frame, batches  # only now: a frame that fails cannot go on
        if len(self._frames) > CACHED_FRAMES:
            self._frames.popitem(last=False)
        return batches[place]

    def _message(self, position: int) -> tuple[str, bytes]:
        """A batch's topic and its message."""
        if position < 0:
            raise RecordingError("a frame begins before the first batch")
        chunk, seq = self._columns.chunks[position], self._columns.seqs[position]
        place = position - bisect_left(self._columns.chunks, chunk)
        batches = self._messages(chunk).batches
        if place >= len(batches) or batches[place][1] != seq % SEQUENCE_MODULUS:
            raise RecordingError(f"batch {seq} is not where the index says")
        return batches[place][0], batches[place][2]

    def _read(self, number: int) -> _Messages:
        offset, length = self._layout.chunks[number]
        try:
            data = os.pread(self._file, min(length, MAX_CHUNK_BYTES), offset)
            record = next(iter(StreamReader(BytesIO(data), skip_magic=True, emit_chunks=True).records))
            if not isinstance(record, Chunk):
                raise RecordingError("no chunk is where the index says")
            return _sort_messages(record, self._layout.topics, is_first=number == 0)
        except (RecordingError, DecodeError):
            raise
        except Exception as error:
            raise RecordingError(f"a chunk cannot be read ({error})") from None


def _sort_messages(chunk: Chunk, topics: dict[int, str], *, is_first: bool) -> _Messages:
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
