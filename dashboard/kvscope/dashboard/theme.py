"""Colours, in one place: the Textual theme, and the styles that strips are drawn with.

Owner colours are Okabe and Ito's set (distinguishable with every common form of colour blindness), with its darkest
blue lightened for dark backgrounds.
"""

from rich.style import Style
from textual.theme import Theme

from kvscope.dashboard.owners import SEVERAL

BACKGROUND = "#0d1117"
FOREGROUND = "#c9d1d9"
OWNER_COLOURS = ("#56b4e9", "#e69f00", "#2fbf91", "#cc79a7", "#f0e442", "#e8743b", "#8c9eff")

THEME = Theme(
    name="kvscope",
    primary="#56b4e9",
    secondary="#8b949e",
    accent="#e69f00",
    warning="#e69f00",
    error="#f47067",
    success="#2fbf91",
    foreground=FOREGROUND,
    background=BACKGROUND,
    surface="#0d1117",
    panel="#161b22",
    dark=True,
    variables={
        "border": "#30363d",
        "border-blurred": "#30363d",
        "footer-background": "#0d1117",
        "footer-key-foreground": "#56b4e9",
        "footer-description-foreground": "#8b949e",
        "input-cursor-background": "#56b4e9",
        "scrollbar": "#30363d",
        "scrollbar-background": "#0d1117",
        "scrollbar-corner-color": "#0d1117",
    },
)

PLAIN = Style()
TEXT = Style(color=FOREGROUND)
STRONG = Style(color="#f0f6fc", bold=True)
SOFT = Style(color="#8b949e")
FAINT = Style(color="#545d68")
BRAND = Style(color="#56b4e9", bold=True)
GOOD = Style(color="#2fbf91", bold=True)
NOTICE = Style(color="#e69f00", bold=True)
BAD = Style(color="#f47067", bold=True)
BOLD = Style(bold=True)
FRESH = Style(color="#f0f6fc", bold=True, underline=True)  # touched by the latest step
SHARED = Style(color="#0d1117", bgcolor="#f0f6fc", bold=True)  # the ref count of a shared block
CURSOR = Style(color="#0d1117", bgcolor="#f0e442", bold=True)
TIME_PAST = Style(color="#56b4e9")  # of a timeline: what has been played
TIME_AHEAD = Style(color="#4a6378")
ROW = Style(bgcolor="#1c2430")  # the selected row of a list
BANNER_CALM = Style(color="#0d1117", bgcolor="#e69f00", bold=True)
BANNER_BAD = Style(color="#ffffff", bgcolor="#a40e26", bold=True)
CHIP_GOOD = Style(color="#0d1117", bgcolor="#2fbf91", bold=True)
CHIP_NOTICE = Style(color="#0d1117", bgcolor="#e69f00", bold=True)
CHIP_BAD = Style(color="#ffffff", bgcolor="#a40e26", bold=True)
CHIP_QUIET = Style(color="#c9d1d9", bgcolor="#30363d", bold=True)

_OWNERS = (
    FAINT,
    *(Style(color=colour) for colour in OWNER_COLOURS),
    STRONG,
)
_LIT = (FAINT, *(Style(color=colour, bold=True) for colour in OWNER_COLOURS), STRONG)


def owner_style(code: int) -> Style:
    """The colour of a request; `code` is a frame's owner code, 0 for nobody."""
    return _OWNERS[code if code <= SEVERAL else 0]


def lit_style(code: int) -> Style:
    """The same, for blocks of the selected request."""
    return _LIT[code if code <= SEVERAL else 0]
