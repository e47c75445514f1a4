"""Which of three arrangements fits the terminal. Pure."""

from enum import Enum

from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.strips import make_strip
from kvscope.dashboard.terminal import MIN_COLUMNS, MIN_ROWS

FULL_WIDTH, FULL_HEIGHT = 108, 30
MEDIUM_HEIGHT, TALL_HEIGHT = 30, 42  # from here on a narrow screen shows the events, and the other lists, for good


class Arrangement(Enum):
    """SMALL: nothing fits, say so. COMPACT: the grid above one pane at a time. FULL: every pane at once."""

    SMALL = "-small"
    COMPACT = "-compact"
    FULL = "-full"


def arrange(width: int, height: int) -> Arrangement:
    if width < MIN_COLUMNS or height < MIN_ROWS:
        return Arrangement.SMALL
    if width < FULL_WIDTH or height < FULL_HEIGHT:
        return Arrangement.COMPACT
    return Arrangement.FULL


def is_medium(height: int) -> bool:
    return height >= MEDIUM_HEIGHT


def is_tall(height: int) -> bool:
    return height >= TALL_HEIGHT


def draw_too_small(width: int, height: int) -> list[Strip]:
    """The message that takes the place of the panes, in the middle of what little there is."""
    lines = ["terminal too small", f"{width}x{height}, needs at least {MIN_COLUMNS}x{MIN_ROWS}"]
    if width >= 50:
        lines = [f"terminal too small: {width}x{height}, needs at least {MIN_COLUMNS}x{MIN_ROWS}"]
    above = [make_strip([], width)] * max((height - len(lines)) // 2, 0)
    return [*above, *(make_strip([(line.center(width), theme.NOTICE)], width) for line in lines)]
