"""Recording from outside: what the view was shown is in the file, and what it was not is marked."""

import copy
from pathlib import Path

import pytest

from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.events.types import Batch
from kvscope.transport.client import EngineClient
from kvscope.transport.recording import Recorder, RecordingError, read_recording
from kvscope.transport.recording.tap import Tap
from kvscope.transport.source import View


def folded(batches: list[Batch]) -> EngineState:
    state = EngineState()
    for batch in batches:
        state = apply_batch(state, copy.deepcopy(batch))
    return state


class Tapped:
    """A view that has seen the first `num_seen` batches, and a recording that begins there."""

    def __init__(self, path: Path, batches: list[Batch], num_seen: int) -> None:
        self.path, self.batches = path, batches
        self.tap = Tap()
        self.view = View(self.tap)
        self.recorder = Recorder(path)
        self.view.replace_state(folded(batches[:num_seen]), num_seen - 1)
        self.tap.begin(self.recorder, self.view)

    def apply(self, first: int, stop: int) -> None:
        for seq in range(first, stop):
            self.view.apply(seq, copy.deepcopy(self.batches[seq]))

    def snapshot(self, seq: int) -> None:
        self.view.replace_state(folded(self.batches[: seq + 1]), seq)

    def read(self):
        self.tap.end(self.view)
        self.recorder.close()
        assert self.recorder.error is None
        return read_recording(self.path)


@pytest.fixture
def batches(lab) -> list[Batch]:
    return lab.Stream(5).take(40)


def test_it_begins_with_a_keyframe(tmp_path: Path, batches: list[Batch]) -> None:
    tapped = Tapped(tmp_path / "run.mcap", batches, 10)
    tapped.apply(10, 20)
    tap, recording = tapped.tap, tapped.read()
    assert recording.initial_seq == 9
    assert recording.initial_state == folded(batches[:10])
    assert recording.batches == [(seq, batches[seq]) for seq in range(10, 20)]
    assert (tap.num_batches, tap.num_events) == (10, sum(len(batch.events) for batch in batches[10:20]))
    assert (tap.num_holes, tap.num_missing_batches, tap.ended) == (0, 0, None)
    assert tap.seconds >= 0


def test_a_loss_is_marked_by_a_keyframe(tmp_path: Path, batches: list[Batch]) -> None:
    tapped = Tapped(tmp_path / "run.mcap", batches, 10)
    tapped.apply(10, 15)
    tapped.snapshot(19)
    tapped.apply(20, 25)
    tap, recording = tapped.tap, tapped.read()
    assert recording.missing is None
    assert [seq for seq, _ in recording.batches] == [10, 11, 12, 13, 14, 19, 20, 21, 22, 23, 24]
    assert (tap.num_holes, tap.num_missing_batches) == (1, 5)
    state = copy.deepcopy(recording.initial_state)
    for _, batch in recording.batches:
        state = apply_batch(state, batch)
    assert state == folded(batches[:25])


def test_a_snapshot_of_what_is_known_leaves_no_mark(tmp_path: Path, batches: list[Batch]) -> None:
    tapped = Tapped(tmp_path / "run.mcap", batches, 10)
    tapped.apply(10, 15)
    tapped.snapshot(14)
    tapped.apply(15, 20)
    tap, recording = tapped.tap, tapped.read()
    assert [seq for seq, _ in recording.batches] == list(range(10, 20))
    assert tap.num_holes == 0


def test_another_life_ends_it(tmp_path: Path, lab, batches: list[Batch]) -> None:
    tapped = Tapped(tmp_path / "run.mcap", batches, 10)
    tapped.apply(10, 15)
    other = lab.Stream(6).take(30)
    tapped.view.replace_state(folded(other), 29)
    tapped.view.apply(30, lab.Stream(6).take(31)[30])
    assert tapped.tap.ended == "another engine has taken its place"
    assert [seq for seq, _ in tapped.read().batches] == list(range(10, 15))


def test_nothing_is_kept_after_its_end(tmp_path: Path, batches: list[Batch]) -> None:
    tapped = Tapped(tmp_path / "run.mcap", batches, 10)
    tapped.apply(10, 12)
    tapped.tap.end(tapped.view)
    tapped.apply(12, 14)
    tapped.snapshot(20)
    assert [seq for seq, _ in tapped.read().batches] == [10, 11]


def test_without_a_state_it_cannot_begin(tmp_path: Path) -> None:
    tap, recorder = Tap(), Recorder(tmp_path / "run.mcap")
    with pytest.raises(RecordingError, match="has not arrived"):
        tap.begin(recorder, View(tap))
    recorder.close()


def test_over_sockets(lab, tmp_path: Path) -> None:
    """Joined late, on a real stream: the recording folds to what was published."""
    served = lab.serve()
    served.publish(20)
    tap = Tap()
    client = EngineClient(lab.endpoints, View(tap))
    client.start()
    try:
        lab.wait_live(client, served)
        recorder = Recorder(tmp_path / "run.mcap")
        tap.begin(recorder, client.view)
        for _ in range(30):
            served.publish(10)
        lab.wait_live(client, served)
        tap.end(client.view)
        recorder.close()
    finally:
        client.close()
    recording = read_recording(tmp_path / "run.mcap")
    assert (recording.initial_seq, recording.missing) == (19, None)
    assert recording.batches == [(seq, served.stream.batches[seq]) for seq in range(20, 320)]
