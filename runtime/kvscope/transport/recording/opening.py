"""Opens a recording for looking around in it, by its index if that can be trusted."""

import contextlib
import os
import zlib
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from mcap.reader import make_reader
from mcap.records import Attachment, Footer
from mcap.stream_reader import StreamReader

from kvscope.transport.recording.chunks import Layout
from kvscope.transport.recording.columns import MAX_PART_BYTES, BatchColumns
from kvscope.transport.recording.format import (
    BATCH_CHANNELS,
    BOOKMARK_CHANNEL,
    INDEX_NAME,
    PROFILE,
    RecordingError,
)
from kvscope.transport.recording.reader import Progress, Recording, no_progress, read_recording
from kvscope.transport.recording.scanning import scan_recording
from kvscope.transport.recording.stored import StoredRecording

MAX_READ_BYTES = 4 << 20  # as much is read in a second
MAX_SUMMARY_BYTES = 256 << 20
_FOOTER_BYTES, _MAGIC_BYTES, _DATA_END_BYTES = 29, 8, 13
_BLOCK = 1 << 20


def open_recording(path: Path | str, progress: Progress = no_progress) -> StoredRecording | Recording:
    """The recording on disk, by its index or after a look at every chunk; a small one without an index in memory.

    Raises:
        RecordingError: no such file, not a recording of ours, or nothing in it that can be read.
    """
    path = Path(path)
    # Whatever is wrong with the index, the batches may still be there; what cannot be scanned either is refused by the
    # reader, in words.
    with contextlib.suppress(Exception):
        return _open_by_index(path)
    with contextlib.suppress(Exception):
        if path.stat().st_size > MAX_READ_BYTES:
            return scan_recording(path, progress)
    return read_recording(path, progress)


def open_stored(path: Path, progress: Progress = no_progress) -> StoredRecording:
    """The recording on disk, however small. Raises whatever is wrong with it."""
    with contextlib.suppress(Exception):
        return _open_by_index(path)
    return scan_recording(path, progress)


def _open_by_index(path: Path) -> StoredRecording:
    with path.open("rb") as file:
        layout = _read_layout(file)
        descriptor = os.dup(file.fileno())
    try:
        return StoredRecording(path, descriptor, layout)
    except BaseException:
        os.close(descriptor)
        raise


def _read_layout(file: BinaryIO) -> Layout:
    """Raises whatever is wrong: checksums of the data and of the summary, and what the index says, must fit."""
    _check_sums(file)
    file.seek(0)
    reader = make_reader(file, validate_crcs=True)
    summary = reader.get_summary()
    if reader.get_header().profile != PROFILE or summary is None or summary.statistics is None:
        raise RecordingError("no index")
    chunks = sorted((index.chunk_start_offset, index.chunk_length) for index in summary.chunk_indexes)
    topics = {number: channel.topic for number, channel in summary.channels.items()}
    columns = BatchColumns()
    parts = sorted((index.offset, index.data_size) for index in summary.attachment_indexes if index.name == INDEX_NAME)
    for offset, _ in parts:
        file.seek(offset)
        part = next(iter(StreamReader(file, skip_magic=True, record_size_limit=MAX_PART_BYTES).records))
        if not isinstance(part, Attachment):
            raise RecordingError("no index where the summary says")
        columns.extend(BatchColumns.decode(part.data))
    columns.check(len(chunks))
    counts = summary.statistics.channel_message_counts
    if (
        not parts
        or not len(columns)
        or len(columns) != sum(counts.get(number, 0) for number, topic in topics.items() if topic in BATCH_CHANNELS)
    ):
        raise RecordingError("the index is not of every batch")
    marking = {number for number, topic in topics.items() if topic == BOOKMARK_CHANNEL}
    marked = [index.chunk_start_offset for index in summary.chunk_indexes if marking & set(index.message_index_offsets)]
    return Layout(chunks, topics, columns, [number for number, (start, _) in enumerate(chunks) if start in marked])


def _check_sums(file: BinaryIO) -> None:
    """Raises RecordingError unless data and summary are what was written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - _FOOTER_BYTES - _MAGIC_BYTES)
    tail = file.read(_FOOTER_BYTES)
    footer = next(iter(StreamReader(BytesIO(tail), skip_magic=True).records))
    if not isinstance(footer, Footer) or not 0 < footer.summary_start < size:
        raise RecordingError("no summary")
    file.seek(footer.summary_start)
    summary_size = size - _MAGIC_BYTES - 4 - footer.summary_start
    if summary_size > MAX_SUMMARY_BYTES or zlib.crc32(file.read(summary_size)) != footer.summary_crc:
        raise RecordingError("the summary is damaged")
    file.seek(footer.summary_start - 4)
    wanted, data_size, found = int.from_bytes(file.read(4), "little"), footer.summary_start - _DATA_END_BYTES, 0
    file.seek(0)
    while data_size > 0 and (block := file.read(min(_BLOCK, data_size))):
        found, data_size = zlib.crc32(block, found), data_size - len(block)
    if found != wanted:
        raise RecordingError("the data are damaged")
