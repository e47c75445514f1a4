"""The two pools side by side: the device's blocks, and those in host memory that requests are swapped out to."""

from textual import events
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.message import Message

from kvscope.dashboard.block_grid import BlockGrid
from kvscope.dashboard.cards import build_captions
from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.copies import DEVICE, HOST
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.grid_layout import MAX_CARDS, NO_LIGHT, Zoom, lay_out
from kvscope.dashboard.groups import Groups
from kvscope.dashboard.minimap import HEIGHT, blocks_in_view, draw_map, map_layout
from kvscope.dashboard.pane import StripWidget
from kvscope.dashboard.pool_frame import EMPTY_POOL, PoolFrame
from kvscope.dashboard.selection import light_of

MIN_ROOM = 6  # lines for a map and enough of what it is a map of
BORDER = 2
BAR = 1  # a column is kept for the scrollbar
MIN_WIDTH = 20  # for the host pool's title


class PoolMap(StripWidget):
    """The whole pool in two lines; a click goes there."""

    class Clicked(Message):
        def __init__(self, column: int) -> None:
            super().__init__()
            self.column = column

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Clicked(event.x))


class Pools(Container):
    """The host's is there only where the engine has one; it gets what it needs, and a third of the room at most."""

    class Rearranged(Message):
        """The host's pane will have another size: what is drawn, and its title, depend on that."""

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self.device, self.map = BlockGrid(glyphs, id="grid"), PoolMap(id="pool-map")
        self.host = BlockGrid(glyphs, id="host", has_legend=False)
        self.host.display = False  # until it is known that there is one
        self._pool, self._light, self._groups = EMPTY_POOL, NO_LIGHT, Groups()

    def compose(self) -> ComposeResult:
        with Vertical(id="device"):
            yield self.device
            yield self.map
        yield self.host

    def on_mount(self) -> None:
        self.watch(self.device, "scroll_y", self.draw_map, init=False)

    def on_resize(self) -> None:
        if self.host.display:
            self.post_message(self.Rearranged())

    def show(
        self, frame: Frame, selected: str | None, cursor: int | None, host_cursor: int | None, by: ColourBy
    ) -> None:
        """The host pool first: what it takes is not the other's. What it has no numbers of is coloured by owner."""
        self.host.display = frame.host.num_blocks > 0
        if self.host.display:
            self._make_room(frame.host)
            light = light_of(frame, selected, host_cursor, HOST)._replace(by=_shown_by(frame.host, by))
            self.host.show(frame.host, light, build_captions(frame, frame.host))
        self._pool = frame.pool
        self._light = light_of(frame, selected, cursor, DEVICE)._replace(by=_shown_by(frame.pool, by))
        self.device.show(frame.pool, self._light, build_captions(frame))
        self.draw_map()

    def draw_map(self) -> None:
        """Only of a pool that does not fit its pane."""
        grid, pool = self.device, self._pool
        layout, room = grid.layout_now, grid.content_height + (HEIGHT if self.map.display else 0)
        if room < MIN_ROOM or layout.height <= room:
            self.map.show([])
            return
        if not self.map.display:
            self.call_after_refresh(self.draw_map)  # when it has taken its room from the grid
        in_view = blocks_in_view(pool, layout, grid.scroll_offset.y, grid.content_height)
        self.map.show(draw_map(pool, in_view, self._light, self._glyphs, grid.size.width, memory=self._groups))

    def on_pool_map_clicked(self, message: PoolMap.Clicked) -> None:
        """The block there comes into the middle."""
        block_id = map_layout(self._pool, self.device.size.width).block_at(message.column, 0)
        if block_id is not None:
            line = self.device.layout_now.line_of(block_id)
            self.device.scroll_to(y=line - self.device.content_height // 2, animate=False)

    def _make_room(self, host: PoolFrame) -> None:
        """At the right in the compact arrangement, else below."""
        (width, height), styles = self.size, self.host.styles
        before = styles.width, styles.height
        if self.screen.has_class("-compact"):
            styles.width, styles.height = width_beside(host, width, height), "1fr"
        else:
            styles.width, styles.height = "1fr", height_below(host, width, height)
        if (styles.width, styles.height) != before:
            self.post_message(self.Rearranged())


def _shown_by(pool: PoolFrame, by: ColourBy) -> ColourBy:
    return ColourBy.OWNER if by.needs_traces and pool.traces is None else by


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
