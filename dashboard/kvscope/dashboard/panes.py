"""The two smallest panes: one sequence's text, and one block."""

from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.inspector import draw_block
from kvscope.dashboard.long_panes import FollowingPane
from kvscope.dashboard.pane import StripPane
from kvscope.dashboard.pool_frame import EMPTY_POOL, PoolFrame
from kvscope.dashboard.selection import Shown
from kvscope.dashboard.strips import make_strip
from kvscope.dashboard.table import draw_text


class TextPane(FollowingPane):
    """What was asked, and what the model has written so far."""

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self._shown: Shown | None = None

    def show(self, shown: Shown | None) -> None:
        if shown != self._shown:
            self._shown = shown
            self.redraw()

    def draw(self, width: int) -> list[Strip]:
        if self._shown is None:
            return [make_strip([(" no sequence selected", theme.SOFT)], width)]
        return draw_text(*self._shown, self._glyphs, width)

    def copied_text(self) -> str:
        """Whole, and without the pane's line breaks."""
        return f"{self._shown[0].prompt}{self._shown[1].text}" if self._shown is not None else ""

    def redraw(self) -> None:
        super().redraw()
        self.follow()


class BlockPane(StripPane):
    """The block under the cursor."""

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self._frame: Frame | None = None
        self._block_id: int | None = None
        self._pool: PoolFrame = EMPTY_POOL

    def show(self, frame: Frame, block_id: int | None, pool: PoolFrame) -> None:
        self._frame, self._block_id, self._pool = frame, block_id, pool
        self.redraw()

    def draw(self, width: int) -> list[Strip]:
        if self._frame is None or self._block_id is None:
            return [make_strip([(" arrow keys or a click in the pool choose a block", theme.SOFT)], width)]
        return draw_block(self._frame, self._block_id, self._glyphs, width, pool=self._pool)
