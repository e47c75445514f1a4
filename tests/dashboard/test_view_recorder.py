"""R in the dashboard: what is watched goes into a file, from the viewer's side."""

import os
from pathlib import Path

import pytest
from dashboard_story import StorySource, crowded_engine
from test_app import running, screen_text, until

from kvscope.dashboard.view_recorder import recording_path
from kvscope.transport.recording import read_recording
from kvscope.transport.recording.tap import Tap
from kvscope.transport.source import View


class TappedSource(StorySource):
    """A live pocket engine whose view can be recorded, as `attach` makes it."""

    def __init__(self, engine, batches=()):
        super().__init__(engine, batches)
        self.tap = Tap()
        self.view = View(self.tap)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TappedSource:
    monkeypatch.chdir(tmp_path)
    engine, batches = crowded_engine()
    return TappedSource(engine, batches + engine.run(2))


def feed(source: TappedSource) -> None:
    source.act(lambda engine: engine.run(1))


async def test_one_key_starts_and_ends_it(source: TappedSource, tmp_path: Path):
    async with running(source, (160, 45)) as (app, pilot):
        first = source.view.last_seq
        await pilot.press("R")
        await until(pilot, lambda: "REC  kvscope-" in screen_text(app), "the header says it")
        feed(source)
        last = source.view.last_seq
        await pilot.press("R")
        await until(pilot, lambda: "REC" not in screen_text(app).splitlines()[0], "the header says it is over")
        feed(source)
    [path] = tmp_path.glob("kvscope-*.mcap")
    recording = read_recording(path)
    assert (recording.initial_seq, recording.last_seq, recording.missing) == (first, last, None)
    assert last > first


async def test_leaving_ends_it_whole(source: TappedSource, tmp_path: Path):
    async with running(source, (80, 24)) as (app, pilot):
        await pilot.press("R")
        await until(pilot, lambda: "REC" in screen_text(app).splitlines()[0], "the header says it")
        feed(source)
    [path] = tmp_path.glob("kvscope-*.mcap")
    assert read_recording(path).missing is None


async def test_one_that_breaks_says_so(source: TappedSource, tmp_path: Path):
    async with running(source, (160, 45)) as (app, pilot):
        await pilot.press("R")
        await until(pilot, lambda: "REC" in screen_text(app).splitlines()[0], "the header says it")
        next(tmp_path.glob("kvscope-*.mcap")).unlink()
        feed(source)
        await until(pilot, lambda: "REC" not in screen_text(app).splitlines()[0], "it has ended")
        await until(pilot, lambda: any("file was deleted" in note.message for note in app._notifications), "told why")


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert recording_path().parent == tmp_path / "kvscope"
    assert (tmp_path / "kvscope").stat().st_mode & 0o777 == 0o700
