"""Playing a recording back: forwards, backwards, faster, and from the start again."""

import copy
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.transport.recording import Recording, ReplaySource
from kvscope.transport.source import Status
from kvscope.transport.timetravel.clock import PlayClock


def state_after(stream, count: int) -> EngineState:
    state = EngineState()
    for batch in stream.batches[:count]:
        state = apply_batch(state, copy.deepcopy(batch))
    return state


@pytest.fixture
def stream(lab):
    made = lab.Stream(6)
    made.take(30)
    made.full_state(2)
    made.take(19)
    return made


@pytest.fixture
def source(stream) -> Iterator[ReplaySource]:
    made = ReplaySource(Recording(Path("run.mcap"), list(enumerate(stream.batches))))
    made.start()
    yield made
    made.close()
    made.close()


def test_it_plays_to_the_end(lab, stream, source: ReplaySource) -> None:
    source.player.speed = 100.0
    lab.wait_until(lambda: source.player.position == source.player.length == 50)
    assert not source.player.playing
    assert source.view.status is Status.REPLAY
    assert source.view.state == stream.state
    assert source.view.findings == []
    source.player.play()
    assert not source.player.playing


def test_steps_and_seeking(stream, source: ReplaySource) -> None:
    player = source.player
    player.pause()
    player.seek_start()
    assert (player.position, source.view.last_seq, len(source.view.log)) == (0, None, 0)
    for count in range(1, 51):
        assert player.step_forward()
        assert source.view.state == state_after(stream, count)
    assert player.step_forward() is False
    log = [entry.sentence for entry in source.view.log]
    for count in range(49, 25, -3):
        player.seek(count)
        assert source.view.state == state_after(stream, count)
        assert player.step_back()
        assert source.view.state == state_after(stream, count - 1)
    player.seek(50)
    assert [entry.sentence for entry in source.view.log] == log
    player.seek_start()
    assert player.step_back() is False


def test_toggle_and_speed(source: ReplaySource) -> None:
    player = source.player
    player.seek_start()
    player.pause()
    assert not player.playing
    player.toggle()
    assert player.playing
    player.toggle()
    assert not player.playing
    for asked, given in ((0.001, 0.1), (2.0, 2.0), (1e9, 1000.0)):
        player.speed = asked
        assert player.speed == given


def test_long_silences_are_cut(lab, stream) -> None:
    """An hour between two batches; the test would time out if it were waited for."""
    hour = 3_600_000_000_000
    batches = [
        (seq, msgspec.structs.replace(batch, time_ns=seq * hour)) for seq, batch in enumerate(stream.batches[:4])
    ]
    source = ReplaySource(Recording(Path("run.mcap"), batches))
    source.start()
    source.player.speed = 10.0
    lab.wait_until(lambda: source.player.position == 4)
    source.close()


def test_from_mid_life(stream) -> None:
    initial = state_after(stream, 10)
    recording = Recording(Path("run.mcap"), list(enumerate(stream.batches))[10:20], initial, 9)
    source = ReplaySource(recording)
    source.start()
    source.player.pause()
    for _ in range(2):
        source.player.seek(10)
        assert source.view.state == state_after(stream, 20)
        source.player.seek_start()
        assert source.view.state == state_after(stream, 10)
        assert (source.view.last_seq, len(source.view.log)) == (9, 0)
    index, before = source.player.index, state_after(stream, 10)
    assert (index.step_at(0), index.time_ns_at(0)) == (before.step, before.time_ns)
    assert (index.step_at(1), index.time_ns_at(1)) == (stream.batches[10].step, stream.batches[10].time_ns)
    source.close()


def test_what_is_missing_is_said(stream) -> None:
    source = ReplaySource(Recording(Path("run.mcap"), list(enumerate(stream.batches)), missing="ends abruptly"))
    source.start()
    assert (source.view.status, source.view.status_detail) == (Status.REPLAY, "ends abruptly")
    source.close()


def test_a_batch_that_does_not_fit_ends_the_playback(lab, stream) -> None:
    batches = list(enumerate(stream.batches))
    del batches[1]
    source = ReplaySource(Recording(Path("run.mcap"), batches))
    source.start()
    source.player.pause()
    source.player.seek(len(batches))
    assert "does not fit" in source.view.status_detail
    assert source.player.position == source.player.length < len(batches)
    source.close()


def test_close_before_start(stream) -> None:
    ReplaySource(Recording(Path("run.mcap"), list(enumerate(stream.batches)))).close()


def test_the_clock_keeps_the_pace_and_cuts_silences() -> None:
    clock = PlayClock([0, 10**9, 3_600 * 10**9, 3_600 * 10**9 + 5 * 10**8])
    assert clock.length_s == 2.5  # the hour is one second
    clock.set(0, 100.0)
    assert (clock.read(100.0), clock.wait_s(1)) == (1, 1.0)  # the first batch at once
    clock.speed = 8.0
    assert clock.read(100.125) == 2  # a second has been played
    assert clock.wait_s(2) == 1 / 8
    assert clock.read(1_000.0) == 4  # a long delay counts as a quarter of a second
    clock.set(3, 1_000.0)
    assert (clock.read(1_000.0), clock.wait_s(3)) == (3, 0.5 / 8)
    for lonely in ([], [7]):
        assert PlayClock(lonely).read(5.0) == 1
