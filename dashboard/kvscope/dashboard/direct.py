"""Widgets whose lines go to the terminal's picture without a detour through Textual's compositor.

For every line that changes, the compositor asks each widget on the screen for its lines and cuts them at every edge.
A widget with nothing lying over it does not need that: its lines are the picture.
"""

from collections.abc import Collection
from typing import Any, Self

from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from kvscope.dashboard.ground import Ground, Ink, recolour_of
from kvscope.dashboard.palettes import Recolour
from kvscope.dashboard.sparing import Opening, SparingApp


class DirectWidget(Widget):
    """A widget that draws line by line: subclasses say what is in a row."""

    _ink: Ink | None = None
    _titled: dict[int, tuple[Ink | None, str, Strip]]  # by row of the border: the latest ink, title, and what it made
    _ground = Ground(Recolour(), Ink(Style()))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._titled = {}

    def strip_at(self, row: int) -> Strip:
        """Of the content, counted from the first row in view; overridden by each widget."""
        raise NotImplementedError

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
        opening.paint(0, self._title_row(row, title))
        app.send_soon()

    def _title_row(self, row: int, title: str) -> Strip:
        """As Textual draws it. With another title of the same length in the same ink only the words are others."""
        ink, before, strip = self._titled.get(row, (None, "", Strip([])))
        is_alike = ink is self.ink and strip.cell_length == self.outer_size.width and len(title) == len(before)
        has_title = [before in text for text, _, _ in strip] if is_alike and (title + before).isascii() else []
        if before and sum(has_title) == 1:
            parts = (Segment(text.replace(before, title), style) for text, style, _ in strip)
            strip = Strip(parts, strip.cell_length)
        else:
            strip = self.render_lines(Region(0, row, self.outer_size.width, 1))[0]
        self._titled[row] = self.ink, title, strip
        return strip

    def before_lines(self) -> None:
        """What is costly to look up is looked up once for all lines."""
        self._ground = self._ground.on(recolour_of(self), self.ink)

    def render_lines(self, crop: Region) -> list[Strip]:
        self.before_lines()
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        return self._ground.lay(self.strip_at(y), self.scroll_offset.x, self.size.width)

    def lay_row(self, opening: Opening, row: int) -> None:
        """Lay a row into the picture."""
        strip, start = self.strip_at(row), self.scroll_offset.x
        opening.paint(row, strip.crop(start) if start else strip, self._ground.sgrs(opening.canvas))
