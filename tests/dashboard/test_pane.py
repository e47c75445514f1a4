"""The panes' scrollbars, which come and go with the content and not one layout later."""

from __future__ import annotations

from rich.style import Style
from test_app import live, running, until
from textual.app import App
from textual.strip import Strip

from kvscope.dashboard.direct import DirectWidget
from kvscope.dashboard.ground import Ink
from kvscope.dashboard.long_panes import FollowingPane
from kvscope.dashboard.palettes import ANSI_THEME, LIGHT_THEME
from kvscope.dashboard.strips import make_strip


class Numbers(FollowingPane):
    """As many lines as it is told, followed to their end."""

    DEFAULT_CSS = "Numbers { height: 10; scrollbar-gutter: stable; scrollbar-size-vertical: 1; }"
    num_lines = 3

    def draw(self, width: int) -> list[Strip]:
        return [make_strip([(f"{number}", Style())], width) for number in range(self.num_lines)]

    def show(self, num_lines: int) -> None:
        self.num_lines = num_lines
        self.redraw()
        self.follow()


class NumbersApp(App[None]):
    def compose(self):
        yield Numbers(id="numbers")


async def test_a_scrollbar_goes_when_the_content_comes_to_fit_exactly():
    async with NumbersApp().run_test(size=(30, 12)) as pilot:
        pane = pilot.app.query_one(Numbers)
        pane.show(40)
        await until(pilot, lambda: pane.show_vertical_scrollbar and pane.vertical_scrollbar.region, "the bar")
        pane.show(pane.content_height)
        await until(pilot, lambda: not pane.vertical_scrollbar.region, "no bar")


async def test_a_scrollbar_shows_how_far_it_was_scrolled_before_it_came():
    async with NumbersApp().run_test(size=(30, 12)) as pilot:
        pane = pilot.app.query_one(Numbers)
        pane.show(40)
        await until(pilot, lambda: pane.scroll_offset.y == 30, "the end")
        await until(pilot, lambda: pane.vertical_scrollbar.position == 30, "the bar at the end")


async def test_what_lies_under_a_line_is_that_of_now():
    """Under every theme, and when something changes that the widget lies in."""
    async with running(live(num_steps=3)) as (app, pilot):
        widgets = [each for each in app.screen.walk_children() if isinstance(each, DirectWidget)]

        def is_that_of_now() -> bool:
            found = [(each.rich_style, tuple(each.get_line_filters()), each.background_colors[1]) for each in widgets]
            return [each.ink for each in widgets] == [Ink(*values) for values in found]

        def repaint_the_ground() -> None:
            app.query_one("#deck").styles.background = "darkred"

        changes = [lambda: setattr(app, "theme", LIGHT_THEME), lambda: setattr(app, "theme", ANSI_THEME)]
        for change in (*changes, repaint_the_ground):
            before = [each.rich_style for each in widgets]
            change()
            await until(pilot, lambda before=before: [each.rich_style for each in widgets] != before, "the change")
            await until(pilot, is_that_of_now, "its ink")
