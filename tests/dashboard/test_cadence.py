"""Cells change with every picture, words ten times a second; and both are up to date in the end."""

import pytest
from dashboard_story import StorySource, crowded_engine
from test_app import running, until

from kvscope.dashboard import cadence
from kvscope.dashboard.cadence import Cadence
from kvscope.dashboard.pane import StripPane


@pytest.fixture(autouse=True)
def ten_a_second(monkeypatch, words_with_every_picture):
    monkeypatch.setattr(cadence, "WORDS_PER_S", 10)


@pytest.mark.parametrize(("fps", "every"), [(60, 6), (30, 3), (24, 2), (15, 1), (12, 1), (1, 1)])
@pytest.mark.parametrize("jitter", [-0.2, 0.0, 0.2])
def test_some_pictures_bring_words(fps, every, jitter):
    words, with_words = Cadence(fps), []
    for number in range(60):
        now_s = (number + jitter * (number % 2)) / fps
        if not words.wait_s(now_s):
            words.drawn(now_s)
            with_words.append(number)
    assert with_words == list(range(0, 60, every))


def test_after_a_pause_words_come_at_once_and_without_a_picture_later():
    words = Cadence(30)
    assert not words.wait_s(0.0)
    words.drawn(0.0)
    assert 0.1 < 0.03 + words.wait_s(0.03) < 0.14
    assert not words.wait_s(0.5)


async def test_words_follow_the_cells_when_no_other_picture_comes():
    engine, batches = crowded_engine()
    source = StorySource(engine, batches)
    async with running(source, (120, 36)) as (app, pilot):
        for _ in range(8):
            source.feed(engine.step())
            await until(pilot, lambda: app._frame.revision == source.view.revision, "the cells")
        await until(pilot, lambda: app.shown_revision == source.view.revision, "the words")
        last = source.view.log[-1].sentence
        assert last in app.query_one("#events", StripPane).text()
