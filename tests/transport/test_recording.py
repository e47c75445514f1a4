"""Recordings: what was written comes back, what was torn is a prefix, what was changed is never believed."""

import copy
import errno
import io
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import pytest
import zstandard
from mcap.reader import make_reader
from mcap.writer import Writer

from kvscope.events.codec import encode_batch, encode_state
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState, FullState
from kvscope.transport.recording import Recorder, Recording, RecordingError, read_recording
from kvscope.transport.recording import format as recording_format
from kvscope.transport.recording import recorder as recorder_module
from kvscope.transport.recording.format import MAX_CHUNK_BYTES
from kvscope.transport.recording.packing import Unpacker


def record(path: Path, batches: list, **options: object) -> Path:
    recorder = Recorder(path, **options)
    for seq, batch in enumerate(batches):
        recorder.record(seq, 10**18 + batch.time_ns, encode_batch(batch))
    recorder.close()
    assert recorder.error is None
    return path


@pytest.fixture
def batches(lab) -> list:
    return lab.Stream(4).take(40)


def test_round_trip(tmp_path: Path, batches: list) -> None:
    path = record(tmp_path / "run.mcap", batches)
    recording = read_recording(path)
    assert recording.batches == list(enumerate(batches))
    assert (recording.missing, recording.initial_state, recording.num_refused_events) == (None, None, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_any_mcap_reader_opens_it(tmp_path: Path, batches: list) -> None:
    path = record(tmp_path / "run.mcap", batches)
    with path.open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        messages = list(reader.iter_messages())
        [metadata] = list(reader.iter_metadata())
        assert reader.get_header().profile == "kvscope"
    assert {channel.topic for _, channel, _ in messages} == {"packed"}
    assert {channel.message_encoding for _, channel, _ in messages} == {"msgpack"}
    assert [message.log_time for _, _, message in messages] == [10**18 + batch.time_ns for batch in batches]
    assert [message.sequence for _, _, message in messages] == list(range(40))
    unpacker = Unpacker()
    payloads = [unpacker.unpack(message.data)[1] for _, _, message in messages]
    assert msgpack.unpackb(payloads[0])[0] == batches[0].epoch
    assert set(metadata.metadata) == {"kvscope_version", "schema_version"}


def test_an_existing_file_is_kept(tmp_path: Path, batches: list) -> None:
    path = record(tmp_path / "run.mcap", batches)
    before = path.read_bytes()
    with pytest.raises(RecordingError, match="exists; add --force"):
        Recorder(path)
    assert path.read_bytes() == before
    record(path, batches[:3], force=True)
    assert len(read_recording(path).batches) == 3


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "run.mcap", tmp_path):
        with pytest.raises(RecordingError, match=r"cannot write|exists"):
            Recorder(path)


def test_recording_from_mid_life(lab, tmp_path: Path) -> None:
    served = lab.serve()
    served.publish(10)
    served.drain()
    recorder = Recorder(tmp_path / "run.mcap")
    served.publisher.set_recorder(recorder)
    served.publish(20)
    served.drain()
    lab.wait_until(lambda: served.publisher.last_seq == 29)
    served.publisher.set_recorder(None)
    served.publish(5)
    recorder.close()
    recording = read_recording(tmp_path / "run.mcap")
    assert recording.initial_seq == 9
    assert [seq for seq, _ in recording.batches] == list(range(10, 30))
    state = recording.initial_state
    assert state is not None
    for _, batch in recording.batches:
        state = apply_batch(state, copy.deepcopy(batch))
    assert state.requests == replayed(served.stream.batches[:30]).requests


def replayed(batches: list) -> EngineState:
    state = EngineState()
    for batch in batches:
        state = apply_batch(state, copy.deepcopy(batch))
    return state


def test_a_keyframe_in_the_middle_is_a_full_state(tmp_path: Path, batches: list) -> None:
    recorder = Recorder(tmp_path / "run.mcap")
    state = replayed(batches[:10])
    recorder.record(0, 1, encode_batch(batches[0]))
    recorder.record_keyframe(9, 2, encode_state(state))
    recorder.record(10, 3, encode_batch(batches[10]))
    recorder.close()
    recording = read_recording(tmp_path / "run.mcap")
    assert [seq for seq, _ in recording.batches] == [0, 9, 10]
    assert recording.batches[1][1].events == (FullState(state=state),)


def test_numbers_beyond_32_bits(tmp_path: Path, batches: list) -> None:
    recorder = Recorder(tmp_path / "run.mcap")
    first = (1 << 32) - 3
    recorder.record_keyframe(first - 1, 1, encode_state(replayed(batches[:1])))
    for offset in range(6):
        recorder.record(first + offset, 2, encode_batch(batches[offset + 1]))
    recorder.close()
    assert [seq for seq, _ in read_recording(tmp_path / "run.mcap").batches] == [first + i for i in range(6)]


@pytest.fixture
def chunked(tmp_path: Path, batches: list, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small recording of several chunks."""
    monkeypatch.setattr("kvscope.transport.recording.recorder.CHUNK_BYTES", 300)
    return record(tmp_path / "small.mcap", batches[:14])


def read_or_refuse(path: Path, content: bytes | None = None) -> Recording | None:
    """None: refused with one line."""
    if content is not None:
        path.write_bytes(content)
    try:
        return read_recording(path)
    except RecordingError as error:
        if "\n" in str(error):
            raise
        return None


def test_cut_at_every_byte(chunked: Path, batches: list, tmp_path: Path) -> None:
    """Each cut gives a prefix that says it is one, or one line of refusal; longer cuts never give less."""
    content, whole, lengths = chunked.read_bytes(), list(enumerate(batches)), []
    for size in range(len(content)):
        recording = read_or_refuse(tmp_path / "cut.mcap", content[:size])
        lengths.append(0 if recording is None else len(recording.batches))
        if recording is not None:
            assert recording.batches == whole[: lengths[-1]]
            assert recording.missing is not None
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3, "there were several chunks to tear"
    assert lengths[-1] == 14


def test_flipped_bits_are_never_believed(chunked: Path, batches: list, tmp_path: Path) -> None:
    content, whole, source = chunked.read_bytes(), list(enumerate(batches[:14])), random.Random(7)
    for _ in range(1_500):
        damaged = bytearray(content)
        place = source.randrange(len(damaged))
        damaged[place] ^= 1 << source.randrange(8)
        recording = read_or_refuse(tmp_path / "flipped.mcap", damaged)
        if recording is not None:
            assert recording.batches == whole[: len(recording.batches)], place
            assert len(recording.batches) == len(whole) or recording.missing is not None, place


def test_random_bytes_in_place_of_the_rest(chunked: Path, tmp_path: Path) -> None:
    content, source = chunked.read_bytes(), random.Random(8)
    for _ in range(300):
        start = source.choice((8, 30, 100, 400))
        recording = read_or_refuse(tmp_path / "garbage.mcap", content[:start] + source.randbytes(200))
        assert recording is None or recording.missing is not None


def test_a_recording_that_is_still_being_written(lab, tmp_path: Path, batches: list) -> None:
    recorder = Recorder(tmp_path / "run.mcap")
    recorder.record(0, 1, encode_batch(batches[0]))

    def missing() -> str | None:
        try:
            return read_recording(recorder.path).missing
        except RecordingError:  # nothing is on the disk yet
            return None

    said = "ends abruptly after batch 0: it is still being written, or its writer was killed"
    lab.wait_until(lambda: missing() == said, said)
    recorder.close()
    assert missing() is None


def test_a_hole_ends_the_recording(tmp_path: Path, batches: list) -> None:
    recorder = Recorder(tmp_path / "run.mcap")
    for seq in (0, 1, 4, 5):
        recorder.record(seq, 1, encode_batch(batches[seq]))
    recorder.close()
    recording = read_recording(tmp_path / "run.mcap")
    assert recording.batches == list(enumerate(batches[:2]))
    assert recording.missing is not None
    said = r"ends abruptly after batch 1; ([\d,]+) bytes that follow are not read \(batches 2 to 3 are not in it\)"
    found = re.fullmatch(said, recording.missing)
    assert found is not None
    assert 0 < int(found[1].replace(",", "")) < recording.path.stat().st_size
    assert recording.has_hole


def test_a_lost_chunk_ends_the_recording(chunked: Path, batches: list, tmp_path: Path) -> None:
    """MCAP readers skip records of unknown kinds: a chunk whose first byte changed vanishes without a sound."""
    content = bytearray(chunked.read_bytes())
    places = [
        place
        for place in range(len(content) - 9)
        if content[place] == 6 and content[place + 40 : place + 80].find(b"zstd") >= 0
    ]
    content[places[1]] = 0x7F
    recording = read_or_refuse(tmp_path / "lost.mcap", content)
    assert recording is not None
    assert recording.batches == list(enumerate(batches))[: len(recording.batches)]
    assert "are not in it" in str(recording.missing)


def test_what_is_no_recording(tmp_path: Path, batches: list) -> None:
    empty, text, foreign, fifo = (tmp_path / name for name in ("empty", "text", "foreign", "fifo"))
    empty.touch()
    text.write_text("hello, this is no recording at all")
    os.mkfifo(fifo)
    with foreign.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2")
        writer.finish()
    expected = {
        tmp_path / "missing": "No such file",
        empty: "is empty",
        text: "is not an MCAP file",
        foreign: "is an MCAP file, but not a kvscope recording",
        fifo: "is not a file",
        tmp_path: "is not a file",
        record(tmp_path / "none.mcap", []): "holds no whole batch",
    }
    for path, words in expected.items():
        with pytest.raises(RecordingError, match=words) as refusal:
            read_recording(path)
        assert "\n" not in str(refusal.value)
        assert str(path) in str(refusal.value)


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that claims too much, and one whose zstd frame claims more than the chunk does, are not unpacked."""
    monkeypatch.setattr(zstandard, "decompress", lambda *_: pytest.fail("unpacked"))
    compressed = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    for claimed in (MAX_CHUNK_BYTES + 1, 100):
        chunk = struct.pack("<QQQII", 0, 0, claimed, 1, 4) + b"zstd" + struct.pack("<Q", len(compressed)) + compressed
        path = tmp_path / f"bomb{claimed}.mcap"
        with path.open("wb") as file:
            writer = Writer(file)
            writer.start(profile="kvscope")
            file.write(b"\x06" + struct.pack("<Q", len(chunk)) + chunk)
        with pytest.raises(RecordingError, match=r"claims|compressed"):
            read_recording(path)


def test_a_full_disk_ends_the_recording_and_nothing_else(lab) -> None:
    recorder = Recorder("/dev/full", force=True)
    served = lab.serve(recorder=recorder)
    client = lab.attach()
    served.publish(50)
    lab.wait_until(lambda: recorder.error is not None)
    lab.wait_until(lambda: client.view.engine_warning == recorder.error)
    assert "No space left on device" in str(recorder.error)
    served.publish(50)
    served.drain()
    lab.wait_until(lambda: served.publisher.last_seq == 99)
    recorder.close()
    recorder.close()
    assert served.publisher.snapshot().seq == 99


@pytest.mark.parametrize("where", ["write", "fsync"])
def test_a_broken_disk_ends_the_recording_and_nothing_else(lab, tmp_path: Path, monkeypatch, where: str) -> None:
    """Every byte that was synced before can still be read."""
    is_broken = threading.Event()

    def until_broken(call):
        def call_or_fail(*given):
            if is_broken.is_set():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*given)

        return call_or_fail

    class Disk(io.FileIO):
        write = until_broken(io.FileIO.write)

    if where == "write":
        monkeypatch.setattr(recorder_module.os, "fdopen", lambda file, mode: io.BufferedWriter(Disk(file, mode)))
    else:
        monkeypatch.setattr(recorder_module.os, "fsync", until_broken(os.fsync))
    path = tmp_path / "run.mcap"
    recorder = Recorder(path)
    served = lab.serve(recorder=recorder)
    client = lab.attach()
    served.publish(50)
    lab.wait_until(lambda: (read := read_or_refuse(path)) is not None and len(read.batches) == 50)
    is_broken.set()
    served.publish(50)
    lab.wait_until(lambda: recorder.error is not None)
    lab.wait_until(lambda: client.view.engine_warning == recorder.error)
    assert recorder.error == f"recording stopped: Input/output error: {path}"
    served.publish(50)
    lab.wait_until(lambda: served.publisher.last_seq == 149)
    recorder.close()
    assert served.publisher.snapshot().seq == 149
    recording = read_recording(path)
    assert [seq for seq, _ in recording.batches] == list(range(max(len(recording.batches), 50)))
    assert "ends abruptly" in str(recording.missing)


def test_only_a_file_can_be_recorded_to(tmp_path: Path) -> None:
    """Opening a pipe that nobody reads would make the engine wait for a reader."""
    unread, read, sock = (tmp_path / name for name in ("unread", "read", "socket"))
    os.mkfifo(unread)
    os.mkfifo(read)
    reader = os.open(read, os.O_RDONLY | os.O_NONBLOCK)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(sock))
        for path in (unread, read, sock, tmp_path):
            with pytest.raises(RecordingError, match=r"not a file|Is a directory") as refusal:
                Recorder(path, force=True)
            assert "\n" not in str(refusal.value)
    os.close(reader)


def test_a_deleted_file_is_reported(lab, tmp_path: Path, batches: list) -> None:
    recorder = Recorder(tmp_path / "run.mcap")
    recorder.record(0, 1, encode_batch(batches[0]))
    lab.wait_until(lambda: (tmp_path / "run.mcap").stat().st_size > 400)
    (tmp_path / "run.mcap").unlink()
    recorder.record(1, 1, encode_batch(batches[1]))
    lab.wait_until(lambda: recorder.error is not None)
    assert "the file was deleted" in str(recorder.error)
    recorder.close()


def test_a_disk_that_is_too_slow(tmp_path: Path, batches: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope.transport.recording.recorder.MAX_QUEUED_BYTES", 10)
    recorder = Recorder(tmp_path / "run.mcap")
    recorder.record(0, 1, encode_batch(batches[0]))
    assert "ends before batch 0" in str(recorder.error)
    recorder.close()


CHILD = """
import sys, time
from kvscope.events.codec import decode_batch
from kvscope.transport.recording import Recorder
import msgpack
recorder = Recorder(sys.argv[1])
payload = sys.stdin.buffer.read()
seq = 0
while True:
    recorder.record(seq, seq, payload)
    seq += 1
    time.sleep(0.0005)
"""


def test_killed_while_recording(lab, tmp_path: Path, batches: list) -> None:
    for round_number in range(3):
        path = tmp_path / f"killed{round_number}.mcap"
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdin=subprocess.PIPE)
        assert child.stdin is not None
        child.stdin.write(encode_batch(batches[0]))
        child.stdin.close()
        lab.wait_until(lambda path=path: path.exists() and path.stat().st_size > 1_500 + 400)
        child.send_signal(signal.SIGKILL)
        child.wait()
        recording = read_recording(path)
        assert recording.missing is not None
        assert [seq for seq, _ in recording.batches] == list(range(len(recording.batches)))
        assert len(recording.batches) > 20


def test_the_format_page_names_what_is_written() -> None:
    assert recording_format.__doc__ is not None
    for name in (recording_format.PROFILE, *recording_format.BATCH_CHANNELS, recording_format.KEYFRAME_CHANNEL):
        assert f'"{name}"' in recording_format.__doc__


def test_a_queue_that_never_empties_is_flushed_by_the_clock(
    lab, tmp_path: Path, batches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a busy engine that is killed would lose all that did not fill a chunk."""
    path, write = tmp_path / "busy.mcap", Recorder._write
    monkeypatch.setattr("kvscope.transport.recording.recorder.CHUNK_BYTES", 1 << 40)
    recorder = Recorder(path)
    lab.wait_until(lambda: path.stat().st_size > 0)
    empty = path.stat().st_size

    def write_and_queue_another(self: Recorder, *arguments: object) -> None:
        write(self, *arguments)
        self.record(0, 1, b"a batch")

    monkeypatch.setattr(Recorder, "_write", write_and_queue_another)
    recorder.record(0, 1, encode_batch(batches[0]))
    lab.wait_until(lambda: path.stat().st_size > empty)
    recorder.close()
