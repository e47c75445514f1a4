"""Writes a recording from its own thread; a broken disk ends the recording and nothing else.

What arrives within 50 ms becomes one chunk and is synced to disk. A killed engine loses that, and what came while the
chunk before was on its way: at most 100 ms, as long as a sync takes no more than half of it.
"""

import contextlib
import errno
import logging
import os
import queue
import stat
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mcap.writer import CompressionType, Writer

from kvscope.events.checkpoint import CheckpointEncoder
from kvscope.events.keyframe import Keyframe
from kvscope.events.notable import most_notable
from kvscope.events.state import EngineState
from kvscope.events.transposed import transpose
from kvscope.events.types import SCHEMA_VERSION, Batch
from kvscope.transport.recording.bookmarks import Bookmark, encode_bookmark
from kvscope.transport.recording.columns import PART_BATCHES, BatchColumns, Mark
from kvscope.transport.recording.deltas import DeltaPacker
from kvscope.transport.recording.format import (
    BOOKMARK_CHANNEL,
    CHECKPOINT_CHANNEL,
    CHUNK_BYTES,
    EVENTS_CHANNEL,
    INDEX_NAME,
    KEYFRAME_CHANNEL,
    MAX_KEYFRAME_BYTES,
    MESSAGE_ENCODING,
    METADATA_NAME,
    PACKED_CHANNEL,
    PROFILE,
    SEQUENCE_MODULUS,
    RecordingError,
)
from kvscope.transport.recording.packing import MAX_PACKED_BYTES, BatchPacker, Form

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.05
MAX_QUEUED_BYTES = 256 << 20
NO_LIMIT = 1 << 62
CHECKPOINT_EVENTS = 5 << 12  # at least so many between two, and no fewer bytes than a checkpoint has
_NOT_A_FILE = "cannot write {}: not a file; a recording is read from its end, so that it cannot go through a pipe"


class _Message(NamedTuple):
    channel: str
    seq: int
    log_time_ns: int
    data: bytes
    queued_at: float  # monotonic seconds
    mark: Mark | None = None
    checkpoint: Keyframe | None = None


class Recorder:
    """Open at once, then written by its own thread until `close`. States: recording -> ended (closed, or `error`)."""

    def __init__(self, path: Path | str, *, force: bool = False) -> None:
        """Raises RecordingError: the file exists (unless `force`) or cannot be created."""
        self.path = Path(path)
        self.error: str | None = None
        self._stream = _open(self.path, force=force)
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_queued_bytes = self._num_file_bytes = 0
        self._events_since = self._bytes_since = self._num_blocks = 0
        self._columns: BatchColumns | None = BatchColumns()  # None: a batch came without what an index needs
        self._packer = BatchPacker()
        self._checkpoint_encoder, self._checkpoint_packer = CheckpointEncoder(), DeltaPacker()
        self._num_batches = self._num_chunks = self._chunk_bytes = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvscope-recorder", daemon=True)
        self._thread.start()

    def record(
        self, seq: int, log_time_ns: int, payload: bytes, batch: Batch | None = None, state: EngineState | None = None
    ) -> None:
        """Keep one batch. Never blocks. With the batch and the state after it, the file gets an index and checkpoints.

        O(pool) for each batch, in C: what is held after it is counted.
        """
        mark = checkpoint = None
        if batch is not None and state is not None:
            held = len(state.ref_counts) - state.ref_counts.count(0)
            mark = Mark(batch.step, batch.time_ns, len(batch.events), held, most_notable(batch))
            self._num_blocks = max(self._num_blocks, len(state.ref_counts))
            checkpoint = self._checkpoint(len(batch.events), len(payload), state)
        self._put(_Message(EVENTS_CHANNEL, seq, log_time_ns, payload, time.monotonic(), mark, checkpoint))

    def _checkpoint(self, num_events: int, num_bytes: int, state: EngineState) -> Keyframe | None:
        self._events_since += num_events
        self._bytes_since += num_bytes
        if self._events_since < CHECKPOINT_EVENTS or self._bytes_since < 2 * len(state.ref_counts):
            return None
        self._events_since = self._bytes_since = 0
        return Keyframe(state)

    def record_keyframe(self, seq: int, log_time_ns: int, state: bytes) -> None:
        """Keep the state after batch `seq`, because the batches before it are not in the recording. Never blocks."""
        if len(state) > MAX_KEYFRAME_BYTES:
            self._fail(f"the state has {len(state)} bytes, too large for a recording")
            return
        self._put(_Message(KEYFRAME_CHANNEL, seq, log_time_ns, state, time.monotonic()))

    def record_bookmark(self, bookmark: Bookmark, log_time_ns: int) -> None:
        """Keep it, of whatever moment it is. Never blocks."""
        self._put(_Message(BOOKMARK_CHANNEL, bookmark.seq, log_time_ns, encode_bookmark(bookmark), time.monotonic()))

    @property
    def num_queued_bytes(self) -> int:
        """What has not reached the file yet; who can wait, waits for it to shrink."""
        return self._num_queued_bytes

    @property
    def num_file_bytes(self) -> int:
        """The size of the file at its last sync."""
        return self._num_file_bytes

    def is_alive(self) -> bool:
        """Whether something may still be written."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Take nothing more; what is queued and the index will still be written. Never blocks. Idempotent."""
        with self._lock:
            if not self._is_closing:
                self._queue.put(None)
            self._is_closing = True

    def close(self) -> None:
        """`end`, and wait until all is written. Idempotent."""
        self.end()
        self._thread.join()

    def _put(self, message: _Message) -> None:
        with self._lock:
            if self.error is not None or self._is_closing:
                return
            self._num_queued_bytes += len(message.data)
            too_slow = self._num_queued_bytes > MAX_QUEUED_BYTES
            if not too_slow:
                self._queue.put(message)
        if too_slow:
            self._fail(f"the disk is too slow; the recording ends before batch {message.seq}")

    def _fail(self, reason: str) -> None:
        # The first reason counts: a recording with a hole in it is worth less than one that ends early.
        if self.error is None:
            self.error = f"recording stopped: {reason}: {self.path}"
            logger.error("%s", self.error)

    # --- the recorder thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            self._fail(error.strerror or str(error))
        except Exception as error:
            logger.exception("the recorder failed")
            self._fail(str(error))
        with contextlib.suppress(OSError):  # what could not be written is reported already
            self._stream.close()

    def _write_all(self) -> None:
        # Chunks are ended here, not by the writer, so that the index knows which one a batch is in.
        writer = Writer(self._stream, NO_LIMIT, CompressionType.ZSTD, enable_crcs=True, enable_data_crcs=True)
        writer.start(profile=PROFILE, library=f"kvscope {_version()}")
        writer.add_metadata(METADATA_NAME, {"kvscope_version": _version(), "schema_version": str(SCHEMA_VERSION)})
        channels = {
            name: writer.register_channel(name, MESSAGE_ENCODING, schema_id=0)
            for name in (EVENTS_CHANNEL, PACKED_CHANNEL, KEYFRAME_CHANNEL, CHECKPOINT_CHANNEL, BOOKMARK_CHANNEL)
        }
        self._flush(writer)
        while (message := self._queue.get()) is not None and self.error is None:
            is_last = self._write_burst(writer, channels, message)
            self._flush(writer)
            if is_last:
                break
        if self.error is None:
            self._write_index(writer)
            writer.finish()  # type: ignore[no-untyped-call] # mcap ships it without annotations
            self._sync()

    def _write_burst(self, writer: Writer, channels: dict[str, int], first: _Message) -> bool:
        """Write messages until the first one is due on disk; whether the recording is over.

        One that is overdue takes along what waits behind it, for as long as one interval.
        """
        due, latest = first.queued_at + FLUSH_INTERVAL_S, time.monotonic() + FLUSH_INTERVAL_S
        message: _Message | None = first
        while message is not None:
            self._write(writer, channels, message)
            now = time.monotonic()
            if now > latest:
                return False
            try:
                message = self._queue.get(timeout=max(0.0, due - now))
            except queue.Empty:
                return False
        return True

    def _write(self, writer: Writer, channels: dict[str, int], message: _Message) -> None:
        with self._lock:
            self._num_queued_bytes -= len(message.data)
        self._index(message)
        if message.channel == EVENTS_CHANNEL and len(message.data) <= MAX_PACKED_BYTES:
            self._add(writer, channels[PACKED_CHANNEL], message, self._pack(message.data))
        else:
            self._packer.end_frame()
            self._add(writer, channels[message.channel], message, message.data)
        if message.checkpoint is not None and self._columns is not None:
            self._columns.checkpoints.append(self._num_batches)
            self._columns.checkpoint_chunks.append(self._num_chunks)
            raw = self._checkpoint_encoder.encode(message.checkpoint.restore())
            self._add(writer, channels[CHECKPOINT_CHANNEL], message, self._checkpoint_packer.pack(message.seq, raw))
        if self._chunk_bytes >= CHUNK_BYTES:
            self._end_chunk(writer)
        if self._columns is not None and len(self._columns) >= PART_BATCHES:
            self._end_chunk(writer)
            self._write_index(writer)

    def _pack(self, payload: bytes) -> bytes:
        transposed = transpose(payload)
        if transposed is None:
            return self._packer.pack(Form.WIRE, payload)
        return self._packer.pack(Form.TRANSPOSED, transposed)

    def _add(self, writer: Writer, channel: int, message: _Message, data: bytes) -> None:
        self._chunk_bytes += len(data)
        writer.add_message(
            channel,
            log_time=message.log_time_ns,
            data=data,
            publish_time=message.log_time_ns,
            sequence=message.seq % SEQUENCE_MODULUS,
        )

    def _index(self, message: _Message) -> None:
        """A row for a batch, or for the full state that stands in the place of some; not for the first state."""
        if message.mark is not None and self._columns is not None:
            self._columns.add(message.seq, message.mark, self._num_chunks)
            self._num_batches += 1
        elif message.channel == EVENTS_CHANNEL or (message.channel == KEYFRAME_CHANNEL and self._num_batches):
            self._columns = None

    def _write_index(self, writer: Writer) -> None:
        if self._columns is not None:
            self._columns.num_blocks = self._num_blocks
            writer.add_attachment(0, 0, INDEX_NAME, "application/octet-stream", self._columns.encode())
            self._columns = BatchColumns()

    def _end_chunk(self, writer: Writer) -> None:
        self._num_chunks += self._chunk_bytes > 0
        self._chunk_bytes = 0
        writer.flush()  # type: ignore[no-untyped-call] # the same

    def _flush(self, writer: Writer) -> None:
        self._end_chunk(writer)
        self._sync()

    def _sync(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        found = os.fstat(self._stream.fileno())
        self._num_file_bytes = found.st_size
        if found.st_nlink == 0:
            self._fail("the file was deleted")


def check_file(path: Path, *, force: bool) -> None:
    """Look, without touching anything. Raises RecordingError: no recording can be begun there."""
    if path.is_dir():  # so is an empty name
        raise RecordingError(f"cannot write {path}: that is a directory, not a file; try run.mcap")
    if os.path.lexists(path) and not force:
        raise RecordingError(f"{path} exists; add --force to overwrite it")
    if not path.parent.is_dir():
        raise RecordingError(f"cannot write {path}: there is no directory {path.parent}")


def _open(path: Path, *, force: bool) -> BinaryIO:
    check_file(path, force=force)
    how = os.O_TRUNC if force else os.O_EXCL
    try:
        # A recording holds prompts: nobody else reads it. A pipe without a reader must not make the engine wait.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | how, 0o600)
        mode = os.fstat(file).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            os.close(file)
            raise RecordingError(_NOT_A_FILE.format(path))
        if stat.S_ISREG(mode):  # not /dev/null
            os.fchmod(file, 0o600)  # an overwritten file had its own mode
        return os.fdopen(file, "wb")
    except OSError as error:
        reason = _NOT_A_FILE if error.errno == errno.ENXIO else f"cannot write {{}}: {error.strerror}"
        raise RecordingError(reason.format(path)) from None


def _version() -> str:
    try:
        return version("kvscope")
    except PackageNotFoundError:
        return "unknown"
