"""A recording in several files is the same recording, and each file can be read alone."""

import copy
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from kvscope.events.codec import encode_batch, encode_state
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.events.types import Batch
from kvscope.transport.recording import (
    Recorder,
    RecordingError,
    ReplaySource,
    SeriesRecorder,
    open_recorder,
    open_recording,
    open_series,
    read_recording,
    read_series,
)
from kvscope.transport.recording import recorder as recorder_module
from kvscope.transport.recording.stored_series import StoredSeries


def record(lab, path: Path, batches: list[Batch], **options: object) -> list[Path]:
    """Wait for the disk now and then, so that it is several files."""
    recorder, state = open_recorder(path, max_bytes=4_000, **options), EngineState()
    assert isinstance(recorder, SeriesRecorder)
    for seq, batch in enumerate(batches):
        state = apply_batch(state, copy.deepcopy(batch))
        current = recorder._recorders[-1]
        size = current.num_file_bytes
        recorder.record(seq, batch.time_ns, encode_batch(batch), batch, state)
        if seq % 40 == 0:
            lab.wait_until(lambda current=current, size=size: current.num_file_bytes > size)
    recorder.close()
    assert recorder.error is None
    return sorted(path.parent.glob("run.*.mcap"))


@pytest.fixture
def batches(make_stream) -> list[Batch]:
    return make_stream(4).take(300)


def test_each_alone_and_all_together(lab, tmp_path: Path, batches: list[Batch]) -> None:
    files = record(lab, tmp_path / "run.mcap", batches)
    assert len(files) >= 3
    assert files[0].name == "run.0001.mcap"
    whole = read_series(files)
    assert (whole.batches, whole.missing) == (list(enumerate(batches)), None)
    series = open_series(files)
    assert isinstance(series, StoredSeries)
    assert (list(series.batches), series.missing, series.last_seq) == (whole.batches, None, len(batches) - 1)
    state = EngineState()
    for path in files:
        part, stored = read_recording(path), open_recording(path)
        assert list(stored.batches) == part.batches
        assert path is files[0] or encode_state(part.initial_state) == encode_state(state)
        for _, batch in part.batches:
            state = apply_batch(state, copy.deepcopy(batch))


def test_files_out_of_order_or_with_one_missing(lab, tmp_path: Path, batches: list[Batch]) -> None:
    files = record(lab, tmp_path / "run.mcap", batches)
    for wrong in (files[::-1], [files[0], files[2]], [files[0], files[0]]):
        for read in (read_series, open_series):
            with pytest.raises(RecordingError, match="does not begin where"):
                read(wrong)
    files[0].write_bytes(files[0].read_bytes()[:-50])
    for first, following in pairwise(files[:2]):
        for read in (read_series, open_series):
            with pytest.raises(RecordingError, match="cannot follow it"):
                read([first, following])


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "last one torn"])
def test_every_moment_of_several_files_in_any_order(
    lab, tmp_path: Path, batches: list[Batch], torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of each file, and the state that each begins with, are of the moments they say."""
    monkeypatch.setattr(recorder_module, "CHECKPOINT_EVENTS", 20)
    files = record(lab, tmp_path / "run.mcap", batches)
    if torn:
        files.pop()  # it may hold next to nothing; the one before is as large as a file may be
        files[-1].write_bytes(files[-1].read_bytes()[:-20])
    series = open_series(files)
    assert isinstance(series, StoredSeries)
    assert (series.missing is not None) == torn
    states = [encode_state(EngineState())]
    state = EngineState()
    for batch in batches[: len(series.columns)]:
        state = apply_batch(state, copy.deepcopy(batch))
        states.append(encode_state(state))
    positions = series.columns.checkpoints
    assert len(positions) > len(files) * 2
    for number in range(len(positions)):
        for _ in range(2):  # whoever is given one folds on in it
            found = series.checkpoint(number)
            assert encode_state(found) == states[positions[number]]
            found.ref_counts[0] += 1
    source = ReplaySource(series)
    source.player._walker.rewind()
    for position in Random(2).choices(range(len(states)), k=60):
        source.player.seek(position)
        assert encode_state(source.view.state) == states[position]
    series.close()


def test_no_file_of_an_older_series_is_overwritten_or_left_among_the_new(lab, tmp_path: Path, batches: list) -> None:
    files = record(lab, tmp_path / "run.mcap", batches)
    before = [path.read_bytes() for path in files]
    files[0].unlink()
    with pytest.raises(RecordingError, match=r"run\.0002\.mcap exists; add --force"):
        open_recorder(tmp_path / "run.mcap", max_bytes=4_000)
    assert [path.read_bytes() for path in files[1:]] == before[1:]
    assert len(record(lab, tmp_path / "run.mcap", batches[:3], force=True)) == 1


def test_a_file_that_appears_in_the_way_ends_the_recording(lab, tmp_path: Path, batches: list[Batch]) -> None:
    recorder, state = open_recorder(tmp_path / "run.mcap", max_bytes=1), EngineState()
    (tmp_path / "run.0002.mcap").write_bytes(b"mine")
    lab.wait_until(lambda: recorder._recorders[-1].num_file_bytes > 0)
    for seq, batch in enumerate(batches[:3]):
        state = apply_batch(state, batch)
        recorder.record(seq, 1, encode_batch(batch), batch, state)
    recorder.close()
    assert "run.0002.mcap exists" in str(recorder.error)
    assert (tmp_path / "run.0002.mcap").read_bytes() == b"mine"
    assert len(read_recording(tmp_path / "run.0001.mcap").batches) == 1


def test_no_file_is_begun_for_a_state_alone(lab, tmp_path: Path, batches: list[Batch]) -> None:
    """The last batch may be the one that fills a file."""
    recorder, state = open_recorder(tmp_path / "run.mcap", max_bytes=1), EngineState()
    for seq, batch in enumerate(batches[:2]):
        lab.wait_until(lambda: recorder._recorders[-1].num_file_bytes > 0)
        state = apply_batch(state, batch)
        recorder.record(seq, 1, encode_batch(batch), batch, state)
    recorder.close()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["run.0001.mcap", "run.0002.mcap"]
    assert [seq for path in files for seq, _ in read_recording(path).batches] == [0, 1]
    assert [len(read_recording(path).batches) for path in files] == [1, 1]


def test_a_state_alone_is_a_recording_and_may_be_the_last(lab, tmp_path: Path, batches: list[Batch]) -> None:
    """As of an engine that was idle while somebody recorded it."""
    files, state = record(lab, tmp_path / "run.mcap", batches), EngineState()
    for batch in batches:
        state = apply_batch(state, copy.deepcopy(batch))
    files.append(tmp_path / f"run.{len(files) + 1:04}.mcap")
    recorder = Recorder(files[-1])
    recorder.record_keyframe(len(batches) - 1, 1, encode_state(state))
    recorder.close()
    for track in (open_recording(files[-1]), open_series(files)):
        source = ReplaySource(track)
        source.player.rewind()
        source.player.seek_end()
        assert encode_state(source.view.state) == encode_state(state)


def test_two_recordings_in_one_file_are_named(lab, tmp_path: Path, batches: list[Batch]) -> None:
    files = record(lab, tmp_path / "run.mcap", batches)
    both = tmp_path / "both.mcap"
    both.write_bytes(files[0].read_bytes() + files[1].read_bytes())
    for found in (read_recording(both), open_recording(both)):
        assert list(found.batches) == read_recording(files[0]).batches
        assert f"{files[1].stat().st_size:,} bytes after its end are not read" in str(found.missing)


def test_an_empty_name_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="a directory, not a file"):
        open_recorder(Path())
