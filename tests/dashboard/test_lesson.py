"""The lesson on a scripted engine: every moment is reached, back shows the earlier one, leaving hands over."""

import contextlib
import sys
from unittest.mock import Mock

import pytest
from dashboard_story import StoryEngine
from test_app import running, screen_text, until
from test_time_travel import RememberingSource

from kvscope.dashboard.lesson import MOMENTS, LessonApp, open_sequences
from kvscope.dashboard.prompt import PromptBar
from kvscope.transport.source import Status


async def at(app, pilot, number: int) -> None:
    await until(pilot, lambda: f"Lesson {number} of {len(MOMENTS)}" in screen_text(app), f"moment {number}")


def written(view) -> tuple[int, ...]:
    return tuple(seq.num_written for seq in open_sequences(view.state))


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (160, 45)])
async def test_each_step_reaches_its_moment_and_the_way_back_shows_them_again(size):
    source = RememberingSource(StoryEngine(free=[3, 0, 1, 4, 5, 2]))
    app = LessonApp(source, title="story", fps=200)
    async with app.run_test(size=size) as pilot:
        for number, moment in enumerate(MOMENTS, start=1):
            await at(app, pilot, number)
            assert written(source.view) == moment.written
            assert moment.caption.split()[-1] in screen_text(app)  # the caption is on the screen to its end
            for pane in ("#grid", "#table"):
                await until(pilot, lambda pane=pane: app.query_one(pane).content_height >= 2, f"{pane} has room")
            assert app.query_one("#table").region.bottom <= app.query_one(PromptBar).region.y
            await pilot.press("n" if number < len(MOMENTS) else "p")
        counts = [call for call, _ in source.control.calls]
        for number in range(len(MOMENTS) - 1, 0, -1):
            await at(app, pilot, number)
            assert app._past.view.status is Status.HISTORY
            assert written(app._past.view) == MOMENTS[number - 1].written
            await pilot.press("p")
        assert [call for call, _ in source.control.calls] == counts  # the engine was not asked again
        await pilot.press("escape")
        await until(pilot, lambda: source.control.calls[-1][0] == "resume", "the engine runs on")
        await until(pilot, lambda: "Lesson 1" not in screen_text(app) and app._past is None, "live again")
        await pilot.press("p")  # the key is the dashboard's own again: pause
        await until(pilot, lambda: source.control.calls[-1][0] == "pause", "the keyboard is handed over")


async def test_next_after_the_last_moment_hands_over():
    source = RememberingSource(StoryEngine())
    app = LessonApp(source, title="story", fps=200)
    async with app.run_test(size=(80, 24)) as pilot:
        for number in range(1, len(MOMENTS) + 1):
            await at(app, pilot, number)
            await pilot.press("n")
        await until(pilot, lambda: source.control.calls[-1][0] == "resume", "handed over")
        tables = [seq.block_table for seq in open_sequences(source.view.state)]
        assert tables[0][0] == tables[1][0]
        assert tables[0][1] != tables[1][1]


async def test_the_key_for_live_leads_to_the_newest_moment_not_past_its_caption():
    source = RememberingSource(StoryEngine())
    app = LessonApp(source, title="story", fps=200)
    async with app.run_test(size=(80, 24)) as pilot:
        for number in (1, 2, 3):
            await at(app, pilot, number)
            await pilot.press("n" if number < 3 else "p")
        await at(app, pilot, 2)
        await until(pilot, lambda: app._past is not None, "an earlier moment")
        await pilot.press("L")
        await at(app, pilot, 3)
        assert app._past is None


async def test_a_key_opens_the_lesson_on_an_engine_of_its_own(monkeypatch):
    status, commands = 0, []

    def run(command, **_):
        commands.append(command)
        return Mock(returncode=status)

    async with running(RememberingSource(StoryEngine()), ascii_only=True) as (app, pilot):
        monkeypatch.setattr("kvscope.dashboard.actions.subprocess.run", run)
        await pilot.press("L")
        await until(pilot, lambda: "cannot be handed over" in screen_text(app), "no terminal here")
        monkeypatch.setattr(app, "suspend", contextlib.nullcontext)
        await pilot.press("L")
        await until(pilot, lambda: commands, "the lesson")
        assert commands[0][:5] == [sys.executable, "-m", "kvscope.dashboard", "demo", "--lesson"]
        assert commands[0][5:] == ["--theme", "kvscope", "--ascii"]
        assert "there was no lesson" not in screen_text(app)
        status = 2
        await pilot.press("L")
        await until(pilot, lambda: "there was no lesson" in screen_text(app), "it could not begin")
