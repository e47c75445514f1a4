"""The prompt line between sessions, and the completion of options."""

import stat

import pytest
from test_app import live, running, screen_text, until
from textual import events

from kvscope.dashboard.prompt import PromptInput, complete_option
from kvscope.dashboard.prompt_history import MAX_PROMPTS, PromptHistory
from kvscope.dashboard.themed import Look


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("To be max", "To be max_tokens="),
        ("temp", "temperature="),
        ("x top", "x top_"),
        ("x top_p", "x top_p="),
        ("x top_", None),  # top_k or top_p
        ("x se", None),  # too short to be meant
        ("x n=2 ", None),
        ("x max_tokens=", None),
        ("x Max", None),
        ("", None),
    ],
)
def test_an_option_is_completed_as_far_as_it_is_clear(line, completed):
    assert complete_option(line) == completed


async def test_tab_completes_or_moves_on():
    async with running(live(num_steps=1)) as (app, pilot):
        await pilot.press("i", *"king", "space", *"max", "tab")
        prompt = app.query_one(PromptInput)
        await until(pilot, lambda: prompt.value == "king max_tokens=", "completed")
        assert prompt.has_focus
        await pilot.press("3", "tab")
        await until(pilot, lambda: not prompt.has_focus, "nothing to complete: the next pane")


def press_at_once(app, *keys: str) -> None:
    """All keys wait in the queue before the first is looked at, as when a terminal pastes or a slow link catches up."""
    for key in keys:
        app.post_message(events.Key({" ": "space", "=": "equals_sign"}.get(key, key), key if len(key) == 1 else None))


async def test_keys_that_arrive_together_act_in_their_order():
    source = live(num_steps=1)
    async with running(source) as (app, pilot):
        await pilot.press("i")
        press_at_once(
            app, *"one n=2", "enter", *"two max", "tab", *"3x", "backspace", "enter", "up", "up", "enter", *"th"
        )
        prompt = app.query_one(PromptInput)
        await until(pilot, lambda: prompt.value == "th" and len(source.control.calls) == 3, "three prompts and a start")
        sent = [(text, options["n"], options["max_tokens"]) for _, (text, options) in source.control.calls]
        assert sent == [("one", 2, 64), ("two", 1, 3), ("one", 2, 64)]
        assert not app.query_one("#prompt-note").display


async def test_the_explanation_outlives_the_letters_before_it():
    async with running(live(num_steps=1)) as (app, pilot):
        await pilot.press("i")
        press_at_once(app, *"king temprature=2", "enter")
        await until(pilot, lambda: "did you mean temperature" in screen_text(app), "the explanation")
        await pilot.pause()
        await until(pilot, lambda: app.query_one(PromptInput).selected_text == "temprature=2", "the wrong word")
        assert app.query_one("#prompt-note").display
        await pilot.press("x")
        await until(pilot, lambda: not app.query_one("#prompt-note").display, "another line, no explanation")


async def test_prompts_are_recalled_in_the_next_session_and_scripts_are_not(tmp_path):
    look = Look(prompts=tmp_path / "state" / "prompts.jsonl")
    source = live(num_steps=1)
    async with running(source, look=look, scripted_prompts=["scripted"], scripted_delay_s=0.01) as (_, pilot):
        await until(pilot, lambda: source.control.calls, "the script")
        await pilot.press("i", *"first", "enter")
        await until(pilot, lambda: len(source.control.calls) == 2, "the prompt")
    async with running(live(num_steps=1), look=look) as (app, pilot):
        await pilot.press("i", "up")
        assert app.query_one(PromptInput).value == "first"
        await pilot.press("up")
        assert app.query_one(PromptInput).value == "first"


def test_the_file_is_the_users_alone_and_bounded(tmp_path):
    path = tmp_path / "new" / "prompts.jsonl"
    history = PromptHistory(path)
    assert history.load() == []
    history.add("two\nlines")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    for number in range(2 * MAX_PROMPTS):
        history.add(f"{number}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(history.load()) == MAX_PROMPTS
    assert history.load()[-1] == f"{2 * MAX_PROMPTS - 1}"
    assert len(path.read_text().splitlines()) == MAX_PROMPTS
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_in_the_file_is_not_trusted(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xff\n3\n"ok"\n{"a": 1}\n"\\u001b[31m red"\n' + b"[" * 50_000 + b"\n")
    assert PromptHistory(path).load() == ["ok", "␛[31m red"]
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    PromptHistory(tmp_path / "link").add("x")  # never through a link, and never an error
    assert not (tmp_path / "elsewhere").exists()
    PromptHistory(path / "below" / "a-file").add("x")
