"""Batches that share a frame come back as they were, and hostile ones become a refusal of bounded size."""

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvscope.transport.recording import packing
from kvscope.transport.recording.format import RecordingError
from kvscope.transport.recording.packing import BatchPacker, Form, Frame, PackedBatch, Unpacker, parse_batch

_batches = st.lists(st.tuples(st.sampled_from(Form), st.binary(min_size=1, max_size=300), st.booleans()), max_size=30)


@given(_batches)
def test_batches_come_back(batches: list[tuple[Form, bytes, bool]]) -> None:
    """Whatever their sizes, and wherever a frame ends between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "FRAME_BYTES", 500)
        packer, unpacker = BatchPacker(), Unpacker()
        for form, data, is_end in batches:
            if is_end:
                packer.end_frame()
            assert unpacker.unpack(packer.pack(form, data)) == (form, data)


def test_what_was_said_before_costs_next_to_nothing() -> None:
    packer, data = BatchPacker(), bytes(range(256)) * 4
    assert [len(packer.pack(Form.WIRE, data)) < 40 for _ in range(3)] == [False, True, True]


def test_a_batch_alone_says_nothing() -> None:
    """Only the frame from its start tells what a later batch is."""
    packer = BatchPacker()
    first, second, third = (packer.pack(Form.WIRE, bytes([number]) * 50) for number in range(3))
    unpacker = Unpacker()
    unpacker.unpack(first)
    with pytest.raises(RecordingError, match="does not continue"):
        unpacker.unpack(third)
    with pytest.raises(RecordingError, match="does not continue"):
        Unpacker().unpack(second)


def _one(data: bytes, size: int) -> PackedBatch:
    frame = zstandard.ZstdCompressor(compression_params=packing._PARAMETERS).compressobj()
    return PackedBatch(0, Form.WIRE, size, frame.compress(data) + frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))


def test_sizes_that_are_not_true() -> None:
    bomb = _one(bytes(100 << 20), 10)  # a few kilobytes that mean a hundred megabytes
    assert len(bomb.data) < 20_000
    assert Frame().unpack(bomb) == bytes(10)
    with pytest.raises(RecordingError, match="fewer bytes"):
        Frame().unpack(_one(b"abc", 4))
    with pytest.raises(RecordingError, match="fewer bytes"):
        Frame().unpack(PackedBatch(0, Form.WIRE, 1, b""))
    with pytest.raises(RecordingError, match="damaged"):
        Frame().unpack(PackedBatch(0, Form.WIRE, 1, b"not zstd"))


@pytest.mark.parametrize(
    "fields", [[0, 0, 0, b""], [0, 0, packing.MAX_PACKED_BYTES + 1, b""], [-1, 0, 1, b""], [0, 2, 1, b""], [0, 0], 7]
)
def test_what_is_no_packed_batch_is_refused(fields: object) -> None:
    with pytest.raises(RecordingError, match="not a packed batch"):
        parse_batch(msgspec.msgpack.encode(fields))


def test_a_frame_is_not_longer_than_it_may_be() -> None:
    """Nobody has to unpack more than that, and one batch, to look at one."""
    frame, data = (
        zstandard.ZstdCompressor(compression_params=packing._PARAMETERS).compressobj(),
        bytes(packing.FRAME_BYTES),
    )
    pieces = [frame.compress(data) + frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for _ in range(2)]
    reader = Frame()
    assert reader.unpack(PackedBatch(0, Form.WIRE, len(data), pieces[0])) == data
    with pytest.raises(RecordingError, match="does not continue"):
        reader.unpack(PackedBatch(1, Form.WIRE, len(data), pieces[1]))
