"""Panes with more than their room: one that stays at its end, and one that draws no more than is in view."""

from textual.geometry import Size
from textual.strip import Strip

from kvscope.dashboard.pane import StripPane


class FollowingPane(StripPane):
    """Stays at its end while that grows, until the user scrolls up; scrolling back to the end resumes."""

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._following = True

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._following = new_value >= self.max_scroll_y

    def follow(self) -> None:
        """Go to the end, unless the user looks at something above it."""
        if self._following:
            self.scroll_to(y=self.max_scroll_y, animate=False, force=True)  # the scrollbar may not be there yet


class LazyPane(StripPane):
    """For lists of thousands: only the lines in view are drawn."""

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._painted: dict[int, Strip] = {}
        self._num_lines = 0

    def prepare(self, width: int) -> int:
        """Get ready to draw at this width; the number of lines. Overridden by each pane."""
        raise NotImplementedError

    def draw_line(self, y: int, width: int) -> Strip:
        """Line `y` of those announced by `prepare`; overridden by each pane."""
        raise NotImplementedError

    def redraw(self) -> None:
        width, height = self.room.size
        if width <= 0 or not self.display:
            return
        self._num_lines = self.prepare(width)
        size = Size(width, self._num_lines)
        top, before = min(self.scroll_offset.y, max(size.height - height, 0)), self._painted
        self._painted = {}
        self._painted = {y: self.line_at(y) for y in range(top, top + height)}
        if size != self.virtual_size:
            self.resize_content(size)
            self.repaint(range(height))
            return
        self.repaint_lines(
            y for y, strip in self._painted.items() if (known := before.get(y)) is not strip and known != strip
        )

    def line_at(self, y: int) -> Strip:
        if y in self._painted:
            return self._painted[y]
        return self.draw_line(y, self.content_width) if y < self._num_lines else Strip([])
