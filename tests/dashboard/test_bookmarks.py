"""m marks a moment with a note: in the past, live, in the recording, and beside it."""

import asyncio
from pathlib import Path

import pytest
from dashboard_story import EPOCH, crowded_engine
from test_app import is_asking, recording_of, running, screen_text, until
from test_view_recorder import TappedSource

from kvscope.dashboard.bookmarks import BookmarkList, NoteScreen
from kvscope.dashboard.glyphs import ASCII, UNICODE
from kvscope.dashboard.playback import Moment, Usage, draw_playback
from kvscope.events.notable import Notable
from kvscope.transport.recording import ReplaySource, read_recording
from kvscope.transport.recording.bookmarks import Bookmark
from kvscope.transport.timetravel import Place


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


async def write_note(app, pilot, note: str) -> None:
    await pilot.press("m")
    await until(pilot, lambda: is_asking(app, NoteScreen), "the question")
    await pilot.press(*note, "enter")
    await until(pilot, lambda: not isinstance(app.screen, NoteScreen), "the answer")


def long_recording() -> ReplaySource:
    engine, batches = crowded_engine()
    return ReplaySource(recording_of(batches + engine.run(30)))


async def test_a_marked_moment_is_notable_and_is_there_next_time(state_dir: Path):
    source = long_recording()
    async with running(source, (160, 45)) as (app, pilot):
        await until(pilot, lambda: source.player.survey.num_audited == source.player.length, "the survey")
        kinds = source.player.survey.kinds
        quiet = max(position for position in range(2, len(kinds)) if not any(kinds[position - 1 :]))
        await asyncio.to_thread(source.player.pause)
        await asyncio.to_thread(source.player.seek, quiet)
        await write_note(app, pilot, "look here")
        await until(pilot, lambda: "⚑ look here" in screen_text(app), "the note")
        assert "⚑" in next(line for line in screen_text(app).splitlines() if line.startswith(" marks"))
        await pilot.press("end", "left_square_bracket")
        await until(pilot, lambda: source.player.place == Place(quiet), "back at the mark")
    [kept] = (state_dir / "kvscope" / "bookmarks").iterdir()
    assert (kept.stat().st_mode & 0o777, kept.stem) == (0o600, EPOCH.hex())
    again = long_recording()
    async with running(again, (160, 45)) as (app, pilot):
        await until(pilot, lambda: again.player.survey.num_audited == again.player.length, "the survey")
        await pilot.press("end", "left_square_bracket")
        await until(pilot, lambda: "⚑ look here" in screen_text(app), "the note")
        await pilot.press("m")
        await until(pilot, lambda: is_asking(app, NoteScreen))
        await pilot.press(*["backspace"] * len("look here"), "enter")
        await until(pilot, lambda: again.player.marks == [], "taken away")


async def test_while_it_is_recorded_it_goes_into_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    engine, batches = crowded_engine()
    source = TappedSource(engine, batches + engine.run(2))
    async with running(source, (160, 45)) as (app, pilot):
        await pilot.press("R")
        await until(pilot, lambda: "REC  kvscope-" in screen_text(app), "the header says it")
        seq = source.view.last_seq
        await write_note(app, pilot, "now")
        source.act(lambda engine: engine.run(1))
    [path] = tmp_path.glob("kvscope-*.mcap")
    assert read_recording(path).bookmarks == [Bookmark(seq=seq, note="now")]


async def test_esc_marks_nothing(state_dir: Path):
    async with running(long_recording(), (80, 24)) as (app, pilot):
        await pilot.press("end", "m")
        await until(pilot, lambda: is_asking(app, NoteScreen))
        await pilot.press("x", "escape")
        await until(pilot, lambda: not isinstance(app.screen, NoteScreen))
        assert app._player.marks == []
    assert not state_dir.exists()


def test_a_list_that_cannot_be_read_or_written(state_dir: Path):
    path = state_dir / "kvscope" / "bookmarks" / "6c6966652d.jsonl"
    path.parent.mkdir(parents=True)
    hostile = '{"seq":5,"note":"a\\u001b[31mb"}'
    path.write_text(f'{{"seq":-1}}\nnonsense\n{"[" * 5000}\n{hostile}\n{{"seq":2,"note":"x"}}\n{{"seq":2}}\n')
    kept = BookmarkList(b"life-")
    assert [(one.seq, one.note) for one in kept] == [(5, "a␛[31mb")]
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        kept.add(Bookmark(seq=7, note="y"))
    assert [one.seq for one in kept] == [5, 7]


def test_a_bookmark_is_drawn_over_what_lies_under_it():
    usage = Usage([4] * 10, bytes([0, 0, 0, 0, Notable.FINDING, 0, 0, 0, 0, 0]), 16, 10, 10, (5, 8))
    moment = Moment(False, 2, 10, 0, 0, 2, 4, 0, 0, 1.0, "a note")
    for glyphs in (UNICODE, ASCII):
        numbers = draw_playback(moment, usage, glyphs, 90, 1).lines[0].text
        assert f"{glyphs.bookmark} a note" in numbers
        marks = draw_playback(moment, usage, glyphs, 18, 1).lines[-1].text
        assert marks == " marks     F  F   ".replace("F", glyphs.bookmark)


async def test_a_bookmark_without_a_note_can_be_taken_away():
    source = long_recording()
    async with running(source, (160, 45)) as (app, pilot):
        await write_note(app, pilot, "")
        await until(pilot, lambda: len(source.player.marks) == 1, "a mark")
        await write_note(app, pilot, "")
        await until(pilot, lambda: source.player.marks == [], "no mark")


async def test_a_pasted_note_is_made_printable_before_it_is_shown_or_kept(state_dir: Path):
    async with running(long_recording(), (160, 45)) as (app, pilot):
        await pilot.press("m")
        await until(pilot, lambda: is_asking(app, NoteScreen), "the question")
        app.screen.query_one("#note").value = "evil \u202etxt\x1b]0;title\x07"
        await pilot.press("enter")
        await until(pilot, lambda: "evil" in screen_text(app) and not isinstance(app.screen, NoteScreen), "the note")
        assert not {"\u202e", "\x1b", "\x07"} & set(screen_text(app))
        [kept] = (state_dir / "kvscope" / "bookmarks").iterdir()
        assert b"202e" not in kept.read_bytes()
        assert "\u202e" not in kept.read_text()


async def test_keys_of_a_line_of_text_and_of_panes_do_not_reach_below_a_dialogue():
    source = long_recording()
    async with running(source, (160, 45)) as (app, pilot):
        await pilot.press("end")
        await until(pilot, lambda: source.player.position == source.player.length, "the end")
        await pilot.press("m", "a", "b", "home", "f2", "c")
        line = app.screen.query_one("#note")
        await until(pilot, lambda: line.value == "cab", "Home moves in the line, F2 nowhere")
        assert source.player.position == source.player.length
