"""The whole dashboard under Textual's pilot, at the sizes people have."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
from dashboard_story import (
    StoryEngine,
    StorySource,
    article_batches,
    candidates_batches,
    crowded_engine,
    swapping_engine,
)
from rich.cells import cell_len
from textual._context import visible_screen_stack
from textual.binding import Binding
from textual.widgets import Input, SelectionList
from textual.widgets._footer import FooterKey

from kvscope.dashboard.app import DashboardApp
from kvscope.dashboard.block_grid import BlockGrid
from kvscope.dashboard.breakpoints_screen import UNMARKED, BreakpointsScreen
from kvscope.dashboard.frames import FrameBuilder, build_frame
from kvscope.dashboard.grid_layout import Zoom
from kvscope.dashboard.help import HelpScreen, draw_help
from kvscope.dashboard.keys import KEYS, PANES, key_names
from kvscope.dashboard.pane import StripPane, StripWidget
from kvscope.dashboard.panes import TextPane
from kvscope.dashboard.pools import host_title, width_beside
from kvscope.dashboard.prompt import PromptBar, PromptInput
from kvscope.dashboard.pump import FrameReady
from kvscope.dashboard.requests_pane import RequestsPane
from kvscope.dashboard.screen_size import Arrangement, arrange
from kvscope.dashboard.selection import Selection, latest_block
from kvscope.dashboard.table_pane import TablePane
from kvscope.dashboard.viewer import Connected
from kvscope.events import types as ev
from kvscope.events.audit import Finding
from kvscope.events.codec import decode_batch, encode_batch
from kvscope.events.state import Breakpoints
from kvscope.events.types import SamplingParams
from kvscope.transport.recording import Recording, ReplaySource
from kvscope.transport.source import ListSource, Reply, Status
from kvscope.transport.timetravel import History

SIZES = [(80, 24), (120, 36), (160, 45), (60, 20)]


async def until(pilot, condition, what: str = "", timeout_s: float = 10.0):
    """Let the app run until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what or condition}\n{screen_text(pilot.app)}"
        await pilot.pause(0.01)


def strips_of(app):
    """What is on the screen. A dialogue remembers what it drew behind itself; it may be drawn first from here."""
    visible_screen_stack.set(app._background_screens)
    return app.screen._compositor.render_strips()


def is_asking(app, dialogue: type) -> bool:
    """Whether this dialogue is there, and hears the next key."""
    return isinstance(app.screen, dialogue) and app.focused is not None


def screen_text(app) -> str:
    return "\n".join(strip.text for strip in strips_of(app))


@asynccontextmanager
async def running(source, size=(120, 36), **options):
    app = DashboardApp(source, title="story", fps=200, **options)
    async with app.run_test(size=size, notifications=True) as pilot:
        small = size[0] < 60 or size[1] < 20
        await until(pilot, lambda: small or "step" in screen_text(app), "first picture")
        await until(pilot, lambda: app._frame.revision == source.view.revision, "latest frame")
        yield app, pilot


def live(batches_of=crowded_engine, num_steps: int = 0) -> StorySource:
    engine, batches = batches_of()
    return StorySource(engine, batches + engine.run(num_steps))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ascii_only", [False, True])
async def test_every_size_shows_the_pool_and_keeps_its_lines(size, ascii_only):
    async with running(live(num_steps=2), size, ascii_only=ascii_only) as (app, _):
        text = screen_text(app)
        assert all(cell_len(line) == size[0] for line in text.splitlines())
        for word in ("kvscope", "LIVE", "POOL", "8 blocks", "P0", "waste", "CoW", "preempted 1", "help"):
            assert word in text, word
        assert text.isascii() == ascii_only


@pytest.mark.parametrize("size", SIZES)
async def test_every_pane_can_be_reached_at_every_size(size):
    async with running(live(num_steps=2), size) as (app, pilot):
        for number, name in enumerate(PANES, start=1):
            if name == "host":
                continue  # this engine has none
            await pilot.press(str(number))
            pane = app.query_one(f"#{name}")
            await until(pilot, lambda pane=pane: pane.has_focus and pane.size.height > 2, f"pane {name}")
            assert str(pane.border_title).startswith(str(number))
        await pilot.press("2")
        await until(pilot, lambda: "preempted 1×" in app.query_one("#requests").text(), "the reason of the request")
        await pilot.press("5")
        await until(pilot, lambda: "r3 waits: needs 5 blocks" in app.query_one("#events").text(), "the event")


@pytest.mark.parametrize("size", SIZES)
async def test_a_swapped_out_request_is_lit_in_the_host_pool(size):
    async with running(live(swapping_engine, num_steps=8), size) as (app, pilot):
        grid, host = app.query_one("#grid"), app.query_one("#host")
        await until(pilot, lambda: host.size.height > 0 and "4/12" in screen_text(app), "the host pool, with its count")
        await until(pilot, lambda: "H0" in host.text(), "its blocks")
        assert app._frame.host.refs.tolist() == [2, 2, 1, 1, *[0] * 8]
        await pilot.press("2", "down", "down", "down")
        await until(pilot, lambda: app.chosen.key == "r2", "the request")
        assert host._light.logical == {0: 0, 1: 1, 2: 2, 3: 2}
        assert grid._light.dim_others
        assert not grid._light.logical
        await pilot.press("3")
        await until(pilot, lambda: "→ H0" in app.query_one("#table").text(), "its table")
        await pilot.press("6", "f8", "right", "right")
        await until(pilot, lambda: app.query_one("#block").text().startswith(" H1  ref count 2"), "the block")
        assert (app.chosen.cursor, app.chosen.host_cursor) == (None, 1)
        assert app.chosen.holders_of_cursor(app._frame) == {"r2.0", "r2.1"}
        await pilot.press("1", "right")
        await until(pilot, lambda: (app.chosen.cursor, app.chosen.host_cursor) == (0, None), "one cursor, not two")


async def test_after_a_resize_the_host_pool_has_its_room_and_title_though_nothing_runs():
    engine = StoryEngine(40, num_host_blocks=40)
    async with running(StorySource(engine, engine.start()), (60, 20)) as (app, pilot):
        pools, host = app.deck.pools, app.deck.pools.host

        def fits() -> bool:
            title = host_title(app._frame.host, host.size.width)
            wide = width_beside(app._frame.host, *pools.size)
            is_beside = host.region.y == pools.device.region.y
            return title in str(host.border_title) and (not is_beside or host.outer_size.width == wide)

        for size in [(80, 24), (120, 36), (60, 20)]:
            await pilot.resize_terminal(*size)
            await until(pilot, lambda size=size: tuple(app.deck.size) == size and fits(), f"its room at {size}")


def test_a_cursor_in_a_host_pool_that_has_gone_marks_nobody():
    """Another engine runs, and the block that it touched last has the number of the one that was pointed at."""
    source = live(num_steps=2)
    source.start()
    frame = build_frame(source.view, FrameBuilder())
    assert frame.holders(latest := latest_block(frame))
    assert Selection(host_cursor=latest).holders_of_cursor(frame) == frozenset()
    assert Selection(cursor=latest).holders_of_cursor(frame)


async def test_without_a_host_pool_there_is_no_key_for_it():
    async with running(live(num_steps=2)) as (app, pilot):
        await pilot.press("8", "f8")
        assert not app.query_one("#host").display
        assert app.check_action("pane", ("grid",))
        assert not app.check_action("pane", ("host",))
        assert not app.check_action("go", ("host",))


async def test_too_small_a_terminal_says_so_and_recovers():
    async with running(live(num_steps=2), (50, 15)) as (app, pilot):
        await until(pilot, lambda: "50x15, needs at least 60x20" in screen_text(app), "the message")
        assert "POOL" not in screen_text(app)
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "POOL" in screen_text(app) and "too small" not in screen_text(app), "recovery")
        await pilot.resize_terminal(20, 5)
        await until(pilot, lambda: "needs at least" in screen_text(app) or "too small" in screen_text(app), "tiny")


async def test_new_batches_reach_the_screen():
    source = live()
    async with running(source) as (app, pilot):
        source.feed(source.engine.step())
        await until(pilot, lambda: "step 1 " in screen_text(app), "the step")
        await until(pilot, lambda: "r3.0 chose ' he'" in screen_text(app), "the newest event")


# --- looking around -------------------------------------------------------------------------------------------------


async def test_the_article_is_on_the_screen():
    async with running(ListSource(article_batches())) as (app, pilot):
        await until(pilot, lambda: "4/6 blocks" in screen_text(app))
        text = screen_text(app)
        assert "P3 ■■■■ 1 r1.0 L0" in text
        assert "P0 ■■□□ 1 r1.0 L1" in text
        assert "L0 → P3" in text
        assert "waste 4 slots 25%" in text


async def test_selecting_a_sequence_lights_its_blocks_and_shows_its_table():
    async with running(ListSource(candidates_batches())) as (app, pilot):
        await pilot.press("2", "down", "down", "down")
        await until(pilot, lambda: app.chosen.key == "r1.1", "selection")
        table = app.query_one(TablePane)
        await until(pilot, lambda: "L1 → P1" in table.text(), "its table")
        grid = app.query_one("#grid", BlockGrid)
        assert grid._light.logical == {0: 0, 1: 1}
        assert grid._light.dim_others
        assert "of r1.1" in str(table.border_title)
        await pilot.press("escape")
        await until(pilot, lambda: not grid._light.dim_others, "Esc clears")


async def test_the_text_of_the_selected_sequence_can_be_read_to_its_end():
    source = live(num_steps=20)
    async with running(source) as (app, pilot):
        text = app.query_one(TextPane)
        for _ in range(9):
            source.feed(source.engine.step())
        await until(pilot, lambda: app._frame.revision == source.view.revision)
        last = app._frame.sequence("r1.0").text.split()[-1]
        await until(pilot, lambda: text.text().rstrip().endswith(last), "the whole text")
        await until(pilot, lambda: text.is_vertical_scroll_end, "its end in view")
        assert text.text().strip().startswith("Once upon a time")


async def test_quick_keys_are_not_lost_while_a_selection_is_on_its_way():
    async with running(live(num_steps=2)) as (app, pilot):
        requests = app.query_one(RequestsPane)
        for _ in range(4):
            requests.action_choose(1)  # faster than any message travels
        await until(pilot, lambda: app.chosen.key == "r2", "four keys, four rows")


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (59, 40, Arrangement.SMALL),
        (160, 19, Arrangement.SMALL),
        (60, 20, Arrangement.COMPACT),
        (107, 60, Arrangement.COMPACT),
        (160, 29, Arrangement.COMPACT),
        (108, 30, Arrangement.FULL),
    ],
)
def test_the_arrangement_follows_the_size(width, height, expected):
    assert arrange(width, height) is expected


async def test_a_tall_narrow_screen_shows_every_list():
    async with running(live(num_steps=2), (90, 48)) as (app, pilot):
        await until(
            pilot,
            lambda: all(
                app.query_one(f"#{name}").size.height > 2 for name in ("grid", "requests", "table", "text", "events")
            ),
        )


async def test_the_block_pane_follows_what_happens_until_one_is_chosen():
    async with running(ListSource(candidates_batches())) as (app, pilot):
        block = app.query_one("#block")
        await until(pilot, lambda: "P1  ref count 1" in block.text() and "touched last" in str(block.border_title))
        await pilot.press("1", "right")
        await until(pilot, lambda: "P0  ref count 2" in block.text() and "touched" not in str(block.border_title))


async def test_the_cursor_names_a_block_and_enter_selects_its_holder():
    async with running(ListSource(candidates_batches())) as (app, pilot):
        await pilot.press("1", "right")
        await until(pilot, lambda: "held by r1.0 (L0), r1.1 (L0)" in screen_text(app), "the block's holders")
        await pilot.press("enter")
        await until(pilot, lambda: app.chosen.key == "r1.0")
        await pilot.press("enter")
        await until(pilot, lambda: app.chosen.key == "r1.1", "the next holder")
        await pilot.press("l")
        await until(pilot, lambda: "P1  ref count 1" in screen_text(app), "l moves right")


async def test_a_click_chooses_a_block():
    async with running(ListSource(candidates_batches())) as (app, pilot):
        grid = app.query_one("#grid", BlockGrid)
        column = 1 + grid.layout_now.cell_width + 2  # the border, the first card, inside the second
        await pilot.click("#grid", offset=(column, 1))
        await until(pilot, lambda: app.chosen.cursor == 1, "P1 under the mouse")


async def test_zoom_keys_change_what_a_cell_is():
    async with running(ListSource(candidates_batches())) as (app, pilot):
        grid = app.query_one("#grid", BlockGrid)
        seen = [grid.layout_now.zoom]
        for _ in [*Zoom][1:]:
            await pilot.press("minus")
            await until(pilot, lambda: grid.layout_now.zoom > seen[-1])
            seen.append(grid.layout_now.zoom)
        assert seen == list(Zoom)
        await pilot.press("0")
        await until(pilot, lambda: grid.layout_now.zoom is Zoom.CARDS)


async def test_of_two_blocks_in_a_cell_each_can_be_chosen():
    """A click takes the upper one, or the other than the cursor's; up and down go from row to row of blocks."""
    async with running(StorySource(StoryEngine(800, 4)), (80, 24)) as (app, pilot):
        grid = app.query_one("#grid", BlockGrid)
        await until(pilot, lambda: grid.layout_now.zoom is Zoom.HALVES, "two blocks per cell")
        place, below = (1 + grid.layout_now.label_width + 3, 1), 3 + grid.layout_now.columns
        await pilot.click("#grid", offset=place)
        await until(pilot, lambda: app.chosen.cursor == 3, "the upper one")
        await pilot.press("down")
        await until(pilot, lambda: app.chosen.cursor == below, "the lower one")
        await pilot.press("down", "left", "up", "up", "right")
        await until(pilot, lambda: app.chosen.cursor == 3, "row by row")
        assert [grid._chosen(3, chain) for chain in (1, 2)] == [below, 3]  # a click, and the second of a double one


@pytest.mark.parametrize("signs", ["without colours", "ascii"])
async def test_two_blocks_share_no_cell_where_nothing_tells_them_apart(monkeypatch, signs):
    if signs == "without colours":
        monkeypatch.setenv("NO_COLOR", "1")
    async with running(StorySource(StoryEngine(800, 4)), (80, 24), ascii_only=signs == "ascii") as (app, pilot):
        grid = app.query_one("#grid", BlockGrid)
        for key, zoom in (("0", Zoom.GROUPS), ("plus", Zoom.DENSE), ("minus", Zoom.GROUPS)):
            await pilot.press(key)
            await until(pilot, lambda zoom=zoom: grid.layout_now.zoom is zoom, f"{key}: {zoom.name}")


async def test_a_large_pool_can_be_scrolled_block_by_block():
    engine = StoryEngine(20_000, 16)
    async with running(StorySource(engine)) as (app, pilot):
        grid = app.query_one("#grid", BlockGrid)
        await pilot.press("plus", "plus", "end")
        await until(pilot, lambda: app.chosen.cursor == 19_999 and "P19999" in screen_text(app), "the last block")
        assert grid.scroll_offset.y > 100


async def test_events_that_came_out_of_sight_are_there_when_one_looks():
    source = live(num_steps=3)
    async with running(source, (80, 24)) as (app, pilot):
        events = app.query_one("#events")
        await until(pilot, lambda: app.shown_revision == source.view.revision, "the first steps")
        assert not events.display
        for _ in range(6):
            source.feed(source.engine.step())
            await until(pilot, lambda: app.shown_revision == source.view.revision, "a step out of sight")
        await pilot.press("5")  # nothing new comes from here on
        newest = f"{source.view.log[-1].seq:>5} "
        await until(pilot, lambda: any(newest in strip.text for strip in strips_of(app)), "the newest event")
        assert events.is_vertical_scroll_end


async def test_events_follow_the_newest_until_one_scrolls_up():
    source = live(num_steps=10)
    async with running(source) as (app, pilot):
        await pilot.press("5")
        events = app.query_one("#events")
        await until(pilot, lambda: events.is_vertical_scroll_end)
        await pilot.press("g")
        await until(pilot, lambda: events.scroll_offset.y == 0)
        source.feed(source.engine.step())
        await until(pilot, lambda: app._frame.revision == source.view.revision)
        assert events.scroll_offset.y == 0
        assert "engine story started" in screen_text(app)
        await pilot.press("G")
        await until(pilot, lambda: events.is_vertical_scroll_end)


# --- states ---------------------------------------------------------------------------------------------------------


async def test_stale_keeps_the_picture_and_says_since_when():
    source = live(num_steps=2)
    async with running(source, (80, 24)) as (app, pilot):
        source.set_status(Status.STALE, "no heartbeat since 12:04:31")
        await until(pilot, lambda: "no heartbeat since 12:04:31" in screen_text(app), "banner")
        assert "▲ STALE" in screen_text(app)
        assert "P0" in screen_text(app)
        source.view.status_since -= 30
        source.view.revision += 1
        await until(pilot, lambda: "STALE 30 s" in screen_text(app) or "STALE 31 s" in screen_text(app), "it ages")
        source.set_status(Status.LIVE)
        await until(pilot, lambda: "no heartbeat" not in screen_text(app), "banner gone")


async def test_what_the_engine_warns_of_is_a_banner():
    source = live(num_steps=2)
    async with running(source, (80, 24)) as (app, pilot):
        source.view.warn("recording stopped: No space left on device: run.mcap")
        await until(pilot, lambda: "ENGINE: recording stopped: No space left on device: run.mcap" in screen_text(app))
        source.view.warn("")
        await until(pilot, lambda: "ENGINE:" not in screen_text(app), "another engine")


async def test_a_finding_is_a_red_banner():
    source = live(num_steps=2)
    async with running(source, (80, 24)) as (app, pilot):
        with source.view.lock:
            source.view.findings.append(Finding(3, "r1.0 wrote into shared P1", 2))
            source.view.revision += 1
        await until(pilot, lambda: "AUDIT: invariant 3 broken" in screen_text(app))


async def test_an_engine_without_a_state_yet_can_be_looked_at():
    class Silent(ListSource):
        def start(self) -> None:
            self.view.set_status(Status.CONNECTING, "ipc://somewhere")

    async with running(Silent()) as (app, pilot):
        await until(pilot, lambda: "CONNECTING: ipc://somewhere" in screen_text(app))
        await pilot.press("right", "down", "end", "minus", "plus", "enter", "2", "down", "3", "4", "5", "6")
        assert app.is_running


# --- the prompt ------------------------------------------------------------------------------------------------------


async def test_a_prompt_with_options_reaches_the_engine():
    source = live()
    async with running(source) as (app, pilot):
        await pilot.press("i", *"hello q?", "space", *"n=2", "space", *"max_tokens=5", "enter")
        await until(pilot, lambda: source.control.calls, "submit")
        name, (prompt, options) = source.control.calls[0]
        assert (name, prompt) == ("submit", "hello q?")
        assert options["n"] == 2
        assert options["max_tokens"] == 5
        assert options["temperature"] == SamplingParams().temperature
        assert app.query_one(PromptInput).value == ""
        await until(pilot, lambda: "r4 submitted: 2 prompt tokens, n=2" in app.query_one("#events").text())
        assert app.is_running


async def test_the_defaults_are_shown_and_used():
    source = live()
    defaults = SamplingParams(max_tokens=12, temperature=0.5)
    async with running(source, defaults=defaults) as (app, pilot):
        assert "n=1  max_tokens=12  temperature=0.5" in screen_text(app)
        await pilot.press("i", *"king", "enter")
        await until(pilot, lambda: source.control.calls)
        assert source.control.calls[0][1][1]["max_tokens"] == 12


async def test_a_wrong_option_is_explained_and_selected():
    source = live()
    async with running(source) as (app, pilot):
        await pilot.press("i", *"king", "space", *"temprature=2", "enter")
        await until(pilot, lambda: "did you mean temperature?" in screen_text(app), "message")
        prompt = app.query_one(PromptInput)
        assert prompt.selected_text == "temprature=2"
        assert prompt.value == "king temprature=2"
        assert not source.control.calls
        await pilot.press(*"n=2", "enter")  # typing replaces the wrong word
        await until(pilot, lambda: source.control.calls)
        assert "did you mean" not in screen_text(app)
        assert source.control.calls[0][1][0] == "king"


async def test_history_is_recalled_and_the_draft_comes_back():
    source = live()
    async with running(source) as (app, pilot):
        await pilot.press("i", *"one", "enter", *"two", "enter", *"dra")
        prompt = app.query_one(PromptInput)
        values = []
        for key in ("up", "up", "up", "down", "down"):
            await pilot.press(key)
            values.append(prompt.value)
        assert values == ["two", "one", "one", "two", "dra"]


async def test_a_refusal_of_the_engine_is_one_clear_line():
    source = live()
    source.control.answer = Reply(ok=False, error="the limit is 512 [/nope]")
    async with running(source) as (app, pilot):
        await pilot.press("i", *"x", "enter")
        await until(pilot, lambda: "the limit is 512 [/nope]" in screen_text(app), "notification")


async def test_a_broken_control_channel_does_not_take_the_picture_down():
    source = live()

    def broken(prompt: str, options: dict[str, object]) -> object:
        raise OSError("socket [/gone]")

    source.control.submit = broken
    async with running(source) as (app, pilot):
        await pilot.press("i", *"x", "enter")
        await until(pilot, lambda: "socket [/gone]" in screen_text(app), "notification")
        assert app.is_running


async def test_escape_leaves_the_prompt_and_letters_are_keys_again():
    source = live(num_steps=1)
    async with running(source) as (app, pilot):
        await pilot.press("i", *"pqc")
        assert app.query_one(PromptInput).value == "pqc"
        assert not source.control.calls
        await pilot.press("escape", "p")
        await until(pilot, lambda: ("pause", None) in source.control.calls, "pause")
        await until(pilot, lambda: "‖ PAUSED" in screen_text(app))
        await pilot.press("n")
        await until(pilot, lambda: "step 2 " in screen_text(app), "one step")
        await pilot.press("p")
        await until(pilot, lambda: "● LIVE" in screen_text(app), "resumed")


async def test_a_pasted_text_of_several_lines_stays_one_prompt():
    from textual import events

    async with running(live()) as (app, pilot):
        prompt = app.query_one(PromptInput)
        prompt.focus()
        prompt.post_message(events.Paste("one\ntwo \x1b[31mred"))
        await until(pilot, lambda: prompt.value == "one\ntwo ␛[31mred", "paste")


async def test_cancel_acts_on_the_selected_request():
    source = live(num_steps=2)
    async with running(source) as (app, pilot):
        await pilot.press("x")
        await until(pilot, lambda: "select a request first" in screen_text(app))
        await pilot.press("2", "down", "down", "x")
        await until(pilot, lambda: ("cancel", "r1") in source.control.calls)
        await until(pilot, lambda: "r1.0 was cancelled" in app.query_one("#events").text())


async def test_scripted_prompts_are_sent_one_after_the_other():
    source = live()
    async with running(source, scripted_prompts=["one", "two n=2"], scripted_delay_s=0.01) as (_, pilot):
        await until(pilot, lambda: len(source.control.calls) == 2)
        assert [call[1][0] for call in source.control.calls] == ["one", "two"]


async def test_typing_stops_the_script():
    source = live()
    async with running(source, scripted_prompts=["one"], scripted_delay_s=60.0) as (app, pilot):
        await pilot.press("i", "x")
        await until(pilot, lambda: app._script == [], "the script is dropped")
        assert source.control.calls == []


async def test_without_a_control_channel_the_prompt_is_closed():
    async with running(ListSource(article_batches()), scripted_prompts=["never"]) as (app, pilot):
        assert "read-only" in screen_text(app)
        await pilot.press("i", "p", "n", "x")
        assert app.query_one(PromptInput).disabled
        assert not app.query_one(PromptInput).has_focus
        await until(
            pilot, lambda: screen_text(app).count("this view has no engine") == 4, "the line, and three notices"
        )


def test_a_view_without_control_says_whose_doing_that_is():
    client = Mock(is_read_only=False)
    assert Connected(client).no_control == ""
    assert "--read-only" in Connected(client, read_only=True).no_control
    assert "--no-control" in Connected(Mock(is_read_only=True), read_only=True).no_control


async def test_a_key_for_the_past_says_how_one_gets_there():
    source = live(num_steps=2)
    source.history = History()
    async with running(source) as (app, pilot):
        await pilot.press("2", "down", "v")
        await until(pilot, lambda: "freeze the view first: Space" in screen_text(app), "the notice")


# --- replay ---------------------------------------------------------------------------------------------------


def recording_of(batches) -> Recording:
    return Recording(Path("story.mcap"), list(enumerate(batches)))


async def test_a_recording_is_stepped_played_and_rewound():
    source = ReplaySource(recording_of(candidates_batches()))
    player = source.player
    async with running(source) as (app, pilot):
        assert "▶ REPLAY" in screen_text(app)
        await until(pilot, lambda: player.position == player.length and not player.playing, "played to the end")
        await until(pilot, lambda: "copy-on-write P1 -> P2" in screen_text(app), "the copy")
        await pilot.press("b", "b")
        await until(pilot, lambda: f"{player.length - 2}/{player.length}" in screen_text(app), "two back")
        await until(pilot, lambda: "2/6 blocks" in screen_text(app), "the copy is undone")
        await pilot.press("n", "full_stop")
        await until(pilot, lambda: "3/6 blocks" in screen_text(app), "and done again")
        await pilot.press("less_than_sign")
        await until(pilot, lambda: "0.5×" in screen_text(app), "speed")
        await pilot.press("home")
        await until(pilot, lambda: player.position == 0, "rewound")
        assert app.is_running


async def test_play_at_the_end_starts_again():
    source = ReplaySource(recording_of(article_batches()))
    async with running(source) as (app, pilot):
        player = source.player
        await until(pilot, lambda: player.position == player.length and not player.playing)
        seen = []
        player.seek_start, seek = (lambda: (seen.append("start"), seek()), player.seek_start)
        await pilot.press("space")
        await until(pilot, lambda: seen == ["start"] and player.position == player.length, "played once more")
        assert app.is_running


async def test_home_is_the_panes_own_key_when_there_is_no_recording():
    async with running(ListSource(candidates_batches())) as (app, pilot):
        await pilot.press("1", "end")
        await until(pilot, lambda: app.chosen.cursor == 5)
        await pilot.press("home")
        await until(pilot, lambda: app.chosen.cursor == 0)


# --- help, palette, hostile text, screenshot --------------------------------------------------------------------


async def test_help_opens_with_both_keys_and_closes():
    async with running(live(), (80, 24)) as (app, pilot):
        for key in ("question_mark", "f1"):
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, HelpScreen) and "Everywhere" in screen_text(app))
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(app.screen, HelpScreen))


async def test_no_dialogue_opens_above_the_help():
    async with running(live(), (80, 24)) as (app, pilot):
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen), "the help")
        await pilot.press("m", "slash", "escape")
        await until(pilot, lambda: len(app.screen_stack) == 1, "nothing lies below it")


def test_help_names_every_binding():
    from kvscope.dashboard.glyphs import UNICODE

    text = "\n".join(strip.text for strip in draw_help(UNICODE, 140))
    for key in KEYS:
        assert key_names(key.keys) in text
        assert key.about in text
    for owner in (BlockGrid, RequestsPane, TablePane, StripPane, PromptInput):
        for binding in owner.BINDINGS:
            assert isinstance(binding, Binding)
            assert key_names(binding.key) in text
            assert binding.description in text


def test_no_key_means_two_things_at_once():
    bound = [key for entry in KEYS if entry.needs != "live" for key in entry.keys.split(",")]  # live: nothing to play
    assert all(first != second for first, second in pairwise(sorted(bound)))


async def test_the_palette_holds_every_action():
    async with running(live()) as (app, pilot):
        offered = {command.title for command in app.get_system_commands(app.screen)}
        expected = {
            f"{key.about}  ({key_names(key.keys)})"
            for key in KEYS
            if key.needs not in ("recording", "history", "live", "tap", "host") and key.keys != "ctrl+q,ctrl+c"
        }
        assert expected <= offered
        await pilot.press("ctrl+p")
        await until(pilot, lambda: "Cancel the selected" in screen_text(app), "palette opens")


HOSTILE = "[/nope] [@click=app.quit]x[/] [bold]b \x1b]52;c;ZXZpbA==\x07 \x1b[2J \u202egnp\u202c a\tb\nc"


async def test_hostile_text_is_only_text_everywhere():
    engine = StoryEngine(8, 4)
    engine.name_prefix = "[/q]"
    batches = engine.start(model=HOSTILE)
    batches += engine.submit(HOSTILE, n=2, max_tokens=30)
    for _ in range(4):
        batches += engine.step({"[/q]1.0": " [/nope][@click=app.quit]", "[/q]1.1": " \x1b[31m]"})
    printable = [decode_batch(encode_batch(batch), printable=True).batch for batch in batches]
    source = StorySource(engine, printable)
    source.control.answer = Reply(ok=False, error=HOSTILE)
    async with running(source, (160, 45)) as (app, pilot):
        source.set_status(Status.STALE, "[/nope] because")
        for key in ("2", "down", "down", "3", "1", "right", "right", "4", "5", "6", "i", *"[/x]", "enter"):
            await pilot.press(key)
        await until(pilot, lambda: "[/nope] because" in screen_text(app))
        await until(pilot, lambda: "prompt refused" in screen_text(app), "notification")
        text = screen_text(app)
        assert "[@click=app.quit]" in text
        assert "Text of [/q]1.0" in text
        assert not [c for c in text if c != "\n" and (ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u202c")]
        assert all(cell_len(line) == 160 for line in text.splitlines())
        metas = [
            segment.style.meta for strip in strips_of(app) for segment in strip if segment.style and segment.style.meta
        ]
        assert not [meta for meta in metas if "app.quit" in str(meta.get("@click", ""))]


async def test_a_picture_can_be_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with running(live(num_steps=2)) as (app, pilot):
        await pilot.press("s")
        await until(pilot, lambda: "picture saved" in screen_text(app))
        (picture,) = tmp_path.glob("*.svg")
        text = picture.read_text()
        assert "POOL" in text
        assert "url(" not in text.replace("url(#", "")  # nothing is fetched to look at it


async def test_no_color_still_tells_the_states_apart(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(live(num_steps=2)) as (app, pilot):
        assert app.no_color
        await until(pilot, lambda: "■■■■ 2" in screen_text(app) and "□" in screen_text(app))


async def test_q_quits():
    async with running(live()) as (app, pilot):
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)


async def test_ctrl_c_quits_also_while_writing():
    async with running(live()) as (app, pilot):
        await pilot.press("i", "x", "ctrl+c")
        await until(pilot, lambda: not app.is_running)


async def test_strips_that_did_not_change_are_not_painted_again():
    async with running(live(num_steps=2)) as (app, _):
        painted = []
        header = app.query_one("#header", StripWidget)
        header.refresh = lambda *_, **__: painted.append("header")
        app.draw()
        app.draw()
        assert painted == []
        assert app.query_one(PromptBar)


async def test_breakpoints_are_chosen_shown_and_cleared():
    source = live(num_steps=2)
    async with running(source, (80, 24)) as (app, pilot):
        await pilot.press("P")
        await until(pilot, lambda: is_asking(app, BreakpointsScreen) and "[ ] copy-on-write" in screen_text(app))
        await pilot.press("space", "down", "down", "space", "tab")
        signs = [part.style for strip in strips_of(app) for part in strip if part.text == UNMARKED]
        assert len(signs) == 3
        assert all(
            max(abs(x - y) for x, y in zip(style.color.triplet, style.bgcolor.triplet, strict=True)) > 90
            for style in signs
        )
        marks = {"[x] copy-on-write", "[ ] preemption", "[x] eviction", "[ ] refusal"}  # told without a colour
        await until(pilot, lambda: all(mark in screen_text(app) for mark in marks), "what is marked")
        await pilot.press("1", "2", "1", "enter")
        chosen = Breakpoints(events=("copy-on-write", "eviction"), free_below=121)
        await until(pilot, lambda: source.control.calls == [("break", chosen)], "what was asked")
        await until(pilot, lambda: source.view.state.breakpoints == chosen, "the engine says so")
        await pilot.press("P")
        await until(pilot, lambda: is_asking(app, BreakpointsScreen), "the choice again")
        assert app.screen.query_one(SelectionList).selected == ["copy-on-write", "eviction"]
        assert app.screen.query_one("#breakpoints Input", Input).value == "121"
        await pilot.press("x")
        await until(pilot, lambda: source.control.calls[-1] == ("break", Breakpoints()), "cleared")


@pytest.mark.parametrize("size", SIZES)
async def test_a_breakpoint_is_named_in_the_header(size):
    source = live(num_steps=2)
    async with running(source, size) as (app, pilot):
        source.act(lambda engine: [engine.batch("control", ev.EnginePaused(reason="copy-on-write at step 412"))])
        await until(pilot, lambda: "paused: copy-on-write at step 412 " in screen_text(app), "the reason")


async def test_no_breakpoints_where_the_engine_takes_no_control():
    async with running(ListSource(article_batches())) as (app, pilot):
        await pilot.press("P")
        assert len(app.screen_stack) == 1


async def test_a_frame_that_comes_while_the_panes_are_taken_down_is_not_drawn(monkeypatch):
    """Every frame is drawn into all panes; at the end some are gone earlier than others."""
    async with running(live()) as (app, _):
        await app.query_one("#grid", BlockGrid).remove()
        monkeypatch.setattr(DashboardApp, "is_running", False)
        app.on_frame_ready(FrameReady(app._frame))
        app.draw_top()


async def test_no_key_at_the_bottom_is_cut():
    """At every width as many as fit, whole; the first ones stay, for they lead to all the others."""

    def labels(app) -> list[str]:
        return [f"{key.key_display} {key.description}" for key in app.query(FooterKey)]

    async with running(live(num_steps=2), (200, 24)) as (app, pilot):
        await until(pilot, lambda: labels(app)[-1:] == ["s svg"], "all of them")
        every = labels(app)
        for width in (60, 80, 83, 108, 120, 200):
            lines = [" " + "  ".join(every[:number]) for number in range(1, len(every) + 1)]
            longest = [line for line in lines if cell_len(line) <= width][-1]
            await pilot.resize_terminal(width, 24)
            await until(
                pilot, lambda line=longest: screen_text(app).splitlines()[-1].rstrip() == line, f"{width}: {longest}"
            )
            assert " " + "  ".join(labels(app)) == longest  # none that is there and cannot be seen


async def test_the_footer_lets_go_of_the_keys_it_no_longer_shows():
    """Textual's own keeps every key it ever had: hours of moving about would cost hundreds of MiB."""
    seen = weakref.WeakSet()
    async with running(live()) as (app, pilot):
        for key in ("i", "escape") * 3:
            await pilot.press(key)
            await until(pilot, lambda key=key: isinstance(app.focused, PromptInput) is (key == "i"), "the focus")
            await pilot.pause()
            seen.update(app.query(FooterKey))
        shown = set(app.query(FooterKey))
        gc.collect()
        assert len(shown) > 5
        assert set(seen) == shown


@pytest.mark.parametrize("size", [(80, 24), (160, 45)])
async def test_a_pool_that_does_not_fit_has_a_map(size):
    engine = StoryEngine(4000, 4)
    source = StorySource(engine, engine.start() + engine.submit("a prompt " * 200, max_tokens=9) + engine.run(2))
    async with running(source, size) as (app, pilot):
        grid, chart = app.query_one("#grid"), app.query_one("#pool-map")
        assert (grid.layout_now.zoom, chart.display) == (Zoom.GROUPS, False)
        await pilot.press("plus")

        def in_view() -> str:
            top, rows, per_row = grid.scroll_offset.y, grid.content_height, grid.layout_now.blocks_per_row
            return f" P{top * per_row}-P{min((top + rows) * per_row, 4000) - 1} "

        await until(pilot, lambda: in_view() in chart.text() and " P0-P" in chart.text(), "the map")
        await pilot.press("G")
        await until(pilot, lambda: in_view() in chart.text() and "-P3999" in chart.text(), "its mark moves along")
        await pilot.click(chart, offset=(5, 0))
        await until(pilot, lambda: in_view() in chart.text() and " P0-P" in chart.text(), "a click goes there")
        await pilot.press("0")
        await until(pilot, lambda: not chart.display, "no map where all is in view")


async def test_candidates_stand_side_by_side_and_one_can_be_chosen():
    async with running(ListSource(candidates_batches()), (160, 45)) as (app, pilot):
        table = app.query_one("#table")
        await pilot.press("2", "down", "3")
        await until(pilot, lambda: "they part at position 6" in table.text(), "both of them")
        assert str(table.border_title) == "3 Candidates of r1, side by side"
        await pilot.press("left")
        await until(pilot, lambda: app.chosen.key == "r1.1", "the last one")
        await until(pilot, lambda: "they part" not in table.text() and "L1 → P1" in table.text(), "its table")
        app.select("r1")
        await until(pilot, lambda: "they part" in table.text(), "both again")
        await pilot.click(table, offset=(4, 3))
        await until(pilot, lambda: app.chosen.key == "r1.0", "a click chooses the one there")


async def test_candidates_side_by_side_follow_their_newest_text_until_one_goes_up():
    engine = StoryEngine(200, 4)
    batches = engine.start() + engine.submit("Once upon a time there was a king", n=2, max_tokens=200)
    source = StorySource(engine, batches + engine.run(40))
    async with running(source) as (app, pilot):
        table = app.query_one("#table")

        async def go_on(is_at_end: bool) -> None:
            lines = table.virtual_size.height
            source.act(lambda engine: engine.run(8))
            await until(pilot, lambda: table.virtual_size.height > lines, "more text")
            await until(pilot, lambda: (table.scroll_offset.y == table.max_scroll_y) is is_at_end, "where it stands")

        await pilot.press("2", "down", "3")
        await until(
            pilot, lambda: app.chosen.key == "r1" and 0 < table.max_scroll_y == table.scroll_offset.y, "its end"
        )
        await go_on(is_at_end=True)
        assert table.text().splitlines()[-1].startswith(" r1.0 48 tok ")  # whose texts these are
        await pilot.press("up")
        await until(pilot, lambda: table.scroll_offset.y < table.max_scroll_y, "one up")
        await go_on(is_at_end=False)
        await pilot.press("G")
        await until(pilot, lambda: table.scroll_offset.y == table.max_scroll_y, "the end again")
        await go_on(is_at_end=True)
