"""What lies under the strips of a pane: its style and its theme."""

from typing import NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual.color import BLACK, Color
from textual.filter import LineFilter
from textual.strip import Strip
from textual.widget import Widget

from kvscope.dashboard.canvas import Canvas, Sgrs
from kvscope.dashboard.palettes import Recolour
from kvscope.dashboard.themed import ThemedApp


def recolour_of(widget: Widget) -> Recolour:
    """From the colours of drawing to those of the theme."""
    return widget.app.recolour if isinstance(widget.app, ThemedApp) else Recolour()


class Ink(NamedTuple):
    """What lies under every line of a widget, and what each goes through on its way to the terminal.

    To look it up is a walk through all that the widget lies in, and as dear as a line.
    """

    base: Style
    filters: tuple[LineFilter, ...] = ()
    background: Color = BLACK


class Ground:
    """A widget's ink under what is drawn, in the colours of the theme."""

    def __init__(self, recolour: Recolour, ink: Ink) -> None:
        self._recolour, self._ink = recolour, ink
        self._styles: dict[Style | None, Style] = {}
        self._sgrs: tuple[Canvas, Sgrs] | None = None

    def on(self, recolour: Recolour, ink: Ink) -> "Ground":
        """This one while it is the same, else a new one."""
        return self if recolour is self._recolour and ink == self._ink else Ground(recolour, ink)

    def sgrs(self, canvas: Canvas) -> Sgrs:
        """What the terminal gets for styles on this ground, without colours where those are not wanted."""
        if self._sgrs is None or self._sgrs[0] is not canvas:
            self._sgrs = canvas, Sgrs(lambda style: canvas.sgrs.of(self._filtered(self._blend(style))))
        return self._sgrs[1]

    def _filtered(self, style: Style) -> Style | None:
        strip = Strip([Segment(" ", style)], 1)
        for line_filter in self._ink.filters:
            strip = strip.apply_filter(line_filter, self._ink.background)
        return next(iter(strip)).style

    def lay(self, strip: Strip, start: int, width: int) -> Strip:
        """`width` cells of a strip from `start` on, padded: in one pass, for a far zoom's line has a hundred parts."""
        if start or strip.cell_length > width:
            strip = strip.crop(start, start + width)
        styles = self._styles
        try:
            parts = [Segment(text, styles[style]) for text, style, _ in strip]
        except KeyError:
            styles |= {style: self._blend(style) for _, style, _ in strip}
            parts = [Segment(text, styles[style]) for text, style, _ in strip]
        missing = width - strip.cell_length
        return Strip([*parts, Segment(" " * missing, self._ink.base)] if missing > 0 else parts, width)

    def _blend(self, style: Style | None) -> Style:
        if style is None:
            return self._ink.base
        return self._ink.base + (style if self._recolour.identity else self._recolour.style(style))
