"""The block grid: one row of it as a strip. Pure.

The zooms are those of grid_layout.py; those with one character per cell are drawn in cells.py.
"""

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.cells import FRESH, LIT, STYLES, Cells, make_cells
from kvscope.dashboard.colouring import SCALES, Mark, marks_of
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.grid_layout import SLOTS_TAIL, GridLayout, Light, Zoom
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part, make_strip, measure, merged


def block_glyph(ref_count: int, num_written: int, block_size: int, glyphs: Glyphs) -> str:
    """The state of one block as one character."""
    if not ref_count:
        return glyphs.cached if num_written else glyphs.free
    if not num_written:
        return glyphs.reserved
    return glyphs.full if num_written >= block_size else glyphs.partly


def draw_row(
    pool: PoolFrame,
    layout: GridLayout,
    row: int,
    light: Light,
    *,
    glyphs: Glyphs,
    width: int,
    cells: Cells | None = None,
) -> Strip:
    """Row `row` of the grid; `cells` are those of a picture with one character per cell, where they are known."""
    start = row * layout.blocks_per_row
    label: list[Part] = [(row_label(pool, layout, row), theme.FAINT)] if layout.label_width else []
    if layout.zoom >= Zoom.DENSE:
        cells = cells or make_cells(pool, layout, range(row, row + 1), light, glyphs)
        segments = [Segment(text, style) for text, style in (*label, *cells.parts(row))]
        return Strip(segments, layout.label_width + cells.length(row)).adjust_cell_length(width)  # one cell a character
    draw = _draw_slots if layout.zoom is Zoom.SLOTS else _draw_block
    blocks = range(start, min(start + layout.blocks_per_row, pool.num_blocks))
    parts = [
        part
        for block_id, mark in zip(blocks, marks_of(pool, light.by, blocks, glyphs), strict=True)
        for part in draw(pool, block_id, mark, light, glyphs=glyphs, cell_width=layout.cell_width)
    ]
    return make_strip(merged([*label, *parts]), width)


def row_label(pool: PoolFrame, layout: GridLayout, row: int) -> str:
    """The first block of a row whose blocks have no names."""
    return pool.name(row * layout.blocks_per_row).rjust(layout.label_width - 1) + " "


def block_style(block_id: int, mark: Mark, light: Light) -> Style:
    """The colour that the mark says; lit or dimmed by what is selected."""
    if block_id in light.logical:
        return STYLES[light.by][LIT + mark.code]
    if light.dim_others:
        return theme.FAINT
    return STYLES[light.by][mark.code + (FRESH if block_id in light.fresh else 0)]


def number_style(pool: PoolFrame, block_id: int, mark: Mark, light: Light) -> Style:
    """A ref count stands out when the block is shared; other numbers are in the colour of what they say."""
    if light.by.needs_traces:
        return theme.FAINT if light.dim_others and block_id not in light.logical else SCALES[light.by][mark.code]
    return theme.SHARED if pool.refs[block_id] > 1 else theme.FAINT


def name_style(block_id: int, light: Light) -> Style:
    """The block's id: the cursor, then what is selected, then what the latest step touched."""
    if block_id == light.cursor:
        return theme.CURSOR
    if block_id in light.logical:
        return theme.STRONG
    if light.dim_others:
        return theme.FAINT
    return theme.FRESH if block_id in light.fresh else theme.SOFT


def slot_glyphs(pool: PoolFrame, block_id: int, glyphs: Glyphs) -> str:
    """One glyph per slot."""
    num_written = int(pool.written[block_id])
    filled, empty = (glyphs.written, glyphs.reserved) if pool.refs[block_id] else (glyphs.cached, glyphs.free)
    return filled * num_written + empty * (pool.block_size - num_written)


def _draw_slots(
    pool: PoolFrame, block_id: int, mark: Mark, light: Light, *, glyphs: Glyphs, cell_width: int
) -> list[Part]:
    lit = block_id in light.logical
    id_width = len(str(pool.num_blocks - 1)) + 1
    name, number = pool.name(block_id), mark.number
    tail = cell_width - id_width - pool.block_size
    room = tail - 2 - len(number)
    logical = f" L{light.logical[block_id]}" if lit and tail >= SLOTS_TAIL else ""
    if len(logical) >= room:  # beside a number of several digits: air is left before the next block, or the edge
        logical = ""
    return [
        (name, name_style(block_id, light)),
        (" " * (id_width + 1 - len(name)), theme.PLAIN),
        (slot_glyphs(pool, block_id, glyphs), block_style(block_id, mark, light)),
        (" ", theme.PLAIN),
        (number, number_style(pool, block_id, mark, light)),
        (logical, theme.STRONG),
        (" " * (room - len(logical)), theme.PLAIN),
    ]


def _draw_block(
    pool: PoolFrame, block_id: int, mark: Mark, light: Light, *, glyphs: Glyphs, cell_width: int
) -> list[Part]:
    glyph = block_glyph(pool.refs[block_id], pool.written[block_id], pool.block_size, glyphs)
    style = theme.CURSOR if block_id == light.cursor else block_style(block_id, mark, light)
    name: list[Part] = []
    if cell_width > 3:
        label = pool.name(block_id).ljust(len(str(pool.num_blocks - 1)) + 2)
        name = [(label, name_style(block_id, light))]
    room = cell_width - measure(name) - 1 - len(mark.digit)
    number = (mark.digit, number_style(pool, block_id, mark, light))
    return [*name, (glyph, style), number, (" " * room, theme.PLAIN)]
