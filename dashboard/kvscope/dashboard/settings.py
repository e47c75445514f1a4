"""The user's settings: one TOML file in the XDG configuration directory.

A mistake in it never stops the dashboard: what is wrong is left out, and named in a notice.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
from textual.theme import BUILTIN_THEMES

from kvscope.dashboard.keys import KEYS, Key, clashing_keys, typed_keys
from kvscope.dashboard.palettes import ANSI_THEME, DARK, DARK_THEME, LIGHT_THEME

_Check = Callable[[object], str | None]  # what is wrong with a value, or None
MAX_BYTES = 1 << 16
COLOR_SYSTEMS = {"auto": "auto", "16": "standard", "256": "256", "truecolor": "truecolor"}  # here, and in Rich


class Settings(NamedTuple):
    """What the file says, on top of the defaults. `notices` are its mistakes, one line each."""

    theme: str = "auto"
    colors: str = "auto"
    ascii: bool = False
    mouse: bool = True
    frames_per_second: int = 15
    remember_prompts: bool = True
    palette: Mapping[str, str] = {}
    keys: Mapping[str, str] = {}
    notices: tuple[str, ...] = ()


def settings_path() -> Path:
    return platformdirs.user_config_path("kvscope") / "settings.toml"


def load_settings(path: Path | None = None) -> Settings:
    """Read the file; none is as good as an empty one. Never raises."""
    path = path or settings_path()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        return Settings(notices=(f"{path.name}: {error.strerror}; the defaults are used",))
    if len(content) > MAX_BYTES:
        return Settings(notices=(f"{path.name}: longer than {MAX_BYTES:,} bytes; the defaults are used",))
    return parse_settings(content, path.name)


def parse_settings(content: bytes, name: str = "settings.toml") -> Settings:
    """What is right in `content`, and notices about the rest."""
    try:
        text = content.decode()
        table = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        return Settings(notices=(f"{name}, line {line}: not UTF-8; the defaults are used",))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        problem = str(error).replace("at end of document", f"at line {len(text.splitlines())}, its end")
        return Settings(notices=(f"{name}: {problem}; the defaults are used",))
    return _Reader(text, name).read(table)


class _Reader:
    """Takes a parsed table apart, key by key."""

    def __init__(self, text: str, name: str) -> None:
        self._lines, self._name = text.splitlines(), name
        self._notices: list[str] = []

    def read(self, table: Mapping[str, object]) -> Settings:
        values = self._good(table, "setting", {**_CHECKS, **dict.fromkeys(_SECTIONS, _is_section)})
        for section, (names, check) in _SECTIONS.items():
            entries = values.pop(section, {})
            good = self._good(entries, f"name in [{section}]", dict.fromkeys(names, check))
            values[section] = {name: str(value) for name, value in good.items()}
        values["keys"] = self._without_clashes(values["keys"])
        return Settings(**values, notices=tuple(self._notices))

    def _good(self, table: Mapping[str, object], what: str, checks: Mapping[str, _Check]) -> dict[str, Any]:
        good = {}
        for key, value in table.items():
            if key not in checks:
                near = difflib.get_close_matches(key, checks, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                self._complain(key, f"no {what} is called {key!r}{hint}")
            elif (problem := checks[key](value)) is not None:
                self._complain(key, f"{key} {problem}")
            else:
                good[key] = value
        return good

    def _without_clashes(self, keymap: Mapping[str, str]) -> dict[str, str]:
        kept = dict(keymap)
        for key, names in clashing_keys(kept):
            culprit = next((name for name in names if name in kept), None)
            if culprit is not None:
                self._complain(culprit, f"the key {key} is taken by {next(n for n in names if n != culprit)}")
                del kept[culprit]
        return kept

    def _complain(self, key: str, problem: str) -> None:
        pattern = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*[=.]""")
        number = next((index for index, line in enumerate(self._lines, 1) if pattern.match(line)), None)
        where = f", line {number}" if number is not None else ""
        self._notices.append(f"{self._name}{where}: {problem}")


def _is_flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "is true or false"


def _is_theme(value: object) -> str | None:
    ours = ("auto", DARK_THEME, LIGHT_THEME, ANSI_THEME)
    return None if value in (*ours, *BUILTIN_THEMES) else f"is one of {', '.join(ours)} and Textual's own"


def _is_color_system(value: object) -> str | None:
    return None if isinstance(value, str) and value in COLOR_SYSTEMS else f"is one of {', '.join(COLOR_SYSTEMS)}"


def _is_rate(value: object) -> str | None:
    fine = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 60
    return None if fine else "is a whole number from 1 to 60"


def _is_section(value: object) -> str | None:
    return None if isinstance(value, dict) else "is a section, with its name in brackets"


def _is_colour(value: object) -> str | None:
    fine = isinstance(value, str) and re.fullmatch(r"#[0-9a-fA-F]{6}", value)
    return None if fine else "is a colour such as #56b4e9"


def _is_keys(value: object) -> str | None:
    key = r"(?:(?:ctrl|alt|shift)\+)*(?:[a-z0-9_]{2,24}|[!-+\--~])"  # a name, or one character that is not a comma
    fine = isinstance(value, str) and re.fullmatch(rf"{key}(?:,{key})*", value)
    return None if fine else "is a key, or several with commas, such as ctrl+f,f9"


_CHECKS: dict[str, _Check] = {
    "theme": _is_theme,
    "colors": _is_color_system,
    "ascii": _is_flag,
    "mouse": _is_flag,
    "frames_per_second": _is_rate,
    "remember_prompts": _is_flag,
}
_SECTIONS: dict[str, tuple[Collection[str], _Check]] = {
    "palette": (DARK, _is_colour),
    "keys": ([key.name for key in KEYS], _is_keys),
}


def example_lines(path: Path) -> list[str]:
    """A settings file in which every line is a comment; each may be uncommented as it is."""
    return [
        f"# Settings of the dashboard. Save as {path}",
        "# A mistake is named when a dashboard opens; the rest of the file still counts.",
        "",
        '# theme = "auto"            # auto, kvscope (dark), kvscope-light, kvscope-ansi (the terminal\'s own',
        "#                           # sixteen colours), or any other that the palette lists under Theme",
        '# colors = "auto"           # auto, 16, 256 or truecolor; NO_COLOR in the environment switches them off',
        "# ascii = false             # draw with ASCII characters only",
        "# mouse = true              # false leaves the mouse to the terminal",
        "# frames_per_second = 15    # at most; over SSH never more than 12",
        "# remember_prompts = true   # keep prompts for the next time, readable by you only",
        "",
        "# [palette]                 # colours of your own, on top of the theme's",
        *(f'# {name} = "{colour}"' for name, colour in DARK.items()),
        "",
        "# [keys]                    # keys of your own, by action; several with commas",
        *(f"# {_assign(key):<30} # {key.about}" for key in KEYS),
    ]


def _assign(key: Key) -> str:
    return f'{key.name} = "{typed_keys(key.keys)}"'
