"""The timeline as text, and walking through a recording and through a live engine's past under the pilot."""

import threading

import pytest
from dashboard_story import StorySource, candidates_batches, crowded_engine, swapping_engine
from rich.cells import cell_len
from test_app import is_asking, recording_of, running, screen_text, until

from kvscope.dashboard.frames import Behind, FrameBuilder, build_frame
from kvscope.dashboard.glyphs import ASCII, UNICODE
from kvscope.dashboard.go_to import Destination, GoToScreen, parse_destination
from kvscope.dashboard.header import draw_banner, draw_header
from kvscope.dashboard.playback import Moment, Usage, draw_playback, fold_columns, head_cell, stretch
from kvscope.dashboard.prompt import PromptBar
from kvscope.dashboard.themed import Look
from kvscope.dashboard.timeline_bar import TimelineBar
from kvscope.events.state import EngineState
from kvscope.transport.recording import ReplaySource
from kvscope.transport.source import Status, View
from kvscope.transport.timetravel import History


class RememberingSource(StorySource):
    """A live pocket engine whose view has a history, as `attach` makes it."""

    def __init__(self, engine, batches=()):
        super().__init__(engine, batches)
        self.history = History()
        self.view = View(self.history)


def live(num_steps: int) -> RememberingSource:
    engine, batches = crowded_engine()
    return RememberingSource(engine, batches + engine.run(num_steps))


MOMENT = Moment(False, 5, 10, 0, 0, 2, 4, 1_500_000_000, 4_000_000_000, 1.0)
USAGE = Usage([0, 1, 2, 4, 8, 16, 16, 8, 4, 0], bytes([0, 0, 1, 0, 3, 0, 0, 0, 0, 6]), 16, 10, 10)


def lines(drawing) -> list[str]:
    return [strip.text for strip in drawing.lines]


# --- drawing ---------------------------------------------------------------------------------------------------------


def test_the_timeline_draws_usage_marks_and_the_head():
    drawing = draw_playback(MOMENT, USAGE, UNICODE, 18, 1)
    assert lines(drawing)[1:] == [" held  ·▁▁▂┃██▄▂· ", " marks   ◆ ▼    ▲ "]
    assert (drawing.first_cell, drawing.width) == (7, 10)


def test_the_numbers_of_a_moment():
    text = lines(draw_playback(MOMENT._replace(event=2, num_events=6), USAGE, UNICODE, 160, 1))[0]
    for word in (
        "paused",
        "batch  5/10",
        "event 2 of 6",
        "step 2 of 4",
        "1.50 of 4.00 s",
        "peak 16 of 16",
        "1×",
        "] [ notable",
    ):
        assert word in text
    assert "audited" not in text
    assert "audited 30%" in lines(draw_playback(MOMENT, USAGE._replace(num_audited=3), UNICODE, 160, 1))[0]


def test_a_look_back_under_way_says_how_far_it_is():
    looking = MOMENT._replace(looked_back=0.345)
    assert lines(draw_playback(looking, USAGE, UNICODE, 160, 1))[0].startswith(" looking back 34%")
    assert lines(draw_playback(looking, USAGE, UNICODE, 80, 0))[0].startswith(" looking back 34% ")


def test_on_one_line_the_rare_marks_take_the_bars_place():
    drawing = draw_playback(MOMENT._replace(position=1), USAGE, UNICODE, 24, 0)
    (text,) = lines(drawing)
    assert text == " ‖  1/10 ┃·▁▁▂▼██▄▂▲ 1× "
    assert text[drawing.first_cell] == "┃"


def test_on_one_line_a_begun_batch_is_told_from_a_whole_one():
    begun = lines(draw_playback(MOMENT._replace(event=2, num_events=6), USAGE, UNICODE, 80, 0))[0]
    assert begun.startswith(" ‖  5+2/10 ")


def test_on_one_line_a_bookmarks_note_stands_beside_a_shorter_timeline():
    (line,) = draw_playback(MOMENT._replace(note="n" * 99), USAGE, UNICODE, 80, 0).lines
    assert line.text.endswith(f" ⚑ {'n' * 23}… 1× ")
    assert line.cell_length == 80


def test_what_was_not_surveyed_is_not_drawn_as_empty():
    half = USAGE._replace(held=USAGE.held[:4], kinds=USAGE.kinds[:4])
    assert lines(draw_playback(MOMENT, half, UNICODE, 18, 1))[1][7:17] == "·▁▁▂┃╌╌╌╌╌"


def test_two_rows_show_twice_the_detail():
    text = lines(draw_playback(MOMENT._replace(position=1), USAGE, UNICODE, 18, 2))
    assert text[1][7:17] == "┃    ██   "
    assert text[2][7:17] == "┃▁▂▄████▄·"


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("bar_height", [0, 1, 2])
def test_lines_keep_their_width(glyphs, width, bar_height):
    text = lines(draw_playback(MOMENT, USAGE, glyphs, width, bar_height))
    assert all(cell_len(line) == width for line in text)
    assert glyphs is UNICODE or "".join(text).isascii()


@pytest.mark.parametrize(("length", "width"), [(1, 10), (3, 10), (10, 10), (1000, 37), (0, 5)])
def test_cells_cover_every_batch_and_a_pointed_cell_gets_the_head(length, width):
    usage = Usage(range(length), bytes(length), 10, length, 0)
    assert len(fold_columns(usage, width)) == width
    covered = {batch for cell in range(width) for batch in range(*stretch(cell, length, width))}
    assert covered == set(range(length))
    for cell in range(width):
        _, position = stretch(cell, length, width)
        assert length < width or head_cell(MOMENT._replace(position=position, length=length), width) == cell


def test_an_empty_track_can_be_drawn():
    empty = MOMENT._replace(position=0, length=0)
    for bar_height in (0, 1):
        assert lines(draw_playback(empty, Usage([], b"", 0, 0, 0), UNICODE, 80, bar_height))


def test_destinations():
    assert parse_destination(" 412 ") == Destination(step=412)
    assert parse_destination("12.5s") == Destination(time_ns=12_500_000_000)
    assert parse_destination("2m") == Destination(time_ns=120_000_000_000)
    assert parse_destination("250 ms") == Destination(time_ns=250_000_000)
    for wrong in ("", "x", "1.5", "-3", "9" * 40, "٣"):
        assert parse_destination(wrong) is None


@pytest.mark.parametrize("width", [60, 80, 160])
def test_history_is_never_taken_for_live(width):
    view = View()
    view.set_status(Status.HISTORY)
    frame = build_frame(view, FrameBuilder())._replace(behind=Behind(12_400_000_000, 34, Status.STALE))
    header = draw_header(frame, "x", UNICODE, width, 0.0).text
    assert "◀ HISTORY 12.4 s behind" in header
    assert "LIVE" not in header
    (banner,) = (strip.text for strip in draw_banner(frame, UNICODE, width, 0.0))
    assert ("12.4 s behind, 34 batches" if width >= 80 else " 34 batches behind") + "; the engine is STALE" in banner
    assert banner.rstrip().endswith("; L or End returns")
    one = frame._replace(behind=Behind(0, 1, Status.LIVE))
    assert "0.0 s behind, 1 batch; the engine is LIVE" in draw_banner(one, UNICODE, 160, 0.0)[0].text
    other = frame._replace(behind=Behind(None, None, Status.LIVE))
    assert "another one runs now" in draw_banner(other, UNICODE, 160, 0.0)[0].text


# --- a recording -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (160, 45)])
@pytest.mark.parametrize("ascii_only", [False, True])
async def test_walking_in_a_recording(size, ascii_only):
    engine, batches = crowded_engine()
    source = ReplaySource(recording_of(batches + engine.run(12)))
    player = source.player
    async with running(source, size, ascii_only=ascii_only) as (app, pilot):
        await until(pilot, lambda: player.survey.num_audited == player.length, "the survey")
        await pilot.press("home")
        await until(pilot, lambda: player.position == 0 and not player.playing, "start")
        await pilot.press("right_square_bracket", "right_square_bracket")
        await until(pilot, lambda: source.view.state.counters.copies + source.view.state.counters.preemptions == 2)
        await until(pilot, lambda: app._frame.revision == source.view.revision)
        assert app._frame.log[-1].event is source.view.log[-1].event
        await pilot.press("left_square_bracket", "e", "E", "N", "B")
        await pilot.press("end")
        await until(pilot, lambda: player.position == player.length)
        await pilot.press("left_curly_bracket")
        await until(pilot, lambda: player.position == player.length - max(player.length // 20, 1))
        await pilot.press("end", "right_curly_bracket")
        await until(pilot, lambda: "this is the end" in screen_text(app), "no further")
        assert all(cell_len(line) == size[0] for line in screen_text(app).splitlines())
        assert app.query_one(TimelineBar).text().isascii() == ascii_only


async def test_go_to_a_step_and_a_time():
    engine, batches = crowded_engine()
    source = ReplaySource(recording_of(batches + engine.run(12)))
    async with running(source) as (app, pilot):
        await pilot.press("end", "t")
        await until(pilot, lambda: is_asking(app, GoToScreen))
        await pilot.press("x", "enter")
        assert isinstance(app.screen, GoToScreen)
        await pilot.press("backspace", "3", "enter")
        await until(pilot, lambda: source.view.state.step == 3, "step 3")
        assert source.view.state.phase == "commit"
        await pilot.press("t", *"0.04s", "enter")
        await until(pilot, lambda: source.view.state.time_ns == 40_000_000, "a time")
        await pilot.press("t", "escape")
        await until(pilot, lambda: not isinstance(app.screen, GoToScreen))


async def go_to_the_end(app, pilot, source):
    await pilot.press("end")
    await until(pilot, lambda: source.player.position == source.player.length)
    await until(pilot, lambda: app._frame.revision == source.view.revision)


async def test_looking_back_from_a_block_and_from_a_request():
    engine, batches = crowded_engine()
    source = ReplaySource(recording_of(batches + engine.run(12)))
    async with running(source) as (app, pilot):
        await go_to_the_end(app, pilot, source)
        await pilot.press("1", "right", "w")
        block_id = app.chosen.cursor
        await until(pilot, lambda: source.player.position < source.player.length, "the block's last change")
        assert f"P{block_id}" in source.view.log[-1].sentence
        await pilot.press("2", "down", "a")
        await until(pilot, lambda: source.view.log[-1].sentence.endswith(" admitted"), "its admission")
        await pilot.press("home", "w")
        await until(pilot, lambda: "before this moment" in screen_text(app), "nothing before")


async def test_looking_back_again_is_about_the_same_request():
    """At the moment of a preemption another request may be the first of the list."""
    engine, batches = crowded_engine()
    source = ReplaySource(recording_of(batches + engine.run(12)))
    async with running(source) as (app, pilot):
        await go_to_the_end(app, pilot, source)
        assert app.chosen.key is None
        await pilot.press("v")
        await until(pilot, lambda: app.chosen.key is not None, "whose it is")
        name = app.chosen.key
        for _ in range(2):
            await pilot.press("v")
        await until(pilot, lambda: f"no preemption of {name} before this moment" in screen_text(app), "said")
        assert app.chosen.key == name


async def test_looking_back_from_nothing_says_so():
    async with running(ReplaySource(recording_of(crowded_engine()[0].start()))) as (app, pilot):
        await pilot.press("w")
        await until(pilot, lambda: "choose a block first" in screen_text(app), "no block")
        await pilot.press("a")
        await until(pilot, lambda: "no request at this moment" in screen_text(app), "no request")


async def test_one_cannot_look_back_from_a_block_of_the_host_pool():
    engine, batches = swapping_engine()
    source = ReplaySource(recording_of(batches + engine.run(8)))
    async with running(source) as (app, pilot):
        await pilot.press("end")
        await until(pilot, lambda: app.query_one("#host").size.height > 0, "the host pool")
        await pilot.press("f8", "right")
        await until(pilot, lambda: app.chosen.host_cursor == 0, "H0")
        place = source.player.place
        await pilot.press("w")
        await until(pilot, lambda: "one can look back from" in screen_text(app), "why not")
        assert source.player.place == place


async def test_keys_do_not_wait_for_a_player_that_is_busy():
    """A slow read holds the player; what is asked of it meanwhile comes when it is done, and the screen goes on."""
    engine, batches = crowded_engine()
    source = ReplaySource(recording_of(batches + engine.run(12)))
    player, is_held, may_end = source.player, threading.Event(), threading.Event()

    def be_busy() -> None:
        with player._changed:
            is_held.set()
            may_end.wait(60)

    async with running(source) as (app, pilot):
        await pilot.press("space")
        await until(pilot, lambda: not player.playing, "paused")
        busy = threading.Thread(target=be_busy, daemon=True)
        busy.start()
        await until(pilot, is_held.is_set, "busy")
        await pilot.press("greater_than_sign")
        app.mark_places()
        await pilot.press("question_mark")
        await until(pilot, lambda: len(app.screen_stack) > 1, "help opens")
        assert busy.is_alive()
        assert player.speed == 1
        may_end.set()
        await until(pilot, lambda: player.speed == 2, "faster")


async def test_the_mouse_moves_the_play_position():
    engine, batches = crowded_engine()
    source = ReplaySource(recording_of(batches + engine.run(12)))
    async with running(source) as (app, pilot):
        bar = app.query_one(TimelineBar)
        await until(pilot, lambda: bar.size.height == 3)
        await pilot.click(bar, offset=(7, 1))
        await until(pilot, lambda: source.player.position == 1, "the first cell")
        await pilot.click(bar, offset=(7 + bar._drawing.width - 1, 1))
        await until(pilot, lambda: source.player.position == source.player.length, "the last cell")


# --- a live engine's past --------------------------------------------------------------------------------------------


async def test_space_freezes_a_live_view_and_the_engine_goes_on():
    source = live(num_steps=4)
    async with running(source, (120, 36)) as (app, pilot):
        step = source.view.state.step
        await pilot.press("space")
        await until(pilot, lambda: "◀ HISTORY" in screen_text(app), "frozen")
        assert "● LIVE" not in screen_text(app)
        assert "L LIVE" in screen_text(app)
        await pilot.press("B")
        await until(pilot, lambda: app._frame.step == step - 1, "one step back")
        source.feed(source.engine.run(3))
        await until(pilot, lambda: "batches; the engine is LIVE" in screen_text(app), "how far")
        assert app._frame.step == step - 1
        assert source.view.state.step == step + 3
        assert [name for name, _ in source.control.calls] == []
        await pilot.press("L")
        await until(pilot, lambda: "● LIVE" in screen_text(app) and "HISTORY" not in screen_text(app), "back")
        await until(pilot, lambda: app._frame.step == step + 3)
        assert not app.query_one(TimelineBar).display
        source.feed(source.engine.step())
        await until(pilot, lambda: app._frame.step == step + 4, "it goes on")


@pytest.mark.parametrize("pane", ["requests", "table", "text", "block", "events"])
async def test_the_smallest_screen_has_room_for_pool_and_words_live_and_in_the_past(pane):
    async with running(live(num_steps=4), (60, 20)) as (app, pilot):
        grid, front = app.query_one("#grid"), app.query_one(f"#{pane}")
        app.action_pane(pane)
        await until(pilot, lambda: front.content_height >= 4 and grid.content_height >= 4, "live")
        await pilot.press("space")
        await until(pilot, lambda: "◀ HISTORY" in screen_text(app), "frozen")
        await until(pilot, lambda: front.content_height >= 3 and grid.content_height >= 3, "the past")
        await until(pilot, lambda: front.region.bottom == app.query_one(PromptBar).region.y, "all of it")


async def test_the_past_hides_nothing_that_the_engine_warns_of():
    source = live(num_steps=4)
    async with running(source, (120, 36), look=Look(keymap={"live": "Z"})) as (app, pilot):
        source.view.warn("recording stopped: no space left")
        await pilot.press("space")
        await until(pilot, lambda: "◀ HISTORY" in screen_text(app), "frozen")
        await until(pilot, lambda: "ENGINE: recording stopped: no space left" in screen_text(app), "still there")
        await pilot.press("n")
        await until(pilot, lambda: "frozen: Z goes" in screen_text(app), "the key in force")


async def test_end_returns_and_the_past_can_be_entered_again():
    source = live(num_steps=4)
    async with running(source, (80, 24)) as (app, pilot):
        for _ in range(3):
            await pilot.press("space", "b", "left_square_bracket")
            await until(pilot, lambda: "◀ HISTORY" in screen_text(app))
            await pilot.press("end")
            await until(pilot, lambda: "● LIVE" in screen_text(app))
            source.feed(source.engine.step())
        assert app.is_running


async def test_pause_in_the_past_is_the_engines_own_and_cancel_waits():
    source = live(num_steps=4)
    async with running(source) as (app, pilot):
        await pilot.press("space")
        await until(pilot, lambda: "◀ HISTORY" in screen_text(app))
        await pilot.press("p", "2", "down", "x")
        await until(pilot, lambda: "this is the past" in screen_text(app))
        assert [name for name, _ in source.control.calls] == ["pause"]
        await pilot.press("p")
        await until(pilot, lambda: [name for name, _ in source.control.calls] == ["pause", "resume"])


async def test_playing_the_past_ends_where_the_view_was_frozen():
    source = live(num_steps=4)
    async with running(source) as (app, pilot):
        await pilot.press("space")
        await until(pilot, lambda: "◀ HISTORY" in screen_text(app))
        frozen_at = app._player.length
        await pilot.press("space")
        await until(pilot, lambda: "where the view was frozen" in screen_text(app), "there is nothing to play yet")
        await pilot.press("home", "space")
        source.feed(source.engine.step())
        await until(pilot, lambda: app._player.position == frozen_at and not app._player.playing, "played")
        assert "◀ HISTORY" in screen_text(app)


async def test_another_engine_life_is_not_counted_from():
    source = live(num_steps=4)
    async with running(source) as (app, pilot):
        await pilot.press("space")
        await until(pilot, lambda: "◀ HISTORY" in screen_text(app))
        source.view.replace_state(EngineState(epoch=b"another"), 3)
        await until(pilot, lambda: "another one runs now" in screen_text(app))


async def test_nothing_to_walk_in_says_so():
    source = RememberingSource(crowded_engine()[0], candidates_batches()[:1])
    async with running(source) as (app, pilot):
        await pilot.press("space")
        await until(pilot, lambda: "nothing has happened yet" in screen_text(app))
        assert "● LIVE" in screen_text(app)


async def test_a_stale_engine_shows_through():
    source = live(num_steps=4)
    async with running(source) as (app, pilot):
        await pilot.press("space")
        await until(pilot, lambda: "◀ HISTORY" in screen_text(app))
        source.set_status(Status.STALE, "no heartbeat since 12:04:31")
        await until(pilot, lambda: "the engine is STALE" in screen_text(app))
