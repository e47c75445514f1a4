"""A recording that stays on disk shows what one read into memory shows, and never anything else."""

from pathlib import Path
from random import Random

import msgpack
import pytest

from kvscope.events import transposed as transposed_module
from kvscope.events.codec import encode_batch, encode_state
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.events.types import Batch
from kvscope.transport.recording import Recorder, RecordingError, ReplaySource, open_recording, read_recording
from kvscope.transport.recording import opening as opening_module
from kvscope.transport.recording import recorder as recorder_module
from kvscope.transport.recording.bookmarks import Bookmark, latest
from kvscope.transport.recording.deltas import DeltaPacker, parse_packed, unpack
from kvscope.transport.recording.packing import Form
from kvscope.transport.recording.scanning import scan_recording
from kvscope.transport.recording.stored import StoredRecording
from kvscope.transport.source import LogEntry
from kvscope.transport.timetravel import Place
from kvscope.transport.timetravel import player as player_module


@pytest.fixture
def batches(make_stream) -> list[Batch]:
    return make_stream(4).take(400)


@pytest.fixture
def recorded(tmp_path: Path, batches: list[Batch], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recording with a checkpoint every few batches, in many chunks and several parts of the index, in both forms."""
    monkeypatch.setattr(transposed_module, "MIN_GROUP", 2)
    monkeypatch.setattr(recorder_module, "CHECKPOINT_EVENTS", 20)
    monkeypatch.setattr(recorder_module, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(recorder_module, "PART_BATCHES", 50)
    recorder, state = Recorder(tmp_path / "run.mcap"), EngineState()
    for seq, batch in enumerate(batches):
        state = apply_batch(state, batch)
        recorder.record(seq, batch.time_ns, encode_batch(batch), batch, state)
    recorder.close()
    assert recorder.error is None
    return tmp_path / "run.mcap"


@pytest.mark.parametrize("close", [True, False], ids=["whole", "torn"])
def test_bookmarks_are_read_wherever_they_lie(
    tmp_path: Path, batches: list[Batch], close: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of earlier moments too; one without a note takes another away. They change nothing about the batches."""
    monkeypatch.setattr(recorder_module, "CHUNK_BYTES", 4000)
    kept = [Bookmark(seq=7, note="a"), Bookmark(seq=3, event=1, note="\x1bb"), Bookmark(seq=7)]
    recorder, state = Recorder(tmp_path / "run.mcap"), EngineState()
    for seq, batch in enumerate(batches):
        state = apply_batch(state, batch)
        recorder.record(seq, batch.time_ns, encode_batch(batch), batch, state)
        if seq % 100 == 50 and kept:
            recorder.record_bookmark(kept.pop(0), batch.time_ns)
    recorder.close()
    if not close:
        data = recorder.path.read_bytes()
        recorder.path.write_bytes(data[: int(len(data) * 0.7)])
    for read in (open_recording, read_recording):
        recording = read(recorder.path)
        assert isinstance(recording, StoredRecording) == (close and read is open_recording)
        assert [bookmark.seq for bookmark in recording.bookmarks] == [7, 3, 7]
        assert latest(recording.bookmarks) == [Bookmark(seq=3, event=1, note="␛b")]
        assert list(recording.batches) == list(enumerate(batches[: len(recording.batches)]))
        recording.close() if isinstance(recording, StoredRecording) else None


def states_of(batches: list[tuple[int, Batch]]) -> list[bytes]:
    """The state after 0, 1, ... batches, as bytes: a fold goes on changing it."""
    state, found = EngineState(), [encode_state(EngineState())]
    for _, batch in batches:
        state = apply_batch(state, batch)
        found.append(encode_state(state))
    return found


def test_the_same_batches_and_states(recorded: Path, batches: list[Batch]) -> None:
    stored, whole = open_recording(recorded), read_recording(recorded)
    assert isinstance(stored, StoredRecording)
    assert {stored._chunks.batch(position).form for position in range(len(batches))} == set(Form)
    assert list(stored.batches) == whole.batches == list(enumerate(batches))
    assert stored.missing is None
    states, positions = states_of(whole.batches), stored.columns.checkpoints
    assert len(positions) > 16  # some are differences
    for number in Random(1).sample(range(len(positions)), len(positions)):
        assert encode_state(stored.checkpoint(number)) == states[positions[number]]
    assert list(stored.columns.num_events) == [len(batch.events) for _, batch in whole.batches]
    stored.close()


def test_every_moment_in_any_order(recorded: Path) -> None:
    stored = open_recording(recorded)
    states = states_of(read_recording(recorded).batches)
    source = ReplaySource(stored)
    source.player._walker.rewind()
    for position in Random(2).choices(range(len(states)), k=60):
        source.player.seek(position)
        assert source.player.place == Place(position)
        assert encode_state(source.view.state) == states[position]


@pytest.mark.parametrize("read", [open_recording, read_recording], ids=["with checkpoints", "without"])
def test_played_fast_every_picture_is_exact(recorded: Path, read, lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture is of a moment of the recording, whatever lies between it and the one before; none is far behind."""
    monkeypatch.setattr(player_module, "FEW_EVENTS", 5)
    monkeypatch.setattr(player_module, "FRAME_EVENTS", 60)
    states = states_of(read_recording(recorded).batches)
    source = ReplaySource(read(recorded))
    shown: list[tuple[int, bytes]] = []
    show = source.view.show_moment

    def watch(state: EngineState, seq: int | None, log: list[LogEntry]) -> None:
        show(state, seq, log)
        shown.append((-1 if seq is None else seq, encode_state(state)))
        assert all(entry.seq <= shown[-1][0] for entry in log)

    monkeypatch.setattr(source.view, "show_moment", watch)
    source.start()
    source.player.speed = 1000.0
    lab.wait_until(lambda: not source.player.playing and source.player.position == len(states) - 1)
    source.close()
    assert 1 < len(shown) < len(states) / 2
    assert all(state == states[seq + 1] for seq, state in shown)
    assert encode_state(source.view.state) == states[-1]


def test_a_torn_one_is_scanned_and_says_what_the_reader_says(recorded: Path, tmp_path: Path) -> None:
    """Cut anywhere, with bytes changed, and with something behind its end: never another batch."""
    data, random, opened = recorded.read_bytes(), Random(5), 0
    damaged = [data[:size] for size in random.sample(range(len(data)), 40)]
    damaged += [
        data[:place] + bytes([data[place] ^ (1 << random.randrange(8))]) + data[place + 1 :]
        for place in random.sample(range(len(data)), 30)
    ]
    for content in (*damaged, data, data + b"more"):
        path = tmp_path / "torn.mcap"
        path.write_bytes(content)
        try:
            whole = read_recording(path)
        except RecordingError:
            with pytest.raises(ValueError, match=r"."):
                scan_recording(path)
            continue
        stored = scan_recording(path)
        opened += 1
        assert list(stored.batches) == whole.batches
        assert (stored.missing, stored.has_hole) == (whole.missing, whole.has_hole)
        stored.close()
    assert opened > 50


def test_a_scanned_one_goes_back_by_its_checkpoints(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.write_bytes(recorded.read_bytes()[: recorded.stat().st_size // 2])
    states = states_of(read_recording(recorded).batches)
    monkeypatch.setattr(opening_module, "MAX_READ_BYTES", 1000)
    told: list[tuple[str, int, int]] = []
    stored = open_recording(recorded, lambda *progress: told.append(progress))
    assert isinstance(stored, StoredRecording)
    assert stored.missing is not None
    assert told[-1][0] == "run.mcap"
    assert 0 < told[0][1] < told[-1][1] <= told[-1][2] == recorded.stat().st_size
    positions = stored.columns.checkpoints
    assert len(positions) > 16
    for number, position in enumerate(positions):
        assert encode_state(stored.checkpoint(number)) == states[position]


def test_the_index_knows_what_a_survey_finds(recorded: Path) -> None:
    told, found = ReplaySource(open_recording(recorded)).player.survey, ReplaySource(read_recording(recorded))
    found.player.survey.run()
    told.run()
    assert list(told.held) == list(found.player.survey.held)
    assert told.kinds == found.player.survey.kinds
    assert told.num_blocks == found.player.survey.num_blocks


def test_a_flipped_bit_is_never_believed(recorded: Path, tmp_path: Path) -> None:
    """Whatever is damaged: what opens is a beginning of what was written."""
    data, whole, random = recorded.read_bytes(), read_recording(recorded).batches, Random(3)
    damaged = tmp_path / "damaged.mcap"
    for _ in range(60):
        changed = bytearray(data)
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
        damaged.write_bytes(changed)
        try:
            found = open_recording(damaged)
        except ValueError:
            continue
        batches = list(found.batches)
        assert batches == whole[: len(batches)]
        assert len(batches) == len(whole) or found.missing


def test_a_torn_one_is_read_up_to_where_it_ends(recorded: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.mcap"
    torn.write_bytes(recorded.read_bytes()[:-200])
    found = open_recording(torn)
    assert list(found.batches) == read_recording(recorded).batches
    assert found.missing is not None


def test_without_the_states_there_is_no_index(tmp_path: Path, batches: list[Batch]) -> None:
    recorder = Recorder(tmp_path / "plain.mcap")
    for seq, batch in enumerate(batches[:5]):
        recorder.record(seq, batch.time_ns, encode_batch(batch))
    recorder.close()
    assert not isinstance(open_recording(tmp_path / "plain.mcap"), StoredRecording)


def test_differences_come_back_whole() -> None:
    random, packer = Random(4), DeltaPacker()
    raw = bytearray(random.randbytes(50_000))
    base = bytes(raw)
    assert unpack(parse_packed(packer.pack(0, base)), b"") == base
    raw[100:110] = b"0123456789"
    packed = packer.pack(1, bytes(raw))
    assert len(packed) < 1000
    assert unpack(parse_packed(packed), base) == bytes(raw)
    with pytest.raises(ValueError, match="damaged"):
        unpack(parse_packed(packed), bytes(reversed(base)))


def test_unreadable_events_are_counted_as_they_are_met(tmp_path: Path, batches: list[Batch], lab) -> None:
    """By an index nobody knows them; whoever has looked at every batch knows them all, each once."""
    recorder, state = Recorder(tmp_path / "run.mcap"), EngineState()
    for seq, batch in enumerate(batches):
        fields = msgpack.unpackb(encode_batch(batch))
        fields[4] += [{"type": "of_tomorrow", "n": seq}] * (20 if seq == 100 else seq == 200)
        state = apply_batch(state, batch)
        recorder.record(seq, batch.time_ns, msgpack.packb(fields), batch, state)
    recorder.close()
    stored = open_recording(recorder.path)
    source = ReplaySource(stored)
    assert source.view.num_refused_events == 0
    source.start()
    lab.wait_until(lambda: not source.player.survey.is_working)
    source.player.seek(150)
    assert (source.view.num_refused_events, read_recording(recorder.path).num_refused_events) == (21, 21)
    source.close()


def test_looking_back_finds_on_disk_what_it_finds_in_memory(recorded: Path) -> None:
    """Where batches are passed over by their bytes, nothing is missed."""
    stored, whole = (ReplaySource(read(recorded)).player for read in (open_recording, read_recording))
    rng, found = Random(3), 0
    for player in (stored, whole):
        player._walker.rewind()
    for _ in range(40):
        place, block_id = rng.randrange(stored.length), rng.randrange(12)
        request_id = f"r{rng.randrange(1, 12)}"
        for name, subject in (
            ("block_change", block_id),
            ("block_release", block_id),
            ("admission", request_id),
            ("preemption", request_id),
        ):
            stored.seek(place)
            whole.seek(place)
            answer = getattr(stored, f"back_to_{name}")(subject)
            assert answer == getattr(whole, f"back_to_{name}")(subject)
            assert stored.place == whole.place
            found += answer
    assert found > 40
    assert stored.looked_back is None
