"""The styles that strips are drawn with, by what they mean. Their colours are those of the dark palette."""

from rich.style import Style

from kvscope.dashboard.owners import NUM_OWNER_COLOURS, SEVERAL
from kvscope.dashboard.palettes import DARK

_OWNER_COLOURS = [DARK[f"owner-{code}"] for code in range(1, NUM_OWNER_COLOURS + 1)]
PLAIN = Style()
TEXT = Style(color=DARK["foreground"])
STRONG = Style(color=DARK["strong"], bold=True)
SOFT = Style(color=DARK["soft"])
FAINT = Style(color=DARK["faint"])
BRAND = Style(color=DARK["brand"], bold=True)
GOOD = Style(color=DARK["good"], bold=True)
NOTICE = Style(color=DARK["notice"], bold=True)
BAD = Style(color=DARK["bad"], bold=True)
BOLD = Style(bold=True)
FRESH = Style(color=DARK["strong"], bold=True, underline=True)  # touched by the latest step
SHARED = Style(color=DARK["background"], bgcolor=DARK["strong"], bold=True)  # the ref count of a shared block
CURSOR = Style(color=DARK["background"], bgcolor=DARK["cursor"], bold=True)
TIME_PAST = Style(color=DARK["brand"])  # of a timeline: what has been played
TIME_AHEAD = Style(color=DARK["ahead"])
ROW = Style(bgcolor=DARK["row"])  # the selected row of a list
BANNER_CALM = Style(color=DARK["background"], bgcolor=DARK["notice"], bold=True)
BANNER_BAD = Style(color=DARK["on-bad"], bgcolor=DARK["alarm"], bold=True)
CHIP_GOOD = Style(color=DARK["background"], bgcolor=DARK["good"], bold=True)
CHIP_NOTICE = Style(color=DARK["background"], bgcolor=DARK["notice"], bold=True)
CHIP_QUIET = Style(color=DARK["foreground"], bgcolor=DARK["chip"], bold=True)

_OWNERS = (
    FAINT,
    *(Style(color=colour) for colour in _OWNER_COLOURS),
    STRONG,
)
_LIT = (FAINT, *(Style(color=colour, bold=True) for colour in _OWNER_COLOURS), STRONG)


# How many of a group's held blocks are shared: none, up to a third, up to two thirds, more.
TINTS = (SOFT, *(Style(color=DARK[f"share-{level}"]) for level in (1, 2, 3)))


def owner_style(code: int) -> Style:
    """The colour of a request; `code` is a frame's owner code, 0 for nobody."""
    return _OWNERS[code if code <= SEVERAL else 0]


def lit_style(code: int) -> Style:
    """The same, for blocks of the selected request."""
    return _LIT[code if code <= SEVERAL else 0]
