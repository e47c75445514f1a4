"""What lies under the strips of a pane: its style and its theme."""

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from kvscope.dashboard.palettes import Recolour
from kvscope.dashboard.themed import ThemedApp


def recolour_of(widget: Widget) -> Recolour:
    """From the colours of drawing to those of the theme."""
    return widget.app.recolour if isinstance(widget.app, ThemedApp) else Recolour()


class Ground:
    """A pane's own style, which lies under what is drawn, in the colours of the theme."""

    def __init__(self, recolour: Recolour, base: Style) -> None:
        self._recolour, self._base = recolour, base
        self._styles: dict[Style | None, Style] = {}

    def on(self, recolour: Recolour, base: Style) -> "Ground":
        """This one while it is the same, else a new one."""
        return self if recolour is self._recolour and base == self._base else Ground(recolour, base)

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
        return Strip([*parts, Segment(" " * missing, self._base)] if missing > 0 else parts, width)

    def _blend(self, style: Style | None) -> Style:
        if style is None:
            return self._base
        return self._base + (style if self._recolour.identity else self._recolour.style(style))
