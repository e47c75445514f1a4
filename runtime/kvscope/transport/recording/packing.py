"""Batches packed small: one zstd frame runs through many messages, and each holds what its batch adds to it.

A chunk holds what came within 50 ms, which may be two batches: by itself it would say again which sequences there are.
Every message ends with a whole block, so that a recording which is cut short can be read up to its last message. A
frame ends after 256 KiB of batches: nobody has to unpack more than that to look at one of them.
"""

from enum import IntEnum
from io import BytesIO
from typing import Annotated

import msgspec
import zstandard

from kvscope.events.transposed import MAX_TRANSPOSED_BYTES
from kvscope.transport.recording.format import RecordingError

FRAME_BYTES = 1 << 18  # of batches, before a new frame begins; the window is as large
MAX_PACKED_BYTES = MAX_TRANSPOSED_BYTES  # of one batch; larger ones stay as they are
_LEVEL, _WINDOW_LOG = 7, 18
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=_WINDOW_LOG, write_content_size=0)


class Form(IntEnum):
    """What a packed batch is."""

    WIRE = 0  # as on the wire
    TRANSPOSED = 1


class PackedBatch(msgspec.Struct, frozen=True, array_like=True):
    """Its frame began `place` batches before it; unpacked it has `size` bytes."""

    place: Annotated[int, msgspec.Meta(ge=0, le=FRAME_BYTES)]
    form: Form
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_PACKED_BYTES)]
    data: bytes


_decoder = msgspec.msgpack.Decoder(PackedBatch)


class BatchPacker:
    """Packs the batches of a recording in their order."""

    def __init__(self) -> None:
        self._place, self._num_bytes = 0, FRAME_BYTES

    def end_frame(self) -> None:
        """The next batch does not follow on the last one that was packed."""
        self._num_bytes = FRAME_BYTES

    def pack(self, form: Form, data: bytes) -> bytes:
        """The message to be kept."""
        if self._num_bytes >= FRAME_BYTES:
            self._frame = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compressobj()
            self._place = self._num_bytes = 0
        added = self._frame.compress(data) + self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        packed = PackedBatch(self._place, form, len(data), added)
        self._place += 1
        self._num_bytes += len(data)
        return msgspec.msgpack.encode(packed)


class _Added(BytesIO):
    """What a frame reads from: one batch after the other. A frame must not be it: zstd's reader is never collected."""

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        if not found:
            raise RecordingError("a batch has fewer bytes than it says")
        return found

    def put(self, data: bytes) -> None:
        self.seek(0)
        self.truncate()
        self.write(data)
        self.seek(0)


class Frame:
    """Unpacks the batches of one frame, from its first on."""

    def __init__(self) -> None:
        self._added = _Added()
        self._unpacked = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG).stream_reader(self._added)
        self.num_batches = self.num_bytes = 0

    def unpack(self, packed: PackedBatch) -> bytes:
        """The next batch. Raises RecordingError."""
        if packed.place != self.num_batches or self.num_bytes >= FRAME_BYTES:
            raise RecordingError("a batch does not continue the one before it")
        self._added.put(packed.data)
        try:
            data: bytes = self._unpacked.read(packed.size)
        except zstandard.ZstdError as error:
            raise RecordingError(f"a batch is damaged ({error})") from None
        if len(data) != packed.size:
            raise RecordingError("a batch has fewer bytes than it says")
        self.num_batches += 1
        self.num_bytes += len(data)
        return data


def parse_batch(message: bytes) -> PackedBatch:
    """Raises RecordingError."""
    try:
        return _decoder.decode(message)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RecordingError(f"not a packed batch ({error})") from None


class Unpacker:
    """Unpacks the batches of a recording in their order."""

    def __init__(self) -> None:
        self._frame = Frame()

    def unpack(self, message: bytes) -> tuple[Form, bytes]:
        """What the batch is, and its bytes. Raises RecordingError."""
        packed = parse_batch(message)
        if packed.place == 0:
            self._frame = Frame()
        return packed.form, self._frame.unpack(packed)
