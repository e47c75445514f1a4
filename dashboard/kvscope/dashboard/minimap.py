"""A pool that does not fit its pane in two lines: all of it, and which part of it is on the screen. Pure.

map  ▆▆█▇▃···▂▅█████▇▆▂·····
            ━━━ P3072-P4095
"""

from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.cells import make_cells
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.grid_layout import GridLayout, Light, Zoom
from kvscope.dashboard.groups import Groups
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part, make_strip

LABEL = " map "
HEIGHT = 2


def map_layout(pool: PoolFrame, width: int) -> GridLayout:
    """The whole pool in one row of groups."""
    columns = max(width - len(LABEL) - 1, 1)
    group = max(-(-pool.num_blocks // columns), 1)
    return GridLayout(Zoom.GROUPS, -(-pool.num_blocks // group), 1, 1, len(LABEL), group, 1)


def blocks_in_view(pool: PoolFrame, layout: GridLayout, top: int, height: int) -> range:
    """The blocks of the grid's lines `top` to `top + height`."""
    first, end = top // layout.lines, -(-(top + height) // layout.lines)
    return range(first * layout.blocks_per_row, min(end * layout.blocks_per_row, pool.num_blocks))


def draw_map(
    pool: PoolFrame, in_view: range, light: Light, glyphs: Glyphs, width: int, *, memory: Groups | None = None
) -> list[Strip]:
    """The pool as at the far zoom, and under it the part in view, with its blocks named inside or beside the mark.

    `memory` is of the last map.
    """
    layout = map_layout(pool, width)
    cells = make_cells(pool, layout, range(1), light, glyphs, memory=memory)
    first, end = in_view.start // layout.group, max(-(-in_view.stop // layout.group), in_view.start // layout.group + 1)
    words = f" {pool.name(in_view.start)}-{pool.name(max(in_view.stop - 1, 0))} "
    mark, before, after = glyphs.window * (end - first), " " * first, ""
    if len(words) + 2 <= len(mark):
        half = (len(mark) - len(words)) // 2
        mark = mark[:half] + words + mark[half + len(words) :]
    elif end + len(words) <= layout.columns or len(words) > first:
        after = words
    else:
        before = words.rjust(first)
    ruler: list[Part] = [(" " * len(LABEL) + before, theme.SOFT), (mark, theme.BRAND), (after, theme.SOFT)]
    return [make_strip([(LABEL, theme.SOFT), *cells.parts(0)], width), make_strip(ruler, width)]
