"""The thin widgets under every pane: they hold finished strips and hand them to Textual line by line."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.binding import Binding
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from kvscope.dashboard.direct import DirectWidget
from kvscope.dashboard.filters import Query
from kvscope.dashboard.keys import DEFAULT_NAMES, KeyNames
from kvscope.dashboard.themed import ThemedApp

MAX_COPIED_LINES = 2000


def key_names_of(widget: Widget) -> KeyNames:
    """The keys in force where this widget is."""
    return widget.app.key_names if isinstance(widget.app, ThemedApp) else DEFAULT_NAMES


def own_bindings(widget: Widget) -> list[Binding]:
    """The keys that a widget of ours has for itself, the most special first; not those of Textual's widgets."""
    ours = [cls for cls in type(widget).__mro__ if cls.__module__.startswith("kvscope.")]
    return [binding for cls in ours for binding in vars(cls).get("BINDINGS", ()) if isinstance(binding, Binding)]


class StripWidget(DirectWidget):
    """As tall as the strips it is given, and never scrolled."""

    def __init__(self, *, id: str) -> None:  # noqa: A002  Textual's own parameter name
        super().__init__(id=id)
        self._strips: list[Strip] = []
        self.display = False

    def show(self, strips: Sequence[Strip]) -> None:
        if [*strips] == self._strips:
            return
        old, self._strips = self._strips, [*strips]
        if len(old) == len(self._strips):
            self.repaint([y for y, strip in enumerate(strips) if strip != old[y]])
            return
        self.styles.height = len(self._strips)
        self.display = bool(self._strips)
        self.refresh()

    def strip_at(self, row: int) -> Strip:
        return self._strips[row] if row < len(self._strips) else Strip([])

    def text(self) -> str:
        """What is on it, for tests and screen readers."""
        return "\n".join(strip.text for strip in self._strips)


class StripPane(ScrollView, DirectWidget):
    """A bordered, scrollable list of strips. Subclasses draw; only lines that changed are painted again."""

    can_focus = True
    BINDINGS: ClassVar = [
        Binding("j", "scroll_down", "scroll down", show=False),
        Binding("k", "scroll_up", "scroll up", show=False),
        Binding("g", "scroll_home", "top", show=False),
        Binding("G", "scroll_end", "end", show=False),
    ]

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._strips: list[Strip] = []
        self._title = self._subtitle = ""

    @property
    def note(self) -> str:
        """For the title."""
        return ""

    @property
    def filter_text(self) -> str:
        return ""

    def set_title(self, title: str) -> None:
        """In the border."""
        if title != self._title:
            self._title = title
            self.entitle("border_title", title, 0)

    def set_subtitle(self, subtitle: str) -> None:
        """The same for the border below."""
        if subtitle != self._subtitle:
            self._subtitle = subtitle
            self.entitle("border_subtitle", subtitle, self.outer_size.height - 1)

    def set_filter(self, text: str, query: Query) -> None:
        """For panes with a list that can be filtered."""

    def draw(self, width: int) -> list[Strip]:
        """The pane's content at a width; overridden by each pane."""
        raise NotImplementedError

    @property
    def content_width(self) -> int:
        return self.room.width

    @property
    def content_height(self) -> int:
        return self.room.height

    def redraw(self) -> None:
        """Draw again with the values at hand; cheap when nothing has changed."""
        width = self.content_width
        if width > 0 and self.display:
            self.set_strips(self.draw(width))

    def set_strips(self, strips: list[Strip]) -> None:
        old, self._strips = self._strips, strips
        size = Size(self.content_width, len(strips))
        if size != self.virtual_size or len(old) != len(strips):
            self.resize_content(size)
            self.repaint(range(self.content_height))
            return
        self.repaint_lines(y for y, strip in enumerate(strips) if strip is not old[y] and strip != old[y])

    def on_resize(self) -> None:
        self._decide_scrollbar()
        self.redraw()

    def resize_content(self, size: Size) -> None:
        """The content is as large as this now. The screen is laid out again only if the scrollbar comes or goes."""
        has_bar = size.height > self.container_size.height
        if has_bar != self.show_vertical_scrollbar or size.width != self.virtual_size.width:
            self.virtual_size = size
            return
        self.set_reactive(Widget.virtual_size, size)
        self.scroll_y = min(self.scroll_y, self.max_scroll_y)
        if has_bar:
            self.vertical_scrollbar.window_virtual_size = size.height

    def watch_virtual_size(self) -> None:
        self._decide_scrollbar()

    def _decide_scrollbar(self) -> None:
        """Textual does so only when a layout's room differs from the content: one that comes to fit keeps its bar."""
        self.show_vertical_scrollbar = self.virtual_size.height > self.container_size.height

    def watch_show_vertical_scrollbar(self, shown: bool) -> None:
        if shown:
            self.vertical_scrollbar.position = self.scroll_y  # it may have been scrolled before it had a bar

    def line_at(self, y: int) -> Strip:
        return self._strips[y] if y < len(self._strips) else Strip([])

    def repaint_lines(self, lines: Iterable[int]) -> None:
        """Lines of the content have changed; those that are out of view do not matter."""
        top, height = self.scroll_offset.y, self.content_height
        self.repaint([y - top for y in lines if top <= y < top + height])

    def strip_at(self, row: int) -> Strip:
        return self.line_at(row + self.scroll_offset.y)

    def copied_text(self) -> str:
        """What the copy key puts on the clipboard."""
        return "\n".join(self.line_at(y).text.rstrip() for y in range(min(self.virtual_size.height, MAX_COPIED_LINES)))

    def text(self) -> str:
        """Everything in the pane, for tests and screen readers."""
        return "\n".join(self.line_at(y).text.rstrip() for y in range(self.virtual_size.height))
