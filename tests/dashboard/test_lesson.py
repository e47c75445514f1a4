"""The lesson on a scripted engine: every moment is reached, back shows the earlier one, leaving hands over."""

import pytest
from dashboard_story import StoryEngine
from test_app import screen_text, until
from test_time_travel import RememberingSource

from kvscope.dashboard.lesson import MOMENTS, LessonApp, open_sequences
from kvscope.transport.source import Status


async def at(app, pilot, number: int) -> None:
    await until(pilot, lambda: f"Lesson {number} of {len(MOMENTS)}" in screen_text(app), f"moment {number}")


def written(view) -> tuple[int, ...]:
    return tuple(seq.num_written for seq in open_sequences(view.state))


@pytest.mark.parametrize("size", [(80, 24), (160, 45)])
async def test_each_step_reaches_its_moment_and_the_way_back_shows_them_again(size):
    source = RememberingSource(StoryEngine(free=[3, 0, 1, 4, 5, 2]))
    app = LessonApp(source, title="story", fps=200)
    async with app.run_test(size=size) as pilot:
        for number, moment in enumerate(MOMENTS, start=1):
            await at(app, pilot, number)
            assert written(source.view) == moment.written
            assert moment.caption.split()[-1] in screen_text(app)  # the caption is on the screen to its end
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
