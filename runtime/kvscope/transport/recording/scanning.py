"""A recording without a usable index, opened all the same without holding it: torn by a kill, or made by others.

Every chunk is unpacked once, its checksum checked, and of every batch the header is read; events are left to whoever
looks at them. What is found is what the index would have said, apart from what only a fold knows.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mcap.records import Chunk, McapRecord, Message
from mcap.stream_reader import StreamReader

from kvscope.events.codec import decode_state, peek_header
from kvscope.events.transposed import peek_transposed
from kvscope.transport.recording.chunks import Layout
from kvscope.transport.recording.columns import BatchColumns, Mark
from kvscope.transport.recording.format import (
    BOOKMARK_CHANNEL,
    CHECKPOINT_CHANNEL,
    MAX_CHUNK_BYTES,
    SEQUENCE_MODULUS,
    RecordingError,
)
from kvscope.transport.recording.packing import Form
from kvscope.transport.recording.reader import HoleError, Parser, Progress, Recording, describe_rest, no_progress
from kvscope.transport.recording.stored import StoredRecording


def scan_recording(path: Path, progress: Progress = no_progress) -> StoredRecording:
    """The part of it up to its last whole batch. Raises whatever is wrong with it, RecordingError among others."""
    with path.open("rb") as file:
        scanner = _Scanner(Recording(path))
        missing, has_hole = _scan(file, scanner, lambda: progress(path.name, scanner.stop, scanner.size))
        if not len(scanner.columns):
            raise RecordingError("no batch that could be looked at one by one")
        layout = Layout(scanner.chunks, scanner.topics, scanner.columns, sorted(scanner.marked))
        descriptor = os.dup(file.fileno())
    try:
        return StoredRecording(path, descriptor, layout, missing=missing, has_hole=has_hole)
    except BaseException:
        os.close(descriptor)
        raise


def _scan(file: BinaryIO, scanner: "_Scanner", progress: Callable[[], None]) -> tuple[str | None, bool]:
    """What is missing, and whether it is missing in the middle."""
    scanner.size = os.fstat(file.fileno()).st_size
    reader = StreamReader(file, emit_chunks=True, validate_crcs=True, record_size_limit=MAX_CHUNK_BYTES)
    scanner.stop = file.tell()
    taken = 0
    try:
        for record in reader.records:
            scanner.start, scanner.stop = scanner.stop, file.tell()
            scanner.take(record)
            taken = scanner.stop
            progress()
    except OSError:
        raise
    except Exception as error:
        return scanner.describe_end(error, scanner.size - taken), isinstance(error, HoleError)
    return describe_rest(scanner.size - file.tell()), False


class _Scanner(Parser):
    """Notes where everything is."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.columns = BatchColumns()
        self.chunks: list[tuple[int, int]] = []
        self.marked: set[int] = set()
        self.start = self.stop = self.size = 0  # where the record lies that is taken, in a file of that size

    @property
    def last_seq(self) -> int | None:
        return self.columns.seqs[-1] if len(self.columns) else self.recording.initial_seq

    def take(self, record: McapRecord) -> None:
        if isinstance(record, Chunk):
            self.chunks.append((self.start, self.stop - self.start))
        super().take(record)

    def take_batch(self, seq: int, form: Form, data: bytes) -> None:
        step, time_ns, num_events = (peek_transposed if form == Form.TRANSPOSED else peek_header)(data)
        self.columns.add(seq, Mark(step, time_ns, num_events), len(self.chunks) - 1)

    def take_keyframe(self, seq: int, data: bytes) -> None:
        state = decode_state(data, printable=True)
        if len(self.columns):
            self.columns.add(seq, Mark(state.step, state.time_ns, 1), len(self.chunks) - 1)
        elif self.recording.initial_seq is None and len(self.chunks) == 1:
            self.recording.initial_seq = seq
        else:
            raise RecordingError("a state where none is expected")

    def take_other(self, topic: str, message: Message) -> None:
        super().take_other(topic, message)
        last = self.last_seq
        if topic == CHECKPOINT_CHANNEL and last is not None and message.sequence == last % SEQUENCE_MODULUS:
            self.columns.checkpoints.append(len(self.columns))
            self.columns.checkpoint_chunks.append(len(self.chunks) - 1)
        elif topic == BOOKMARK_CHANNEL:
            self.marked.add(len(self.chunks) - 1)
