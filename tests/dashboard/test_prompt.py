"""The prompt line between sessions, and the completion of options."""

import contextlib
import stat
from pathlib import Path

import pytest
from test_app import live, running, screen_text, until
from textual import events
from textual._xterm_parser import XTermParser

from kvscope.dashboard.editor import EditorError, edit_text
from kvscope.dashboard.prompt import PromptInput, complete_option
from kvscope.dashboard.prompt_history import MAX_PROMPTS, PromptHistory
from kvscope.dashboard.terminal_driver import TerminalDriver
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


async def test_the_last_prompts_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr("kvscope.dashboard.prompt.MAX_PROMPTS", 2)
    source = live(num_steps=1)
    async with running(source, look=Look(prompts=tmp_path / "prompts.jsonl")) as (app, pilot):
        await pilot.press("i", "a", "enter", "b", "enter", "c", "enter")
        assert app.query_one(PromptInput).earlier == ["b", "c"]
        await pilot.press("up", "up", "up")
        assert app.query_one(PromptInput).value == "b"


async def test_a_prompt_of_several_lines_grows_is_sent_and_recalled(tmp_path):
    source = live(num_steps=1)
    async with running(source, (80, 24), look=Look(prompts=tmp_path / "prompts.jsonl")) as (app, pilot):
        prompt = app.query_one(PromptInput)
        await pilot.press("i", *"one", "ctrl+j", *"two", "alt+enter", "enter")
        await until(pilot, lambda: source.control.calls, "sent")
        assert source.control.calls[0][1][0] == "one\ntwo"
        await pilot.press("up")
        await until(pilot, lambda: prompt.value == "one\ntwo\n" and prompt.size.height == 3, "all of it")
        await pilot.press("backspace", "up", "up")
        assert prompt.value == "one\ntwo\n"  # through the lines to the history's first, which is this one
        await pilot.press("down")
        assert prompt.value == ""  # the draft
        prompt.value = "\n".join("x" * 20)
        await until(pilot, lambda: prompt.size.height == 6, "no more than this")
        prompt.value = ""
        await until(pilot, lambda: prompt.size.height == 1, "and small again")


def editor(tmp_path, monkeypatch, lines):
    """A program that is the user's editor; it leaves the file's mode and name beside itself."""
    path = tmp_path / "an editor"
    path.write_text(f"#!/bin/sh\nstat -c %a \"$2\" > '{tmp_path}/mode'\necho \"$2\" > '{tmp_path}/name'\n{lines}\n")
    path.chmod(0o755)
    monkeypatch.setenv("VISUAL", f"'{path}' --wait")
    return path


def test_the_editor_gets_the_text_in_a_file_of_the_users_alone(tmp_path, monkeypatch):
    editor(tmp_path, monkeypatch, "printf 'two \\033[31m' >> \"$2\"")
    assert edit_text("one\n") == "one\ntwo ␛[31m"
    assert (tmp_path / "mode").read_text() == "600\n"
    assert not Path((tmp_path / "name").read_text().strip()).exists()


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("exit 3", "ended with status 3"),
        ('rm "$2"', "No such file"),
        ("printf '\\377' > \"$2\"", "not UTF-8"),
    ],
)
def test_an_editor_that_fails_is_one_clear_line(tmp_path, monkeypatch, lines, problem):
    editor(tmp_path, monkeypatch, lines)
    with pytest.raises(EditorError, match=problem):
        edit_text("one")
    assert not Path((tmp_path / "name").read_text().strip()).exists()


@pytest.mark.parametrize(("visual", "problem"), [("/nowhere/vim", "No such file"), ("'vim", "no command line")])
def test_an_editor_that_is_none_is_one_clear_line(monkeypatch, visual, problem):
    monkeypatch.setenv("VISUAL", visual)
    with pytest.raises(EditorError, match=problem):
        edit_text("one")


async def test_without_a_terminal_of_its_own_there_is_no_editor():
    async with running(live(num_steps=1)) as (app, pilot):
        await pilot.press("i", "x", "ctrl+o")
        await until(pilot, lambda: "cannot be handed over" in screen_text(app), "the notice")
        assert app.query_one(PromptInput).value == "x"


async def test_what_the_editor_leaves_is_the_prompt(tmp_path, monkeypatch):
    editor(tmp_path, monkeypatch, 'echo two >> "$2"')
    async with running(live(num_steps=1)) as (app, pilot):
        monkeypatch.setattr(app, "suspend", contextlib.nullcontext)
        await pilot.press("ctrl+o")
        prompt = app.query_one(PromptInput)
        await until(pilot, lambda: prompt.value == "two" and prompt.has_focus, "its text")
        editor(tmp_path, monkeypatch, "exit 1")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: "ended with status 1" in screen_text(app), "the notice")
        assert prompt.value == "two"


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


@pytest.mark.parametrize("sent", ["\n", "\x1b\r", "\x1b[13;2u", "\x1b[13;3u"])
def test_terminals_have_several_ways_to_ask_for_another_line(sent):
    (keys,) = [binding.key for binding in PromptInput.BINDINGS if binding.action == "newline"]
    assert TerminalDriver  # its module teaches Textual one of them
    parser = XTermParser()
    assert {event.key for event in [*parser.feed(sent), *parser.feed("")]} <= set(keys.split(","))


@pytest.mark.parametrize("size", [(60, 20), (80, 24)])
async def test_notices_and_keys_are_ascii_too_and_hide_nothing_that_the_prompt_says(size):
    async with running(live(num_steps=2), size, ascii_only=True) as (app, pilot):
        await pilot.press("x")
        await until(pilot, lambda: "select a request first" in screen_text(app), "the notice")
        await pilot.press("i", *"hi temprature=1", "enter")
        problem = "unknown option 'temprature'; did you mean"
        await until(pilot, lambda: problem in screen_text(app) and "Enter send" in screen_text(app), "both")
        assert "select a request first" in screen_text(app)
        assert screen_text(app).isascii()
