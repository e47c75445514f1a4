"""What a dashboard looks like and which keys it has, to one person: themes, cell colours, keymap, notices."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvscope.dashboard import palettes
from kvscope.dashboard.keys import KeyNames
from kvscope.dashboard.palettes import Recolour
from kvscope.dashboard.sparing import SparingApp


class Look(NamedTuple):
    """`palette` lies on top of the theme's colours, `prompts` remembers them, `notices` are told on opening."""

    theme: str = palettes.DARK_THEME
    palette: Mapping[str, str] = {}
    keymap: Mapping[str, str] = {}
    prompts: Path | None = None
    notices: tuple[str, ...] = ()
    color_system: str = "auto"  # as Rich calls them; auto: what the terminal says


class ThemedApp(SparingApp):
    """An app whose cells follow its theme."""

    def __init__(self, look: Look | None = None, *, no_color: bool = False) -> None:
        self.recolour = Recolour()
        self._look = look if look is not None else Look()
        # Without colours the terminal's own are the ones to leave alone: then none are sent, not even greys.
        super().__init__(ansi_color=True if no_color else None, color_system=self._look.color_system)
        for theme in palettes.make_themes(self._look.palette):
            self.register_theme(theme)
        wanted = palettes.ANSI_THEME if no_color else self._look.theme
        self.notices = list(self._look.notices)
        if wanted not in self.available_themes:
            self.notices.append(f"no theme is called {wanted!r}; the palette lists them under Theme")
            wanted = palettes.DARK_THEME
        self.theme = wanted
        self.set_keymap(dict(self._look.keymap))
        self.key_names = KeyNames(self._look.keymap)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Cell colours under a theme that brings none: ours for its ground."""
        theme = self.current_theme
        ours = palettes.ANSI if theme.ansi else palettes.DARK if theme.dark else palettes.LIGHT
        return palettes.css_variables({**ours, **self._look.palette})

    def get_css_variables(self) -> dict[str, str]:
        variables = super().get_css_variables()
        self.recolour = Recolour(variables, no_color=self.no_color)
        return variables
