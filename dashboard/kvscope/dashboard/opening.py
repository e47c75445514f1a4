"""Opening the dashboard: flags over the settings file over what the terminal says about itself."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvscope.dashboard.palettes import ANSI_THEME, DARK_THEME, LIGHT_THEME
from kvscope.dashboard.prompt_history import history_path
from kvscope.dashboard.settings import COLOR_SYSTEMS, Settings, load_settings
from kvscope.dashboard.terminal import run_screen, wants_ascii
from kvscope.transport.source import Source

if TYPE_CHECKING:
    from kvscope.dashboard.themed import Look

FPS_OVER_SSH = 12  # every frame is bytes on somebody's line


class ScreenFlags(NamedTuple):
    """What the command line says about the screen; None leaves it to the settings."""

    ascii_only: bool = False
    theme: str | None = None
    colors: str | None = None
    no_mouse: bool = False


def open_dashboard(
    source: Source,
    title: str,
    flags: ScreenFlags,
    *,
    scripted_prompts: Sequence[str] = (),
    lesson: bool = False,
) -> int:
    """Draw until the user leaves; the exit code."""
    settings = load_settings()
    color_system = COLOR_SYSTEMS[flags.colors or settings.colors]
    if color_system != "auto":
        os.environ["TEXTUAL_COLOR_SYSTEM"] = color_system  # what Textual's widgets go by
    from kvscope.dashboard.app import DashboardApp
    from kvscope.dashboard.themed import Look

    kind = DashboardApp
    if lesson:
        from kvscope.dashboard.lesson import LessonApp

        kind = LessonApp
    app = kind(
        source,
        title=title,
        ascii_only=flags.ascii_only or settings.ascii or wants_ascii(),
        look=Look(
            theme=choose_theme(flags.theme, settings),
            palette=settings.palette,
            keymap=settings.keys,
            prompts=history_path() if settings.remember_prompts else None,
            notices=settings.notices,
            color_system=color_system,
        ),
        scripted_prompts=scripted_prompts,
        fps=frames_per_second(settings),
    )
    if is_over_ssh():
        app.max_frames_per_second = FPS_OVER_SSH
    return run_screen(app, mouse=settings.mouse and not flags.no_mouse)


def dashboard_look() -> "Look":
    """The user's own, for a picture that no terminal is asked about; nothing is told and nothing remembered."""
    from kvscope.dashboard.themed import Look

    settings = load_settings()
    return Look(theme=DARK_THEME if settings.theme == "auto" else settings.theme, palette=settings.palette)


def frames_per_second(settings: Settings) -> int:
    return min(settings.frames_per_second, FPS_OVER_SSH) if is_over_ssh() else settings.frames_per_second


def is_over_ssh() -> bool:
    return "SSH_CONNECTION" in os.environ or "SSH_TTY" in os.environ


def choose_theme(wanted: str | None, settings: Settings) -> str:
    """The one asked for; else by what the terminal can do, and by its ground where it tells."""
    name = wanted or settings.theme
    if name != "auto":
        return name
    if num_colors() <= 16:
        return ANSI_THEME
    return LIGHT_THEME if has_light_ground() else DARK_THEME


def num_colors() -> int:
    """How many colours the terminal says it has: 1 (NO_COLOR, or none), 16, 256, or 16777216."""
    from rich.console import Console

    if "NO_COLOR" in os.environ:
        return 1
    forced = os.environ.get("TEXTUAL_COLOR_SYSTEM", "auto")
    system = forced if forced != "auto" else Console(force_terminal=True).color_system
    return {"standard": 16, "256": 256, "truecolor": 1 << 24}.get(system or "", 1)


def has_light_ground() -> bool:
    """Whether COLORFGBG, where a terminal sets it, names a light background: `0;15` is black on white."""
    ground = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return ground in ("7", "15")
