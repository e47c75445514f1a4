"""The grid widget: caches one strip per row and paints only rows whose blocks have changed."""

from typing import ClassVar

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.strip import Strip

from kvscope.dashboard.frames import EMPTY_POOL, PoolFrame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.grid import NO_LIGHT, GridLayout, Light, Zoom, draw_row, lay_out, legend
from kvscope.dashboard.pane import StripPane
from kvscope.dashboard.strips import make_strip

_RowKey = tuple[tuple[int, ...], tuple[int, ...], bytes, bool]


class BlockGrid(StripPane):
    """Every physical block as a cell; arrow keys or the mouse move a cursor over it."""

    BINDINGS: ClassVar = [
        Binding("left,h", "move(-1, 0)", "previous block", show=False),
        Binding("right,l", "move(1, 0)", "next block", show=False),
        Binding("up,k", "move(0, -1)", "block above", show=False),
        Binding("down,j", "move(0, 1)", "block below", show=False),
        Binding("enter", "pick", "select the block's holder", show=False),
    ]

    class CursorMoved(Message):
        def __init__(self, block_id: int) -> None:
            super().__init__()
            self.block_id = block_id

    class Picked(Message):
        """The user wants the holder of this block selected."""

        def __init__(self, block_id: int) -> None:
            super().__init__()
            self.block_id = block_id

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs = glyphs
        self._pool: PoolFrame = EMPTY_POOL
        self._light: Light = NO_LIGHT
        self._zoom: Zoom | None = None
        self._cache: list[tuple[_RowKey, Strip]] = []
        self._cached_for: tuple[object, ...] = ()
        self.layout_now: GridLayout = lay_out(EMPTY_POOL, 1, 1)

    def show(self, pool: PoolFrame, light: Light) -> None:
        self._pool, self._light = pool, light
        self.redraw()

    def draw(self, width: int) -> list[Strip]:
        pool, light = self._pool, self._light
        # One row less than there is, so that the legend's line never costs a scrollbar.
        layout = lay_out(pool, width, self.content_height - 1, self._zoom)
        common = (layout, pool.block_size, tuple(light.logical), light.dim_others, width)
        if common != self._cached_for:
            self._cache, self._cached_for = [], common
        self.layout_now = layout
        strips = [self._row(row, width) for row in range(layout.rows)]
        self.border_subtitle = self._subtitle()
        return [*strips, make_strip(legend(layout, pool, self._glyphs), width)] if pool.num_blocks else strips

    def _row(self, row: int, width: int) -> Strip:
        pool, layout, cursor = self._pool, self.layout_now, self._light.cursor
        start = row * layout.blocks_per_row
        stop = start + layout.blocks_per_row
        under_cursor = cursor is not None and start <= cursor < stop
        key = (pool.refs[start:stop], pool.written[start:stop], pool.owners[start:stop], under_cursor)
        if not under_cursor and row < len(self._cache) and self._cache[row][0] == key:
            return self._cache[row][1]
        strip = draw_row(pool, layout, row, self._light, self._glyphs, width)
        self._cache[row : row + 1] = [(key, strip)]
        return strip

    def _subtitle(self) -> str:
        layout = self.layout_now
        zoom = layout.zoom.name.lower() if self._zoom is not None else f"{layout.zoom.name.lower()} (auto)"
        return f"zoom: {zoom}  + - 0"

    def change_zoom(self, step: int | None) -> None:
        """Nearer (-1) or denser (+1) than what is shown; None goes back to automatic."""
        if step is None:
            self._zoom = None
        else:
            self._zoom = Zoom(min(max(self.layout_now.zoom + step, Zoom.SLOTS), Zoom.GROUPS))
        self.redraw()
        self._scroll_to_cursor()

    def action_move(self, columns: int, rows: int) -> None:
        layout = self.layout_now
        if self._pool.num_blocks:
            step = columns * layout.group + rows * layout.blocks_per_row
            cursor = self._light.cursor
            self._move_to(0 if cursor is None else cursor + step)

    def action_scroll_home(self) -> None:
        self._move_to(0)

    def action_scroll_end(self) -> None:
        self._move_to(self._pool.num_blocks - 1)

    def action_pick(self) -> None:
        if self._light.cursor is not None:
            self.post_message(self.Picked(self._light.cursor))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None:
            block_id = self.layout_now.block_at(offset.x + self.scroll_offset.x, offset.y + self.scroll_offset.y)
            if block_id is not None and block_id < self._pool.num_blocks:
                self._move_to(block_id)
                if event.chain == 2:
                    self.action_pick()

    def _move_to(self, block_id: int) -> None:
        if 0 <= block_id < self._pool.num_blocks:
            self._light = self._light._replace(cursor=block_id)
            self.redraw()
            self._scroll_to_cursor()
            self.post_message(self.CursorMoved(block_id))

    def _scroll_to_cursor(self) -> None:
        if self._light.cursor is None:
            return
        row, top, height = self.layout_now.row_of(self._light.cursor), self.scroll_offset.y, self.content_height
        if not top <= row < top + height:
            self.scroll_to(y=row if row < top else row - height + 1, animate=False)
