"""Widgets whose lines go to the terminal's picture without a detour through Textual's compositor.

For every line that changes, the compositor asks each widget on the screen for its lines and cuts them at every edge.
A widget with nothing lying over it does not need that: its lines are the picture.
"""

from collections.abc import Collection

from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from kvscope.dashboard.sparing import Opening, SparingApp


class DirectWidget(Widget):
    """A widget that draws line by line."""

    def repaint(self, rows: Collection[int]) -> None:
        """Rows of the content, counted from the first in view, have changed."""
        if not rows:
            return
        regions = [Region(0, row, self.size.width, 1) for row in rows]
        app = self.app
        if not isinstance(app, SparingApp) or (opening := app.find_opening(self)) is None:
            self.refresh(*regions)
            return
        offset = self.content_offset  # what Textual remembers of these lines is out of date
        self._styles_cache.set_dirty(*(region.translate(offset) for region in regions))
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
        line = Region(0, row, self.outer_size.width, 1)
        self._styles_cache.set_dirty(line)
        opening.paint(0, self.render_lines(line)[0])
        app.send_soon()

    def before_lines(self) -> None:
        """What is costly to look up is looked up once for all lines."""

    def lay_row(self, opening: Opening, row: int) -> None:
        """Lay a row into the picture."""
        opening.paint(row, self.filtered(self.render_line(row)))

    def filtered(self, strip: Strip) -> Strip:
        """As the terminal gets it, without colours where those are not wanted."""
        for line_filter in self.get_line_filters():
            strip = strip.apply_filter(line_filter, self.background_colors[1])
        return strip
