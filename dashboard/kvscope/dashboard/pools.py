"""The two pools side by side: the device's blocks, and those in host memory that requests are swapped out to."""

from textual.app import ComposeResult
from textual.containers import Container

from kvscope.dashboard.block_grid import BlockGrid
from kvscope.dashboard.cards import build_captions
from kvscope.dashboard.copies import DEVICE, HOST
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.grid_layout import MAX_CARDS, Zoom, lay_out
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.selection import light_of

BORDER = 2
BAR = 1  # a column is kept for the scrollbar
MIN_WIDTH = 20  # for the host pool's title


class Pools(Container):
    """The host's is there only where the engine has one; it gets what it needs, and a third of the room at most."""

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.device = BlockGrid(glyphs, id="grid")
        self.host = BlockGrid(glyphs, id="host", has_legend=False)

    def compose(self) -> ComposeResult:
        yield self.device
        yield self.host

    def show(self, frame: Frame, selected: str | None, cursor: int | None, host_cursor: int | None) -> None:
        """The host pool first: what it takes is not the other's."""
        self.host.display = frame.host.num_blocks > 0
        if self.host.display:
            self._make_room(frame.host)
            light = light_of(frame, selected, host_cursor, HOST)
            self.host.show(frame.host, light, build_captions(frame, frame.host))
        self.device.show(frame.pool, light_of(frame, selected, cursor, DEVICE), build_captions(frame))

    def _make_room(self, host: PoolFrame) -> None:
        """At the right in the compact arrangement, else below."""
        (width, height), styles = self.size, self.host.styles
        if self.screen.has_class("-compact"):
            styles.width, styles.height = width_beside(host, width, height), "1fr"
        else:
            styles.width, styles.height = "1fr", height_below(host, width, height)


def height_below(host: PoolFrame, width: int, room: int) -> int:
    """Lines under the block pool, borders included: every slot if that fits a third, else a glyph per block."""
    limit = max(room // 3 - BORDER, 1)
    for zoom in (Zoom.SLOTS, Zoom.BLOCKS):
        layout = lay_out(host, width - BORDER - BAR, limit, zoom)
        if layout.zoom is zoom and layout.height <= limit:
            return layout.height + BORDER
    return limit + BORDER


def width_beside(host: PoolFrame, room: int, height: int) -> int:
    """Columns at the right of the block pool, borders included: a name for every block if that fits a third."""
    limit, lines = max(room // 3, MIN_WIDTH), height - BORDER
    for width in range(MIN_WIDTH, limit if host.num_blocks <= MAX_CARDS else 0):
        layout = lay_out(host, width - BORDER - BAR, lines, Zoom.BLOCKS)
        if not layout.label_width and layout.height <= lines:
            return width
    return limit


def host_title(host: PoolFrame, width: int) -> str:
    """With its own count of held blocks, and how many of them several sequences share."""
    if width < 40:
        return f"Host {host.num_held}/{host.num_blocks}"
    shared = f", {host.num_shared} shared" if host.num_shared else ""
    return f"Host pool  {host.num_held}/{host.num_blocks} blocks swapped out{shared}"
