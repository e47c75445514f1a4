"""Checkpoints packed small: every fourth by itself, the others as what differs from the last of those.

The difference is left to zstd, which is given the earlier checkpoint as a dictionary: what both hold costs nothing.
"""

import msgspec
import zstandard

from kvscope.transport.recording.format import MAX_KEYFRAME_BYTES, RecordingError

FULL_EVERY = 4
_LEVEL = 6


class PackedCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """`base` is the number of the batch before the checkpoint that this one needs; None: it needs none."""

    base: int | None
    data: bytes


class DeltaPacker:
    """Packs checkpoints in the order of a recording."""

    def __init__(self) -> None:
        self._base: int | None = None
        self._base_raw = b""
        self._count = 0

    def pack(self, seq: int, raw: bytes) -> bytes:
        """The checkpoint after batch `seq`, to be kept."""
        if self._count % FULL_EVERY == 0:
            self._base, self._base_raw = None, b""
        self._count += 1
        packed = PackedCheckpoint(self._base, _compressor(len(raw), self._base_raw).compress(raw))
        if self._base is None:
            self._base, self._base_raw = seq, raw
        return msgspec.msgpack.encode(packed)


def parse_packed(message: bytes) -> PackedCheckpoint:
    """Raises RecordingError."""
    try:
        return msgspec.msgpack.decode(message, type=PackedCheckpoint)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"not a checkpoint ({error})") from None


def unpack(packed: PackedCheckpoint, base_raw: bytes) -> bytes:
    """Raises RecordingError when it is damaged, or larger than a checkpoint may be."""
    try:
        if not 0 <= zstandard.frame_content_size(packed.data) <= MAX_KEYFRAME_BYTES:
            raise RecordingError("a checkpoint is too large")
        dictionary = _dictionary(base_raw)
        raw = zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=1 << 27).decompress(packed.data)
    except zstandard.ZstdError as error:
        raise RecordingError(f"a checkpoint is damaged ({error})") from None
    return raw


def _compressor(size: int, base_raw: bytes) -> zstandard.ZstdCompressor:
    # The window must reach back over the whole of the earlier one.
    window_log = min(max((size + len(base_raw)).bit_length(), 10), 27)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL,
        source_size=size,
        dict_size=len(base_raw),
        window_log=window_log,
        write_checksum=1,
    )
    return zstandard.ZstdCompressor(dict_data=_dictionary(base_raw), compression_params=parameters)


def _dictionary(base_raw: bytes) -> zstandard.ZstdCompressionDict | None:
    if not base_raw:
        return None
    return zstandard.ZstdCompressionDict(base_raw, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
