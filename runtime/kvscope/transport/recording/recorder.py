"""Writes a recording from its own thread; a broken disk ends the recording and nothing else.

What arrives within 100 ms becomes one chunk and is synced to disk, so a killed engine loses at most that much.
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

from kvscope.events.types import SCHEMA_VERSION
from kvscope.transport.recording.format import (
    CHUNK_BYTES,
    EVENTS_CHANNEL,
    KEYFRAME_CHANNEL,
    MAX_KEYFRAME_BYTES,
    MESSAGE_ENCODING,
    METADATA_NAME,
    PROFILE,
    SEQUENCE_MODULUS,
    RecordingError,
)

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.1
MAX_QUEUED_BYTES = 256 << 20
_NOT_A_FILE = "cannot write {}: not a file; a recording is read from its end, so that it cannot go through a pipe"


class _Message(NamedTuple):
    channel: str
    seq: int
    log_time_ns: int
    data: bytes


class Recorder:
    """Open at once, then written by its own thread until `close`. States: recording -> ended (closed, or `error`)."""

    def __init__(self, path: Path | str, *, force: bool = False) -> None:
        """Raises RecordingError: the file exists (unless `force`) or cannot be created."""
        self.path = Path(path)
        self.error: str | None = None
        self._stream = _open(self.path, force=force)
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_queued_bytes = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvscope-recorder", daemon=True)
        self._thread.start()

    def record(self, seq: int, log_time_ns: int, payload: bytes) -> None:
        """Keep one batch. Never blocks."""
        self._put(_Message(EVENTS_CHANNEL, seq, log_time_ns, payload))

    def record_keyframe(self, seq: int, log_time_ns: int, state: bytes) -> None:
        """Keep the state after batch `seq`, because the batches before it are not in the recording. Never blocks."""
        if len(state) > MAX_KEYFRAME_BYTES:
            self._fail(f"the state has {len(state)} bytes, too large for a recording")
            return
        self._put(_Message(KEYFRAME_CHANNEL, seq, log_time_ns, state))

    @property
    def num_queued_bytes(self) -> int:
        """What has not reached the file yet; who can wait, waits for it to shrink."""
        return self._num_queued_bytes

    def close(self) -> None:
        """Write what is queued and the index, and end the thread. Idempotent."""
        with self._lock:
            if not self._is_closing:
                self._queue.put(None)
            self._is_closing = True
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
            self.error = f"recording to {self.path} stopped: {reason}"
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
        writer = Writer(self._stream, CHUNK_BYTES, CompressionType.ZSTD, enable_crcs=True, enable_data_crcs=True)
        writer.start(profile=PROFILE, library=f"kvscope {_version()}")
        writer.add_metadata(METADATA_NAME, {"kvscope_version": _version(), "schema_version": str(SCHEMA_VERSION)})
        channels = {
            name: writer.register_channel(name, MESSAGE_ENCODING, schema_id=0)
            for name in (EVENTS_CHANNEL, KEYFRAME_CHANNEL)
        }
        self._flush(writer)
        while (message := self._queue.get()) is not None and self.error is None:
            is_last = self._write_burst(writer, channels, message)
            self._flush(writer)
            if is_last:
                break
        if self.error is None:
            writer.finish()  # type: ignore[no-untyped-call] # mcap ships it without annotations
            self._sync()

    def _write_burst(self, writer: Writer, channels: dict[str, int], first: _Message) -> bool:
        """Write messages until the clock says flush; whether the recording is over."""
        deadline = time.monotonic() + FLUSH_INTERVAL_S
        message: _Message | None = first
        while message is not None:
            self._write(writer, channels, message)
            try:
                message = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
        return True

    def _write(self, writer: Writer, channels: dict[str, int], message: _Message) -> None:
        with self._lock:
            self._num_queued_bytes -= len(message.data)
        writer.add_message(
            channels[message.channel],
            log_time=message.log_time_ns,
            data=message.data,
            publish_time=message.log_time_ns,
            sequence=message.seq % SEQUENCE_MODULUS,
        )

    def _flush(self, writer: Writer) -> None:
        writer.flush()  # type: ignore[no-untyped-call] # the same
        self._sync()

    def _sync(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        if os.fstat(self._stream.fileno()).st_nlink == 0:
            self._fail("the file was deleted")


def _open(path: Path, *, force: bool) -> BinaryIO:
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
    except FileExistsError:
        raise RecordingError(f"{path} exists; add --force to overwrite it") from None
    except OSError as error:
        reason = _NOT_A_FILE if error.errno == errno.ENXIO else f"cannot write {{}}: {error.strerror}"
        raise RecordingError(reason.format(path)) from None


def _version() -> str:
    try:
        return version("kvscope")
    except PackageNotFoundError:
        return "unknown"
