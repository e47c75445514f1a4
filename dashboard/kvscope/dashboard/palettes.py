"""Which colours there are, by the ground they are on: dark, light, the terminal's own sixteen, and none at all.

The strips are drawn in the colours of DARK; `Recolour` turns them into another palette's where they reach the screen.
A palette travels in the variables of a Textual theme, so that `App.theme` is the one place that says which is on.

Owner colours start from Okabe and Ito's set. They were then moved apart until the smallest distance between any two
(Oklab, x100) is at least 12 as people with protanopia, deuteranopia and tritanopia see them (Machado et al. 2009);
the set itself, lightened for a dark ground, falls to 3. `tests/dashboard/test_palettes.py` computes both.
"""

from collections.abc import Mapping
from functools import lru_cache

from rich.color import Color
from rich.style import Style
from textual.color import Color as Blend
from textual.theme import Theme

Palette = Mapping[str, str]

DARK: Palette = {
    "background": "#0d1117",
    "foreground": "#c9d1d9",
    "strong": "#f0f6fc",
    "soft": "#8b949e",
    "faint": "#69727d",
    "brand": "#56b4e9",
    "good": "#2fbf91",
    "notice": "#e69f00",
    "bad": "#f47067",
    "cursor": "#f0e442",
    "ahead": "#4a6378",
    "row": "#1c2430",
    "chip": "#30363d",
    "on-bad": "#ffffff",
    "alarm": "#a40e26",
    "owner-1": "#77e6ff",
    "owner-2": "#ffa323",
    "owner-3": "#02ab96",
    "owner-4": "#d08eff",
    "owner-5": "#d4ff64",
    "owner-6": "#ac6202",
    "owner-7": "#6a58ff",
    "share-1": "#596bd1",
    "share-2": "#e99834",
    "share-3": "#ffe24c",
}
LIGHT: Palette = {
    "background": "#ffffff",
    "foreground": "#24292f",
    "strong": "#000000",
    "soft": "#57606a",
    "faint": "#868e97",
    "brand": "#0062b3",
    "good": "#00704f",
    "notice": "#8f5200",
    "bad": "#b3121f",
    "cursor": "#7a4dff",
    "ahead": "#a9bccb",
    "row": "#dfeaf5",
    "chip": "#d8dee4",
    "on-bad": "#fffffe",
    "alarm": "#a40e26",
    "owner-1": "#3496f7",
    "owner-2": "#c08b1c",
    "owner-3": "#008671",
    "owner-4": "#ff34b9",
    "owner-5": "#533d64",
    "owner-6": "#ac0000",
    "owner-7": "#3621df",
    "share-1": "#3c8cf0",
    "share-2": "#a83e00",
    "share-3": "#1d0a5c",
}
# Names of the terminal's own colours, which its user has chosen for its ground. "default" on a background is reversed.
ANSI: Palette = {
    "background": "black",
    "foreground": "default",
    "strong": "default",
    "soft": "default",
    "faint": "bright_black",
    "brand": "cyan",
    "good": "green",
    "notice": "yellow",
    "bad": "red",
    "cursor": "yellow",
    "ahead": "bright_black",
    "row": "default",
    "chip": "default",
    "on-bad": "bright_white",
    "alarm": "red",
    "owner-1": "cyan",
    "owner-2": "yellow",
    "owner-3": "green",
    "owner-4": "magenta",
    "owner-5": "bright_yellow",
    "owner-6": "red",
    "owner-7": "bright_blue",
    "share-1": "blue",
    "share-2": "magenta",
    "share-3": "red",
}
DARK_THEME, LIGHT_THEME, ANSI_THEME = "kvscope", "kvscope-light", "kvscope-ansi"
_PREFIX = "cell-"
_NO_STYLE = Style()
# What colours say that nothing else does: what is faint, and how many blocks of a cell are shared.
_WITHOUT_COLOUR = {
    DARK["faint"]: Style(dim=True),
    DARK["share-1"]: Style(underline=True),
    DARK["share-2"]: Style(bold=True, underline=True),
    DARK["share-3"]: Style(bold=True, reverse=True),
}


def css_variables(palette: Palette) -> dict[str, str]:
    """A palette as variables of a Textual theme."""
    return {f"{_PREFIX}{name}": colour for name, colour in palette.items()}


def make_themes(own: Palette) -> list[Theme]:
    """Ours; `own` are the user's colours, on top of each. The terminal's own colours are not touched."""
    return [
        _make_theme(DARK_THEME, {**DARK, **own}, dark=True),
        _make_theme(LIGHT_THEME, {**LIGHT, **own}, dark=False),
        _make_ansi_theme(),
    ]


def _make_theme(name: str, palette: Palette, *, dark: bool) -> Theme:
    """Colours around the cells from the colours of the cells."""
    chrome = {
        "border": palette["chip"],
        "border-blurred": palette["chip"],
        "footer-background": palette["background"],
        "footer-key-foreground": palette["brand"],
        "footer-description-foreground": palette["soft"],
        "input-cursor-background": palette["brand"],
        "input-selection-background": f"{palette['brand']} 40%",
        "scrollbar": palette["chip"],
        "scrollbar-background": palette["background"],
        "scrollbar-corner-color": palette["background"],
    }
    return Theme(
        name=name,
        primary=palette["brand"],
        secondary=palette["soft"],
        accent=palette["notice"],
        warning=palette["notice"],
        error=palette["bad"],
        success=palette["good"],
        foreground=palette["foreground"],
        background=palette["background"],
        surface=palette["background"],
        panel=_panel(palette, dark=dark),
        dark=dark,
        variables=chrome | css_variables(palette),
    )


def _panel(palette: Palette, *, dark: bool) -> str:
    """A shade between ground and text, for the lines above and below the panes."""
    return Blend.parse(palette["background"]).blend(Blend.parse(palette["foreground"]), 0.05 if dark else 0.04).hex


def _make_ansi_theme() -> Theme:
    """The terminal's own colours and its own ground, light or dark."""
    own = "ansi_default"
    chrome = {
        "ansi-background": own,
        "ansi-foreground": own,
        "border": "ansi_bright_black",
        "border-blurred": "ansi_bright_black",
        "footer-background": own,
        "footer-key-foreground": "ansi_cyan",
        "footer-description-foreground": own,
        "block-cursor-foreground": "ansi_black",
        "block-cursor-background": "ansi_cyan",
        "input-cursor-background": "ansi_cyan",
        "input-cursor-foreground": "ansi_black",
        "input-selection-background": "ansi_yellow",
        "input-selection-foreground": "ansi_black",
        "screen-selection-background": "ansi_yellow",
        "screen-selection-foreground": "ansi_black",
        "scrollbar": "ansi_bright_black",
        "scrollbar-background": own,
        "scrollbar-corner-color": own,
    }
    return Theme(
        name=ANSI_THEME,
        ansi=True,
        primary="ansi_cyan",
        secondary=own,
        accent="ansi_yellow",
        warning="ansi_yellow",
        error="ansi_red",
        success="ansi_green",
        foreground=own,
        background=own,
        surface=own,
        panel=own,
        boost=own,
        variables=chrome | css_variables(ANSI),
    )


class Recolour:
    """Turns what was drawn in the colours of DARK into another palette's. Pure, and cached per style."""

    def __init__(self, variables: Mapping[str, str] = css_variables(DARK), *, no_color: bool = False) -> None:
        self._colours = {colour: variables.get(f"{_PREFIX}{name}", colour) for name, colour in DARK.items()}
        self._no_color = no_color
        self.identity = not no_color and all(here == there for here, there in self._colours.items())
        self.style = lru_cache(maxsize=1024)(self._style)

    def _style(self, style: Style) -> Style:
        colour, ground = _name(style.color), _name(style.bgcolor)
        is_marked = ground in self._colours and ground != DARK["background"]
        if self._no_color:
            said = _WITHOUT_COLOUR.get(colour or "", _NO_STYLE)
            return style.without_color + said + Style(reverse=is_marked or bool(said.reverse))
        mapped = self._colours.get(ground, ground) if ground is not None else None
        if is_marked and mapped == "default":
            return style.without_color + Style(reverse=True)
        return style + Style(color=self._colours.get(colour, colour) if colour is not None else None, bgcolor=mapped)


def _name(colour: Color | None) -> str | None:
    return None if colour is None else colour.name
