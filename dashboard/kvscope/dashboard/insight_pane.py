"""The insight screen as a pane: it watches every picture, and draws while it is on the screen."""

from textual.strip import Strip

from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.insight import draw_insight
from kvscope.dashboard.pane import StripPane
from kvscope.dashboard.series import Series


class InsightPane(StripPane):
    """Where the memory goes, and what another allocator would make of it."""

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self._frame: Frame | None = None
        self.series = Series()

    def observe(self, frame: Frame) -> None:
        """Every picture, also those that are not drawn here: a peak may lie in any of them."""
        self._frame = frame
        self.series.observe(frame)

    def draw(self, width: int) -> list[Strip]:
        frame = self._frame
        if frame is None:
            return []
        return draw_insight(frame, self.series.until(frame.time_ns), self._glyphs, width, self.content_height)
