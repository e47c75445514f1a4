"""Said where one looks: refusals beside the prompt, the options in force, the moment on the timeline, the end of it."""

import os
import termios
from itertools import pairwise
from select import select

import pytest
from dashboard_story import candidates_batches
from test_app import live, recording_of, running, screen_text, until

from kvscope.dashboard import terminal
from kvscope.dashboard.frames import FrameBuilder, build_frame
from kvscope.dashboard.playback import read_moment
from kvscope.dashboard.prompt import PromptInput
from kvscope.dashboard.refusals import MAX_SHOWN, SHOWN_NS, RecentRefusals
from kvscope.events import types as ev
from kvscope.transport.recording import ReplaySource
from kvscope.transport.source import Reply


async def test_the_options_beside_the_prompt_are_those_of_the_line():
    async with running(live(num_steps=1), (160, 45)) as (app, pilot):
        await until(pilot, lambda: "n=1  max_tokens=64 " in screen_text(app), "the defaults")
        await pilot.press("i", *"hi n=2 top_k=")
        await until(pilot, lambda: "n=2  max_tokens=64 " in screen_text(app), "n, while another one is being written")
        await pilot.press("5")
        await until(pilot, lambda: "n=2  max_tokens=64  temperature=1.0  top_k=5" in screen_text(app), "both")
        await pilot.press("enter")
        await until(pilot, lambda: "n=1  max_tokens=64 " in screen_text(app), "the defaults again")


async def test_a_prompt_that_the_models_length_will_end_says_so():
    async with running(live(num_steps=1)) as (app, pilot):
        longest = app._frame.info.max_model_len
        await pilot.press("i", *f"hi max_tokens={longest}", "enter")
        await until(pilot, lambda: f"the model's length ends it at {longest} positions" in screen_text(app), "the note")


async def test_what_the_engine_refuses_later_is_said_at_the_prompt_and_in_the_list():
    source = live(num_steps=1)
    source.control.answer = Reply(ok=True, request_id="r77")
    async with running(source) as (app, pilot):
        await pilot.press("i", *"too much", "enter")
        await until(pilot, lambda: source.control.calls and app.query_one(PromptInput).value == "", "sent")
        refusals = [ev.RequestRefused(request_id=name, reason=f"{name} is too long") for name in ("r76", "r77")]
        source.act(lambda engine: [engine.batch("control", *refusals)])
        await until(pilot, lambda: "prompt refused: r77 is too long" in screen_text(app), "beside the prompt")
        rows = app.query_one("#requests").text().splitlines()
        assert [row.strip() for row in rows[:2]] == [f"r{n} ✗ refused: r{n} is too long" for n in (76, 77)]
        assert rows[2].split()[0] == "r1"
        await pilot.press("a")
        await until(pilot, lambda: "prompt refused" not in screen_text(app), "until one writes on")
        await pilot.click("#requests", offset=(4, 3))
        await until(pilot, lambda: app.chosen.key == "r1", "the rows below are where they are drawn")


async def test_the_second_line_of_what_is_said_at_the_prompt_begins_where_the_first_does():
    source = live(num_steps=1)
    source.control.answer = Reply(ok=False, error="far too many words " * 6)
    async with running(source, (80, 24)) as (app, pilot):
        await pilot.press("i", "a", "enter")
        await until(pilot, lambda: "prompt refused" in screen_text(app), "the note")
        first, second = [line for line in screen_text(app).splitlines() if "far too many" in line]
        assert first.startswith("   prompt refused: far")
        assert len(second) - len(second.lstrip()) == 3


async def test_only_the_last_prompts_are_waited_for(monkeypatch):
    monkeypatch.setattr("kvscope.dashboard.prompting.MAX_REMEMBERED", 2)
    source = live(num_steps=1)
    async with running(source) as (app, pilot):
        for number in range(3):
            source.control.answer = Reply(ok=True, request_id=f"x{number}")
            await pilot.press("i", "a", "enter")
            await until(pilot, lambda number=number: f"x{number}" in app._sent, "the answer")
        assert list(app._sent) == ["x1", "x2"]


def test_refusals_are_shown_for_a_while_and_not_again_of_a_log_that_goes_on():
    source = live(num_steps=1)
    recent, builder = RecentRefusals(), FrameBuilder()
    source.start()

    def shown() -> list[str]:
        return [entry.event.request_id for entry in recent.look(build_frame(source.view, builder))]

    assert shown() == []
    for number in range(5):
        refused = ev.RequestRefused(request_id=f"x{number}", reason="no")
        source.act(lambda engine, refused=refused: [engine.batch("control", refused)])
    assert shown() == shown() == [f"x{number}" for number in range(5)][-MAX_SHOWN:]
    source.view.state.time_ns += SHOWN_NS
    assert shown() == []


def test_the_timeline_shows_the_pictures_moment_while_the_player_goes_on():
    source = ReplaySource(recording_of(candidates_batches()), min_play_s=1e9)
    source.start()
    player = source.player
    assert (player.position, player.playing) == (0, False)
    seqs = [source.view.last_seq]
    while player.step_forward():
        seqs.append(source.view.last_seq)
    for position, seq in enumerate(seqs):
        moment = read_moment(player, seq)
        assert (moment.position, moment.ended) == (position, position == player.length)
        assert moment.step == (player.index.steps[position - 1] if position else 0)
    player.seek(next(place for place in range(player.length) if player.index.num_events(place) > 1))
    player.event_forward()
    assert read_moment(player, source.view.last_seq).event == player.place.event == 1
    assert all(one < other for one, other in pairwise(seqs[1:]))
    source.close()


async def test_a_short_recording_waits_at_its_start_and_says_when_it_has_ended():
    source = ReplaySource(recording_of(candidates_batches()), min_play_s=1e9)
    async with running(source) as (app, pilot):
        await until(pilot, lambda: "a short recording: Space plays it" in screen_text(app), "the notice")
        assert "‖ paused" in screen_text(app)
        source.player.speed = 1000.0
        await pilot.press("space")
        await until(pilot, lambda: "the end: Space plays it again, b steps back" in screen_text(app), "the end")
        await until(pilot, lambda: "‖ the end" in screen_text(app), "also on the timeline")
        await pilot.press("b")
        await until(pilot, lambda: "‖ paused" in screen_text(app), "one back is not the end")


@pytest.mark.parametrize("fails", [False, True])
def test_keys_pressed_while_something_loads_are_neither_echoed_nor_kept(monkeypatch, fails):
    outside, inside = os.openpty()
    with open(inside, closefd=False) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        before = termios.tcgetattr(inside)
        try:
            with terminal.keys_unheard():
                assert not termios.tcgetattr(inside)[3] & termios.ECHO
                os.write(outside, b"q")
                assert select([inside], [], [], 20.0)[0], "it has arrived"
                assert not fails or int("no number")
        except ValueError:
            assert fails
        assert termios.tcgetattr(inside) == before
        assert not select([inside], [], [], 0)[0], "and is gone"
    os.close(outside)
    os.close(inside)
