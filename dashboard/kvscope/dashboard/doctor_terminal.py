"""What the doctor finds out about the terminal: by its variables, by asking it, and by asking tmux around it."""

import contextlib
import locale
import os
import re
import select
import shutil
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import NamedTuple

from kvscope.dashboard.doctor import Check, Section, fail, ok, warn
from kvscope.dashboard.opening import has_light_ground, num_colors
from kvscope.dashboard.palettes import LIGHT_THEME
from kvscope.dashboard.settings import load_settings, settings_path
from kvscope.dashboard.terminal import MIN_COLUMNS, MIN_ROWS, wants_ascii

ANSWER_TIMEOUT_S = 1.0
_QUESTIONS = "\x1b[?2026$p\x1b]11;?\x1b\\\x1b[c"  # synchronised output? background? and, answered by all, who are you?


class Answers(NamedTuple):
    """What the terminal said; None where it did not."""

    latency_ms: float
    synchronised: bool
    ground: tuple[int, int, int] | None  # 0..255


def check_term() -> Iterator[Check]:
    term = os.environ.get("TERM", "")
    fix = "set TERM to what your terminal is: export TERM=xterm-256color"
    if not sys.stdout.isatty():
        yield warn("terminal", "the output is not a terminal; what follows is about its variables", "run it in one")
    if term in ("", "dumb", "unknown"):
        yield fail("TERM", term or "not set", fix)
    elif os.environ.get("TMUX") and not term.startswith(("tmux", "screen")):
        yield warn("TERM", f"{term}, inside tmux", 'in tmux.conf: set -g default-terminal "tmux-256color"')
    else:
        yield ok("TERM", term)


def check_colours() -> Iterator[Check]:
    count = num_colors()
    if count == 1:
        yield ok("colours", "none: NO_COLOR is set" if "NO_COLOR" in os.environ else "none")
    elif count == 16:
        yield warn(
            "colours", "16, those of the terminal", "for more: export TERM=xterm-256color, or COLORTERM=truecolor"
        )
    else:
        yield ok("colours", "16 million" if count > 256 else "256 (16 million with COLORTERM=truecolor)")


def check_text() -> Iterator[Check]:
    encoding = sys.stdout.encoding or "unknown"
    names = (name for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name))
    where = next((f"{name}={os.environ[name]}" for name in names), f"no locale set, {locale.getpreferredencoding()}")
    if wants_ascii():
        yield warn("text", f"{encoding} ({where}): drawn with ASCII characters", "export LC_ALL=C.UTF-8")
    else:
        yield ok("text", f"{encoding} ({where})")


def check_size() -> Iterator[Check]:
    columns, rows = shutil.get_terminal_size()
    found = f"{columns}x{rows}"
    if columns < MIN_COLUMNS or rows < MIN_ROWS:
        yield fail("size", found, f"the dashboard needs at least {MIN_COLUMNS}x{MIN_ROWS}: enlarge, or a smaller font")
    elif columns < 80 or rows < 24:
        yield warn("size", found, "80x24 shows all of it, 108x30 every pane at once")
    else:
        yield ok("size", found)


def check_answers() -> Iterator[Check]:
    """What only the terminal itself knows."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    answers = ask_terminal()
    if answers is None:
        yield warn("answers", "the terminal does not say what it can", "nothing to do; it may flicker a little")
        return
    yield ok("answers", f"after {answers.latency_ms:.0f} ms")
    if answers.synchronised:
        yield ok("whole frames", "synchronised output is supported")
    else:
        yield warn(
            "whole frames", "no synchronised output: a frame may be seen half drawn", "tmux 3.4, or a newer terminal"
        )
    if answers.ground is not None:
        yield from _check_ground(answers.ground)


def _check_ground(ground: tuple[int, int, int]) -> Iterator[Check]:
    is_light = sum(ground) > 3 * 127
    found = f"{'light' if is_light else 'dark'} background"
    if is_light and load_settings().theme == "auto" and not has_light_ground():
        yield warn("ground", found, f'theme = "{LIGHT_THEME}" in {settings_path()}, or --theme {LIGHT_THEME}')
    else:
        yield ok("ground", found)


def ask_terminal() -> Answers | None:
    """Put the questions; None when not even the last is answered in time. The terminal's modes are restored."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        sys.stdout.write(_QUESTIONS)
        sys.stdout.flush()
        asked, text = time.monotonic(), ""
        while re.search(r"\x1b\[\?[\d;]*c", text) is None:
            left = asked + ANSWER_TIMEOUT_S - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                return None
            text += os.read(fd, 4096).decode("ascii", "replace")
        return read_answers(text, (time.monotonic() - asked) * 1000)
    finally:
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)


def read_answers(text: str, latency_ms: float) -> Answers:
    """Modes 1 and 2 of 2026: known, and set or not. Colours are 4 hexadecimal digits a channel, mostly."""
    found = re.search(r"\x1b\]11;rgb:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)", text)
    ground = None
    if found is not None:
        red, green, blue = (int(part, 16) * 255 // (16 ** len(part) - 1) for part in found.groups())
        ground = (red, green, blue)
    return Answers(latency_ms, re.search(r"\x1b\[\?2026;[12]\$y", text) is not None, ground)


def check_tmux() -> Iterator[Check]:
    if not os.environ.get("TMUX"):
        return
    version = _tmux("-V").removeprefix("tmux ")
    yield ok("tmux", version or "does not answer")
    wanted = {
        "set-clipboard": (("on",), "the copy key reaches the clipboard", "set -g set-clipboard on"),
        "focus-events": (("on",), "tmux tells when the window gets the focus", "set -g focus-events on"),
        "mouse": (("on",), "the mouse reaches the dashboard", "set -g mouse on"),
    }
    for option, (good, about, line) in wanted.items():
        value = _tmux("show", "-gv", option) or _tmux("show", "-sv", option)
        name = f"tmux {option}"
        yield (
            ok(name, f"{value}: {about}") if value in good else warn(name, value or "unknown", f"in tmux.conf: {line}")
        )
    escape_ms = _tmux("show", "-sv", "escape-time")
    if escape_ms.isdigit() and int(escape_ms) > 100:
        yield warn("tmux escape-time", f"{escape_ms} ms before Esc counts", "in tmux.conf: set -s escape-time 20")


def _tmux(*words: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["tmux", *words], capture_output=True, text=True, timeout=2, check=False)  # noqa: S603, S607
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def check_settings() -> Iterator[Check]:
    path, notices = settings_path(), load_settings().notices
    for notice in notices:
        yield warn("settings", notice, f"edit {path}")
    if not notices:
        yield ok("settings", f"{path}" + ("" if path.exists() else ": none; kvscope settings --init writes one"))


SECTIONS: tuple[Section, ...] = (
    check_term,
    check_colours,
    check_text,
    check_size,
    check_answers,
    check_tmux,
    check_settings,
)
