"""What every view looks like, at four sizes, in Unicode and in ASCII, dark, light, in few colours and without any.

The snapshots are text: the screens as a person reads them (`SIZE-unicode.txt`, `SIZE-ascii.txt`), of the first one
which style each stretch of cells has (`SIZE-dark.txt`, ...), and which codes a terminal of fewer colours gets
(`80x24-16.txt`). `make snapshots` writes them anew; read the difference.
"""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path

import pytest
from dashboard_story import StoryEngine, StorySource, crowded_engine, swapping_engine
from rich.cells import cell_len
from test_app import running, screen_text, strips_of, until
from test_sparing import on_a_line

from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.glyphs import ASCII, UNICODE
from kvscope.dashboard.grid import draw_row
from kvscope.dashboard.grid_layout import NO_LIGHT, Zoom, lay_out
from kvscope.dashboard.keys import PANES
from kvscope.dashboard.palettes import ANSI_THEME, DARK_THEME, Recolour
from kvscope.dashboard.pool_frame import build_pool
from kvscope.dashboard.settings import COLOR_SYSTEMS
from kvscope.dashboard.themed import Look

FOLDER = Path(__file__).parent / "snapshots"
WRITING = os.environ.get("KVSCOPE_SNAPSHOTS") == "write"
SIZES = [(60, 20), (80, 24), (120, 36), (200, 60)]
FULL_WIDTH = 108  # from here on every pane is on the screen, whichever has the focus


def story() -> StorySource:
    engine, batches = crowded_engine()
    return StorySource(engine, batches + engine.run(12))


def swapping_story() -> StorySource:
    engine, batches = swapping_engine()
    return StorySource(engine, batches + engine.run(8))


def large_story() -> StorySource:
    """Prompts with many candidates, which share most of what they hold, and one without."""
    engine = StoryEngine(20_000, 4)
    batches = engine.start()
    for n in (8, 1, 2):
        batches += engine.submit("one word after another " * 500, n=n, max_tokens=4000)
    return StorySource(engine, batches + engine.run(500))


def screen_of(app) -> list[str]:
    return [line.rstrip() for line in screen_text(app).splitlines()]


async def settled(app, pilot) -> list[str]:
    """The screen once it has stopped changing; only for writing."""
    seen: list[list[str]] = []
    while len(seen) < 4 or any(screen != seen[-1] for screen in seen[-4:]):
        await pilot.pause(0.05)
        seen.append(screen_of(app))
    return seen[-1]


async def compare(app, pilot, expected: dict[str, list[str]], name: str, read=screen_of) -> None:
    """Until the screen is the expected one; a screen that never is, is shown beside it."""
    if WRITING:
        await settled(app, pilot)
        expected[name] = read(app)
        return
    assert name in expected, f"no snapshot of {name}: make snapshots"
    try:
        await until(pilot, lambda: read(app) == expected[name], name, timeout_s=20.0)
    except AssertionError:
        assert read(app) == expected[name], name  # pytest's own difference is easier to read


def load(path: Path) -> dict[str, list[str]]:
    screens: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("=== "):
            screens[line.removeprefix("=== ")] = lines = []
        else:
            lines.append(line)
    return screens


def save(path: Path, screens: dict[str, list[str]]) -> None:
    if WRITING:
        FOLDER.mkdir(exist_ok=True)
        path.write_text("".join(f"=== {name}\n" + "".join(f"{x}\n" for x in text) for name, text in screens.items()))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("signs", ["unicode", "ascii"])
async def test_every_view(size, signs):
    path = FOLDER / f"{size[0]}x{size[1]}-{signs}.txt"
    screens = {} if WRITING else load(path)
    views = [name for name in PANES if name != "host" and (size[0] < FULL_WIDTH or name == "grid")]
    async with running(story(), size, ascii_only=signs == "ascii") as (app, pilot):
        for name in views:
            app.action_pane(name)
            await until(pilot, lambda name=name: app.query_one(f"#{name}").has_focus, name)
            await compare(app, pilot, screens, name)
        await pilot.press("2", "down", "3")
        await until(pilot, lambda: app.chosen.key == "r1" and app.query_one("#table").has_focus, "a request")
        await compare(app, pilot, screens, "candidates side by side")
        await pilot.press("2", "down")
        await until(pilot, lambda: app.chosen.key == "r1.0", "selection")
        await compare(app, pilot, screens, "a sequence selected")
        await pilot.press("question_mark")
        await compare(app, pilot, screens, "help")
    async with running(swapping_story(), size, ascii_only=signs == "ascii") as (app, pilot):
        await pilot.press("2", "down", "down", "down", "3")
        await until(
            pilot, lambda: app.chosen.key == "r2" and app.query_one("#table").has_focus, "a request on the host"
        )
        await compare(app, pilot, screens, "a request swapped out")
    assert all(cell_len(line) <= size[0] for screen in screens.values() for line in screen)
    save(path, screens)


def styles_of(app) -> list[str]:
    """Each line as stretches of one style: `12 #c9d1d9/#0d1117 bold`."""
    lines = []
    for strip in strips_of(app):
        runs: list[tuple[str, int]] = []
        for segment in strip:
            style = named(segment.style)
            count = cell_len(segment.text)
            if runs and runs[-1][0] == style:
                runs[-1] = (style, runs[-1][1] + count)
            elif count:
                runs.append((style, count))
        lines.append(" | ".join(f"{count} {style}" for style, count in runs))
    return lines


def named(style) -> str:
    if style is None:
        return "-"
    colours = "/".join(colour.name if colour is not None else "-" for colour in (style.color, style.bgcolor))
    words = [word for word in ("bold", "dim", "underline", "reverse") if getattr(style, word)]
    return " ".join([colours, *words])


async def compare_colourings(app, pilot, expected, read) -> None:
    """With nothing selected, what else colours can say."""
    await pilot.press("escape")
    await until(pilot, lambda: app.chosen.key is None, "nothing selected")
    for by in [*ColourBy][1:]:
        await pilot.press("c")
        await until(pilot, lambda by=by: f"c by {by.value} " in screen_text(app), by.value)
        await compare(app, pilot, expected, f"by {by.value}", read)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("mode", ["dark", "light", "monochrome"])
async def test_every_style(size, mode, monkeypatch):
    path = FOLDER / f"{size[0]}x{size[1]}-{mode}.txt"
    screens = {} if WRITING else load(path)
    if mode == "monochrome":
        monkeypatch.setenv("NO_COLOR", "1")
    look = Look(theme="kvscope-light" if mode == "light" else "kvscope")
    async with running(story(), size, look=look) as (app, pilot):
        await pilot.press("2", "down", "down")
        await until(pilot, lambda: app.chosen.key == "r1.0", "selection")
        await compare(app, pilot, screens, "a sequence selected", styles_of)
        if size == SIZES[1]:
            await compare_colourings(app, pilot, screens, styles_of)
    save(path, screens)


def codes_of(app) -> list[str]:
    """Each line as stretches of what a terminal gets for one look: `12 1;38;5;74;48;5;16`."""
    rows = (groupby(row.styles) for row in app._canvas._wanted)
    return [" | ".join(f"{len([*cells])} {codes or '-'}" for codes, cells in row) for row in rows]


@pytest.mark.parametrize(("colours", "theme"), [("16", ANSI_THEME), ("256", DARK_THEME)])
async def test_what_a_terminal_of_fewer_colours_gets(monkeypatch, colours, theme):
    path = FOLDER / f"80x24-{colours}.txt"
    screens = {} if WRITING else load(path)
    look = Look(theme=theme, color_system=COLOR_SYSTEMS[colours])
    async with on_a_line(monkeypatch, story(), look=look) as (app, pilot, _):
        await compare(app, pilot, screens, "the pool", codes_of)
        await pilot.press("2", "down", "down")
        await until(pilot, lambda: app.chosen.key == "r1.0", "selection")
        await compare(app, pilot, screens, "a sequence selected", codes_of)
    save(path, screens)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_a_pool_too_large_for_its_pane(size, monkeypatch):
    """The far zoom, and a nearer one with its map: without colours, in ASCII, which is the hardest to read."""
    path = FOLDER / f"{size[0]}x{size[1]}-large.txt"
    screens = {} if WRITING else load(path)
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(large_story(), size, ascii_only=True) as (app, pilot):
        await compare(app, pilot, screens, "far")
        await compare(app, pilot, screens, "far, styles", styles_of)
        await pilot.press("plus")
        chart = app.query_one("#pool-map")
        await until(pilot, lambda: chart.display or size[1] < 24, "the map, where there is room for one")
        await compare(app, pilot, screens, "near, with a map")
        await pilot.press("minus")
        if size == SIZES[1]:
            await compare_colourings(app, pilot, screens, screen_of)
    save(path, screens)


@pytest.mark.parametrize("mode", ["dark", "light"])
async def test_two_blocks_in_a_cell(mode):
    path = FOLDER / f"80x24-halves-{mode}.txt"
    screens = {} if WRITING else load(path)
    engine = StoryEngine(800, 4)
    batches = engine.start()
    for n in (3, 1, 2):
        batches += engine.submit("one word after another " * 70, n=n, max_tokens=900)
    source = StorySource(engine, batches + engine.run(100))
    look = Look(theme="kvscope-light" if mode == "light" else "kvscope")
    async with running(source, (80, 24), look=look) as (app, pilot):
        await compare(app, pilot, screens, "halves")
        await compare(app, pilot, screens, "halves, styles", styles_of)
        await pilot.press("2", "down", "down")
        await until(pilot, lambda: app.chosen.key == "r1.0", "selection")
        await compare(app, pilot, screens, "a sequence selected", styles_of)
    save(path, screens)


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("zoom", [Zoom.SLOTS, Zoom.BLOCKS, Zoom.DENSE])
def test_without_colours_the_five_states_are_five_pictures(zoom, glyphs):
    """Free, reserved, partly written, full and cached, by their characters alone; and shared is a sixth."""
    states = {"free": (0, 0), "reserved": (1, 0), "partly": (1, 2), "full": (1, 4), "cached": (0, 4), "shared": (2, 4)}
    pictures = {}
    for name, (refs, written) in states.items():
        pool = build_pool(4, (refs,), (written,), ())
        layout = lay_out(pool, 60, 3, zoom)
        strip, recolour = draw_row(pool, layout, 0, NO_LIGHT, glyphs=glyphs, width=60), Recolour(no_color=True)
        assert all(segment.style is None or recolour.style(segment.style).color is None for segment in strip)
        pictures[name] = strip.text.strip()
    assert len(set(pictures.values())) == len(states), pictures
