"""Every action by key, by palette and by mouse; what keys of one's own, themes and the copy key do in the app."""

from __future__ import annotations

import pytest
from dashboard_story import candidates_batches, swapping_engine
from test_app import live, recording_of, running, screen_text, strips_of, until
from textual.app import App
from textual.command import CommandPalette
from textual.screen import Screen
from textual.scroll_view import ScrollView
from textual.widgets import OptionList

from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.glyphs import UNICODE
from kvscope.dashboard.header import draw_banner, draw_header
from kvscope.dashboard.keys import KEYS, PANES
from kvscope.dashboard.themed import Look
from kvscope.transport.recording import ReplaySource
from kvscope.transport.source import Status


def textuals_own() -> set[str]:
    """Moving the focus, scrolling and the like: keys that every Textual program has."""
    bindings = [*App.BINDINGS, *Screen.BINDINGS, *ScrollView.BINDINGS]
    return {getattr(binding, "action", None) or binding[1] for binding in bindings}


def footer_key(app):
    keys = [key for key in app.query("FooterKey") if key.action.endswith("command_palette") and key.region]
    return keys[0] if keys else None


def is_ours(action: str, of_textual: set[str]) -> bool:
    return action not in of_textual and not action.startswith(("screen.", "app.focus", "go("))


@pytest.mark.parametrize("pane", ["grid", "requests", "events"])
@pytest.mark.parametrize(
    "source_of",
    [lambda: live(swapping_engine, num_steps=8), lambda: ReplaySource(recording_of(candidates_batches()))],
)
async def test_keys_palette_and_mouse_reach_the_same(source_of, pane):
    async with running(source_of(), (120, 50)) as (app, pilot):
        app.action_pane(pane)
        await until(pilot, lambda: app.query_one(f"#{pane}").has_focus, "the pane")
        of_textual = textuals_own()
        by_key = {
            active.binding.action
            for active in app.screen.active_bindings.values()
            if active.enabled and is_ours(active.binding.action, of_textual)
        }
        entries = list(app.palette_entries(app.screen.focused))
        by_palette = {action for _, action, _ in entries if is_ours(action, of_textual)}
        assert by_key == by_palette

        while not isinstance(app.screen, CommandPalette):
            # The footer is composed anew whenever the focus moves: a click may meet a key that has just gone.
            await until(pilot, lambda: footer_key(app) is not None, "the key in the footer")
            await pilot.click(footer_key(app))
        options = app.screen.query_one(OptionList)
        titles = {title for title, _, _ in entries}
        await until(pilot, lambda: options.option_count > len(titles), "its list")
        by_mouse = {str(options.get_option_at_index(index).prompt).strip() for index in range(options.option_count)}
        assert titles <= by_mouse


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (200, 60)])
@pytest.mark.parametrize("ascii_only", [False, True])
async def test_the_palette_is_a_whole_frame(size, ascii_only):
    first, last = "++" if ascii_only else "╭╯"
    async with running(live(num_steps=2), size, ascii_only=ascii_only) as (app, pilot):
        await pilot.press("ctrl+p")
        await until(pilot, lambda: "Back out one level" in screen_text(app), "its list")
        line, options = app.screen.query_one("#--input"), app.screen.query_one(OptionList)
        await until(pilot, lambda: line.region.bottom == options.region.y, "one below the other")
        lines = screen_text(app).splitlines()
        assert lines[line.region.y][line.region.x] == first
        assert lines[options.region.bottom - 1][options.region.right - 1] == last
        assert screen_text(app).isascii() == ascii_only


async def test_a_click_in_the_palette_does_it():
    async with running(live(num_steps=2), (120, 50)) as (app, pilot):
        zoom = app.query_one("#grid").layout_now.zoom
        await pilot.press("ctrl+p", *"denser")
        await until(
            pilot,
            lambda: app.screen.query_one(OptionList).option_count == 1 and "denser" in screen_text(app),
            "one entry",
        )
        await pilot.click(OptionList, offset=(4, 0))
        await until(pilot, lambda: app.query_one("#grid").layout_now.zoom > zoom, "a click does it")


async def test_what_colours_say_is_changed_by_key_and_by_two_clicks():
    async with running(live(num_steps=2), (120, 50)) as (app, pilot):
        grid = app.query_one("#grid")

        async def says(by: ColourBy) -> None:
            await until(pilot, lambda: f"c by {by.value} " in screen_text(app), by.value)
            assert f"1 Block pool  by {by.value} " in screen_text(app)

        await says(ColourBy.OWNER)
        await pilot.press("c")
        await says(ColourBy.STATE)
        await pilot.click(grid, offset=(18, 0))  # its title
        await says(ColourBy.REFS)
        await pilot.click(grid, offset=(4, grid.size.height))  # the legend
        await says(ColourBy.AGE)
        await pilot.click(grid, offset=(60, 0))  # beside the title
        await pilot.press("c")
        await says(ColourBy.REUSE)
        await pilot.press("c")
        await says(ColourBy.OWNER)


async def test_every_key_of_the_table_can_be_another():
    keymap = {key.name: f"ctrl+f{number}" for number, key in enumerate(KEYS)}
    async with running(live(num_steps=2), look=Look(keymap={**keymap, "zoom-out": "Z"})) as (app, pilot):
        grid = app.query_one("#grid")
        zoom = grid.layout_now.zoom
        await pilot.press("minus")
        await pilot.press("Z")
        await until(pilot, lambda: grid.layout_now.zoom == zoom + 1, "the new key, and only it")


async def test_every_hint_names_the_key_in_force():
    """With other keys for everything, neither the screens nor the palette name one of the table's."""
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    keymap = {key.name: f"alt+{next(letters)}" for key in KEYS}
    async with running(live(), (160, 45), look=Look(keymap=keymap)) as (app, pilot):
        names = app.key_names
        text = screen_text(app)
        for pane in PANES.keys() - {"insight", "host"}:
            assert f"─ {names.pane(pane)} " in text, pane
        assert f"{names['help']} help" in text
        assert f"  {names['zoom-in']} {names['zoom-out']} {names['zoom-auto']} " in text
        entries = [title for title, _, target in app.palette_entries(None) if target is app]
        assert all(title.endswith(f"({keymap[key.name]})") for title in entries for key in KEYS if key.about in title)
        app.action_help()
        await until(pilot, lambda: "Everywhere" in screen_text(app), "the help")
        lines = app.screen.query_one("#help-pane").text().splitlines()
        for key in KEYS:
            line = next(line for line in lines if key.about[:40] in line)
            assert line.split()[0] == keymap[key.name], line
        app.pop_screen()
        app.action_cancel()
        await until(pilot, lambda: f"first: {names['requests']}, then" in screen_text(app), "the notice")
    async with running(ReplaySource(recording_of(candidates_batches())), (200, 45), look=Look(keymap=keymap)) as (
        app,
        pilot,
    ):
        names = app.key_names
        hint = f"{names['play']} play  {names['step']} {names['back']} batch  {names['engine-step']} "
        await until(pilot, lambda: hint in screen_text(app), "beside the timeline")
    for draw in (draw_banner, lambda *given, **keys: [draw_header(given[0], "x", *given[1:], **keys)]):
        frame = app._frame._replace(status=Status.HISTORY)
        words = "".join(strip.text for strip in draw(frame, UNICODE, 160, 0.0, keys=names))
        assert " L or End " not in words
        assert names["live"] in words or names["palette"] in words


async def test_escape_backs_out_one_level_at_a_time():
    async with running(live(num_steps=2)) as (app, pilot):
        await pilot.press("1", "right", "2", "down")
        await until(pilot, lambda: app.chosen.cursor is not None and app.chosen.key is not None, "cursor and selection")
        await pilot.press("escape")
        await until(pilot, lambda: app.chosen.key is None, "the selection first")
        assert app.chosen.cursor is not None
        await pilot.press("escape")
        await until(pilot, lambda: app.chosen.cursor is None, "then the cursor")
        assert app.is_running


async def test_the_copy_key_copies_the_focused_pane_and_nothing_else_does(monkeypatch):
    async with running(live(num_steps=6)) as (app, pilot):
        written = []
        monkeypatch.setattr(app._driver, "write", written.append)
        await pilot.press("4", "y")
        await until(pilot, lambda: app.clipboard.startswith("Once upon a time there was a king"), "the whole text")
        assert app.clipboard.endswith(app._frame.sequence("r1.0").text)
        await pilot.press("3", "y")
        await until(pilot, lambda: "L0 → P" in app.clipboard, "the table")
        assert len([text for text in written if "\x1b]52;" in text]) == 2
        await until(pilot, lambda: "copied" in screen_text(app))


async def test_function_keys_reach_the_panes_while_one_writes():
    async with running(live(num_steps=2)) as (app, pilot):
        await pilot.press("i", *"2 kings")
        assert app.focused.id == "prompt"
        await pilot.press("f5")
        await until(pilot, lambda: app.focused.id == "events", "the events")


async def test_mistakes_in_the_settings_are_told():
    look = Look(theme="nrod", notices=("settings.toml, line 3: [/no] such thing",))
    async with running(live(num_steps=2), look=look) as (app, pilot):
        await until(pilot, lambda: "settings.toml, line 3: [/no] such thing" in screen_text(app), "the notice")
        assert "no theme is called 'nrod'" in screen_text(app)
        assert app.theme == "kvscope"


@pytest.mark.parametrize(
    ("name", "ground"), [("kvscope", "#0d1117"), ("kvscope-light", "#ffffff"), ("textual-light", "#e0e0e0")]
)
async def test_cells_follow_the_theme_also_while_running(name, ground):
    async with running(live(num_steps=2), (80, 24)) as (app, pilot):
        app.theme = name
        await until(pilot, lambda: ground in grounds(app), "its ground")
        expected = {"kvscope": "#2fbf91"}.get(name, "#00704f")  # LIVE
        await until(pilot, lambda: expected in grounds(app), "the cells with it")


async def test_a_palette_of_ones_own_lies_on_top():
    look = Look(theme="kvscope-light", palette={"good": "#123456", "background": "#fffff0"})
    async with running(live(num_steps=2), (80, 24), look=look) as (app, pilot):
        await until(pilot, lambda: {"#123456", "#fffff0"} <= grounds(app), "both")


def grounds(app) -> set[str]:
    strips = strips_of(app)
    return {s.style.bgcolor.name for strip in strips for s in strip if s.style is not None and s.style.bgcolor}


async def test_without_colours_none_is_sent(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(live(num_steps=2), (80, 24), look=Look(theme="kvscope-light")) as (app, pilot):
        await pilot.press("2", "down", "down")
        await until(pilot, lambda: app.chosen.key is not None)
        styles = [s.style for strip in strips_of(app) for s in strip if s.style is not None]
        assert {colour.name for style in styles for colour in (style.color, style.bgcolor) if colour} == {"default"}
        assert any(style.reverse for style in styles)
