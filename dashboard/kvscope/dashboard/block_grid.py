"""The grid widget: caches one strip per row and paints only rows whose blocks have changed."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.cards import Captions, draw_card_row, draw_holders_row
from kvscope.dashboard.cells import Cell, Cells, make_cells
from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.grid import draw_row, row_label
from kvscope.dashboard.grid_layout import NO_LIGHT, GridLayout, Light, Zoom, lay_out
from kvscope.dashboard.groups import Groups
from kvscope.dashboard.legend import legend
from kvscope.dashboard.pane import StripPane, key_names_of
from kvscope.dashboard.pool_frame import EMPTY_POOL, PoolFrame
from kvscope.dashboard.sparing import Opening
from kvscope.dashboard.strips import make_strip

MIN_SUBTITLED = 30  # a narrower grid has no words for its zoom
_RowKey = tuple[object, ...]


class _Sgr(NamedTuple):
    """What the terminal gets for each look of a cell, for a row's label, and for the ground."""

    looks: Mapping[int, str]
    label: str
    ground: str


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
        """Onto this block of this pool."""

        def __init__(self, block_id: int, letter: str) -> None:
            super().__init__()
            self.block_id, self.letter = block_id, letter

    class Picked(CursorMoved):
        """The user wants the holder of this block selected."""

    class ColourClicked(Message):
        """The user wants colours to say something else."""

    def __init__(self, glyphs: Glyphs, *, id: str, has_legend: bool = True) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs, self._has_legend = glyphs, has_legend
        self._pool: PoolFrame = EMPTY_POOL
        self._light: Light = NO_LIGHT
        self._captions: Captions = {}
        self._zoom: Zoom | None = None
        self._cache: dict[int, tuple[_RowKey, Strip]] = {}
        self._cached_for: tuple[object, ...] = ()
        self._fresh: dict[int, tuple[int, ...]] = {}  # by row
        self._painted: dict[int, Strip] = {}  # by line in view, but for rows of cells
        self._changed: dict[int, list[Cell] | None] = {}  # by row of cells; None: all of them
        self._groups = Groups()
        self._legend_found = Strip([])
        self._legend_for: tuple[object, ...] = ()
        self._cells: Cells | None = None  # of the rows in view, at a zoom with one character per cell
        self._sgr: _Sgr | None = None  # in this frame
        self._sgr_found = _Sgr({}, "", "")
        self._sgr_for: tuple[object, ...] = ()
        self._cards: dict[int, list[Strip]] = {}  # rows of more than one line, for this frame only
        self.layout_now: GridLayout = lay_out(EMPTY_POOL, 1, 1)

    def show(self, pool: PoolFrame, light: Light, captions: Captions) -> None:
        self._pool, self._light, self._captions = pool, light, captions
        self.redraw()

    def redraw(self) -> None:
        """Lay out, then paint the visible lines that differ from what is on the screen."""
        width, height = self.room.size
        if width <= 0 or height <= 0 or not self.display:
            self._draw_nothing()
            return
        # The legend has the last line.
        self.layout_now = lay_out(self._pool, width, height - self._has_legend, self._zoom, halves=self._has_halves)
        self.set_subtitle(self._zoom_words() if width >= MIN_SUBTITLED else "")
        is_like_before = self._forget_stale_rows(width)
        top, size = self.scroll_offset.y, Size(width, max(self.layout_now.height + self._has_legend, height))
        cells_before, self._cells = self._cells if is_like_before else None, self._make_cells(top, height)
        before, self._painted = self._painted, self._paint_others(range(top, top + height), width, size.height)
        if size != self.virtual_size:
            self.resize_content(size)
            self.refresh()
            return
        others = [y for y, strip in self._painted.items() if (known := before.get(y)) is not strip and known != strip]
        self._changed = self._cells.unlike(cells_before) if self._cells is not None else {}
        self.repaint_lines(others + [y for y in self._changed if y not in self._painted])

    def _draw_nothing(self) -> None:
        """Until there is room: rows of the pool before may be asked for first, of which this one need not have any."""
        self.layout_now, self._cells, self._painted, self._cards = lay_out(EMPTY_POOL, 1, 1), None, {}, {}

    def _make_cells(self, top: int, height: int) -> Cells | None:
        layout = self.layout_now
        rows = range(min(top, layout.rows), min(top + height, layout.rows))
        if layout.zoom < Zoom.DENSE or not rows:
            return None
        return make_cells(self._pool, layout, rows, self._light, self._glyphs, memory=self._groups)

    def line_at(self, y: int) -> Strip:
        return self._painted.get(y) or self._line(y, self.content_width, self.virtual_size.height)

    def _paint_others(self, lines: range, width: int, height: int) -> dict[int, Strip]:
        """The lines that are no rows of cells: of those no strip is made."""
        return {y: self._line(y, width, height) for y in lines if self._cells_at(y, height) is None}

    def _cells_at(self, y: int, height: int) -> Cells | None:
        """A zoom of one character per cell has a row to each line; the last line may be the legend's."""
        return self._cells if self._cells is not None and y in self._cells.rows and y != height - 1 else None

    def lay_row(self, opening: Opening, row: int) -> None:
        """From cells there is a shorter way than by a strip."""
        scroll, cells = self.scroll_offset, self._cells
        y = row + scroll.y
        if cells is None or y in self._painted or scroll.x:
            super().lay_row(opening, row)
            return
        sgr = self._sgr = self._sgr or self._find_sgr(opening, cells.styles)
        layout, looks = self.layout_now, sgr.looks
        changed = self._changed.get(y)
        if changed is not None:
            opening.put(row, layout.label_width, [(column, text, looks[look]) for column, text, look in changed])
            return
        text, styles = cells.text(y), cells.each_in(y, looks)
        label, width = row_label(self._pool, layout, y), opening.region.width
        rest = max(width - len(label) - len(text), 0)
        styles = [*[sgr.label] * len(label), *styles, *[sgr.ground] * rest]
        opening.lay(row, (label + text + " " * rest)[:width], styles[:width])

    def before_lines(self) -> None:
        super().before_lines()
        self._sgr = None

    def _find_sgr(self, opening: Opening, styles: Mapping[int, Style]) -> _Sgr:
        """All of them are found again only under other colours."""
        sgrs = self._ground.sgrs(opening.canvas)
        if (sgrs, id(styles)) != self._sgr_for:
            found = {look: sgrs.of(style) for look, style in styles.items()}
            self._sgr_found = _Sgr(found, sgrs.of(theme.FAINT), sgrs.of(None))
            self._sgr_for = sgrs, id(styles)
        return self._sgr_found

    def _line(self, y: int, width: int, height: int) -> Strip:
        layout, pool = self.layout_now, self._pool
        if self._has_legend and y == height - 1 and pool.num_blocks:
            return self._legend(width)
        row, part = divmod(y, layout.lines)
        if row >= layout.rows:
            return make_strip([], width)
        if layout.lines > 1 and not self._cards.get(row):
            self._cards[row] = self._tall_row(row, width)
        return self._cards[row][part] if layout.lines > 1 else self._row(row, width)

    def _legend(self, width: int) -> Strip:
        """The same until something that it tells of is another."""
        pool, layout, by, key = self._pool, self.layout_now, self._light.by, key_names_of(self)["colour"]
        told = layout, by, key, width, pool.traces.since_step if pool.traces is not None else None
        if told != self._legend_for:
            self._legend_for = told
            self._legend_found = make_strip(legend(pool, layout, by, self._glyphs, key=key, width=width), width)
        return self._legend_found

    def _tall_row(self, row: int, width: int) -> list[Strip]:
        pool, layout, light, captions, glyphs = self._pool, self.layout_now, self._light, self._captions, self._glyphs
        if layout.zoom is Zoom.CARDS:
            return draw_card_row(pool, layout, row, light, captions=captions, glyphs=glyphs, width=width)
        holders = draw_holders_row(pool, layout, row, light, captions=captions, glyphs=glyphs, width=width)
        return [self._row(row, width), holders]

    def _forget_stale_rows(self, width: int) -> bool:
        """Whether rows have all in common that they had before."""
        light, layout = self._light, self.layout_now
        self._cards = {}
        lit = tuple(light.logical.items()) if layout.zoom < Zoom.DENSE else ()  # cells tell by themselves
        common = (layout, self._pool.block_size, lit, light.dim_others, light.by, width)
        is_like_before = common == self._cached_for
        if not is_like_before:
            self._cache, self._cached_for = {}, common
        by_row: dict[int, list[int]] = {}
        for block_id in sorted(light.fresh) if layout.zoom < Zoom.DENSE else ():
            by_row.setdefault(block_id // layout.blocks_per_row, []).append(block_id)
        self._fresh = {row: tuple(block_ids) for row, block_ids in by_row.items()}
        return is_like_before

    def _row(self, row: int, width: int) -> Strip:
        cells = self._cells if self._cells is not None and row in self._cells.rows else None
        if cells is None and self.layout_now.zoom >= Zoom.DENSE:  # scrolled in: its key does not tell what is lit
            return draw_row(self._pool, self.layout_now, row, self._light, glyphs=self._glyphs, width=width, cells=None)
        key = cells.key(row) if cells is not None else self._key(row)
        cached = self._cache.get(row)
        if cached is None or cached[0] != key:
            pool, layout, light, glyphs = self._pool, self.layout_now, self._light, self._glyphs
            strip = draw_row(pool, layout, row, light, glyphs=glyphs, width=width, cells=cells)
            cached = self._cache[row] = (key, strip)
        return cached[1]

    def _key(self, row: int) -> _RowKey:
        """Everything that a row depends on, but for what it has in common with the others."""
        pool, layout, cursor = self._pool, self.layout_now, self._light.cursor
        start = row * layout.blocks_per_row
        stop = start + layout.blocks_per_row
        here = cursor if cursor is not None and start <= cursor < stop else None
        refs, written, owners = (column[start:stop].tobytes() for column in (pool.refs, pool.written, pool.owners))
        seen = self._seen(slice(start, stop))
        return refs, written, owners, seen, self._fresh.get(row, ()), here

    def _seen(self, places: slice) -> bytes:
        """What a row's numbers depend on where they tell what was seen of its blocks."""
        traces, by = self._pool.traces, self._light.by
        if traces is None or not by.needs_traces:
            return b""
        return (traces.writes[places] - traces.now if by is ColourBy.AGE else traces.hits[places]).tobytes()

    @property
    def _has_halves(self) -> bool:
        """Two blocks in one cell are told apart by colour alone: without it, or in ASCII, that zoom is left out."""
        return bool(self._glyphs.halves) and not self.app.no_color

    def _zoom_words(self) -> str:
        layout = self.layout_now
        zoom = layout.zoom.name.lower() if self._zoom is not None else f"{layout.zoom.name.lower()} (auto)"
        keys = key_names_of(self)
        return f"zoom: {zoom}  {keys['zoom-in']} {keys['zoom-out']} {keys['zoom-auto']}"

    def change_zoom(self, step: int | None) -> None:
        """Nearer (-1) or denser (+1) than what is shown; None goes back to automatic."""
        if step is None:
            self._zoom = None
        else:
            zoom = self.layout_now.zoom + step
            if zoom == Zoom.HALVES and not self._has_halves:
                zoom += step
            self._zoom = Zoom(min(max(zoom, Zoom.CARDS), Zoom.GROUPS))
        self.redraw()
        self._scroll_to_cursor()

    def action_move(self, columns: int, rows: int) -> None:
        layout = self.layout_now
        if self._pool.num_blocks:
            step = columns * layout.group + rows * layout.blocks_abreast
            cursor = self._light.cursor
            self._move_to(0 if cursor is None else cursor + step)

    def action_scroll_home(self) -> None:
        self._move_to(0)

    def action_scroll_end(self) -> None:
        self._move_to(self._pool.num_blocks - 1)

    def action_pick(self) -> None:
        if self._light.cursor is not None:
            self.post_message(self.Picked(self._light.cursor, self._pool.letter))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        on_title = offset is None and event.y == 0 and event.x < len(self.border_title or "") + len("╭─ ")
        on_legend = offset is not None and offset.y + self.scroll_offset.y == self.virtual_size.height - 1
        if self._has_legend and (on_title or on_legend):
            self.post_message(self.ColourClicked())
        elif offset is not None:
            block_id = self.layout_now.block_at(offset.x + self.scroll_offset.x, offset.y + self.scroll_offset.y)
            if block_id is not None and block_id < self._pool.num_blocks:
                self._move_to(self._chosen(block_id, event.chain))
                if event.chain == 2:
                    self.action_pick()

    def _chosen(self, block_id: int, chain: int) -> int:
        """Of two blocks in a cell the upper one; the other when the cursor is on one already; a double click stays."""
        cursor, below = self._light.cursor, block_id + self.layout_now.blocks_abreast
        if self.layout_now.stack == 1 or below >= self._pool.num_blocks or cursor not in (block_id, below):
            return block_id
        is_other = (cursor == block_id) == (chain == 1)
        return below if is_other else block_id

    def _move_to(self, block_id: int) -> None:
        if 0 <= block_id < self._pool.num_blocks:
            self._light = self._light._replace(cursor=block_id)
            self.redraw()
            self._scroll_to_cursor()
            self.post_message(self.CursorMoved(block_id, self._pool.letter))

    def _scroll_to_cursor(self) -> None:
        if self._light.cursor is None:
            return
        row, top, height = self.layout_now.line_of(self._light.cursor), self.scroll_offset.y, self.content_height
        if not top <= row < top + height:
            self.scroll_to(y=row if row < top else row - height + 1, animate=False)
