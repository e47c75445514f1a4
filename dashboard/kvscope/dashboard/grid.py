"""The block grid: one row of it as a strip. Pure.

The zooms are those of grid_layout.py; those with one character per cell are drawn in cells.py.
"""

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.cells import Cells, make_cells
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
        parts = [Segment(text, style) for text, style in (*label, *cells.parts(row))]
        return Strip(parts, layout.label_width + cells.length(row)).adjust_cell_length(width)  # one cell a character
    draw = _draw_slots if layout.zoom is Zoom.SLOTS else _draw_block
    blocks = range(start, min(start + layout.blocks_per_row, pool.num_blocks))
    parts = [part for block_id in blocks for part in draw(pool, block_id, light, glyphs, layout.cell_width)]
    return make_strip(merged([*label, *parts]), width)


def row_label(pool: PoolFrame, layout: GridLayout, row: int) -> str:
    """The first block of a row whose blocks have no names."""
    return pool.name(row * layout.blocks_per_row).rjust(layout.label_width - 1) + " "


def block_style(pool: PoolFrame, block_id: int, light: Light) -> Style:
    """The owner's colour; lit or dimmed by what is selected."""
    if block_id in light.logical:
        return theme.lit_style(pool.owners[block_id])
    if light.dim_others:
        return theme.FAINT
    style = theme.owner_style(pool.owners[block_id])
    return style + theme.BOLD if block_id in light.fresh else style


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


def _draw_slots(pool: PoolFrame, block_id: int, light: Light, glyphs: Glyphs, cell_width: int) -> list[Part]:
    ref_count, lit = pool.refs[block_id], block_id in light.logical
    id_width = len(str(pool.num_blocks - 1)) + 1
    name, refs = pool.name(block_id), f"{ref_count}" if ref_count else ""
    tail = cell_width - id_width - pool.block_size
    logical = f" L{light.logical[block_id]}" if lit and tail >= SLOTS_TAIL else ""
    air = max(tail - 2 - len(refs) - len(logical), 0)
    return [
        (name, name_style(block_id, light)),
        (" " * (id_width + 1 - len(name)), theme.PLAIN),
        (slot_glyphs(pool, block_id, glyphs), block_style(pool, block_id, light)),
        (" ", theme.PLAIN),
        (refs, theme.SHARED if ref_count > 1 else theme.FAINT),
        (logical, theme.STRONG),
        (" " * air, theme.PLAIN),
    ]


def _draw_block(pool: PoolFrame, block_id: int, light: Light, glyphs: Glyphs, cell_width: int) -> list[Part]:
    ref_count = pool.refs[block_id]
    glyph = block_glyph(ref_count, pool.written[block_id], pool.block_size, glyphs)
    style = theme.CURSOR if block_id == light.cursor else block_style(pool, block_id, light)
    digit = "" if ref_count <= 1 else str(ref_count) if ref_count <= 9 else glyphs.many
    name: list[Part] = []
    if cell_width > 3:
        label = pool.name(block_id).ljust(len(str(pool.num_blocks - 1)) + 2)
        name = [(label, name_style(block_id, light))]
    room = cell_width - measure(name) - 1 - len(digit)
    return [*name, (glyph, style), (digit, theme.SHARED), (" " * room, theme.PLAIN)]


def legend(layout: GridLayout, glyphs: Glyphs) -> list[Part]:
    """What the cells of this zoom mean."""
    if layout.zoom is Zoom.GROUPS:
        low, high = glyphs.levels[1], glyphs.levels[-1]
        samples = zip(theme.TINTS[1:], ("some", "half", "most"), strict=True)
        shared = [part for style, words in samples for part in ((high, style), (f" {words} ", theme.SOFT))]
        held = f"{layout.group} blocks/cell  {low} few {high} all  shared "
        return [(held, theme.SOFT), *shared]
    states = f"{glyphs.reserved} reserved  {glyphs.free} free  {glyphs.cached} cached"
    if layout.zoom <= Zoom.SLOTS:
        return [(f"{glyphs.written} written  {states}  number: refs", theme.SOFT)]
    return [(f"{glyphs.full} full  {glyphs.partly} partly  {states}  2+ shared", theme.SOFT)]
