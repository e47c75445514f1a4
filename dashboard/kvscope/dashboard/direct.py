"""Widgets whose lines go to the terminal's picture without a detour through Textual's compositor.

For every line that changes, the compositor asks each widget on the screen for its lines and cuts them at every edge.
A widget with nothing lying over it does not need that: its lines are the picture.
"""

from collections.abc import Collection
from typing import Any, NamedTuple, Self

from rich.style import Style
from textual.color import Color
from textual.content import Content
from textual.filter import LineFilter
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from kvscope.dashboard.sparing import Opening, SparingApp


class Ink(NamedTuple):
    """What lies under every line of a widget, and what each goes through on its way to the terminal.

    To look it up is a walk through all that the widget lies in, and as dear as a line.
    """

    base: Style
    filters: tuple[LineFilter, ...]
    background: Color


class DirectWidget(Widget):
    """A widget that draws line by line."""

    _ink: Ink | None = None

    @property
    def ink(self) -> Ink:
        """Found again after each `refresh` of the whole widget: Textual, too, remembers painted lines until then."""
        if self._ink is None:
            self._ink = Ink(self.rich_style, tuple(self.get_line_filters()), self.background_colors[1])
        return self._ink

    def refresh(self, *regions: Region, **options: Any) -> Self:
        if not regions:
            self._ink = None
        return super().refresh(*regions, **options)

    def notify_style_update(self) -> None:
        self._ink = None
        super().notify_style_update()

    @property
    def room(self) -> Region:
        """Where the content is on the screen, without borders and scrollbars."""
        app = self.app
        opening = app.find_opening(self) if isinstance(app, SparingApp) else None
        return self.scrollable_content_region if opening is None else opening.region

    def repaint(self, rows: Collection[int]) -> None:
        """Rows of the content, counted from the first in view, have changed."""
        if not rows:
            return
        app = self.app
        if not isinstance(app, SparingApp) or (opening := app.find_opening(self)) is None:
            self.refresh(*(Region(0, row, self.size.width, 1) for row in rows))
            return
        self._styles_cache.clear()  # what Textual remembers of these lines is out of date
        self.before_lines()
        for row in rows:
            self.lay_row(opening, row)
        app.send_soon()

    def entitle(self, name: str, title: str, row: int) -> None:
        """Write `border_title` or `border_subtitle`, in a row. Textual would paint the whole widget again for it."""
        app, content = self.app, Content(title)
        if not isinstance(app, SparingApp) or (opening := app.find_opening(self, row)) is None:
            setattr(self, name, content)
            return
        setattr(self, f"_{name}", content)
        self._styles_cache.clear()
        opening.paint(0, self.render_lines(Region(0, row, self.outer_size.width, 1))[0])
        app.send_soon()

    def before_lines(self) -> None:
        """What is costly to look up is looked up once for all lines."""

    def lay_row(self, opening: Opening, row: int) -> None:
        """Lay a row into the picture."""
        opening.paint(row, self.filtered(self.render_line(row)))

    def filtered(self, strip: Strip) -> Strip:
        """As the terminal gets it, without colours where those are not wanted."""
        for line_filter in self.ink.filters:
            strip = strip.apply_filter(line_filter, self.ink.background)
        return strip
