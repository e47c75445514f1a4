"""A real terminal: tmux starts the demo, a prompt is typed, and the captured screen is read as a person would."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvscope.transport.control import ControlServer
from kvscope.transport.endpoints import directory_endpoints
from kvscope.transport.publisher import Publisher

from .dashboard.dashboard_story import StoryEngine

pytestmark = [
    pytest.mark.terminal,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

PATIENCE_S = 120.0
PROMPT = "My lord, what say you n=2 max_tokens=60 temperature=0.8 seed=5"
COPIED = re.compile(r"(r1\.\d) .*copy-on-write P(\d+) -> P(\d+)")


class Tmux:
    """One tmux server with one window that runs a command."""

    def __init__(self, socket: Path, columns: int, rows: int, command: str, env: dict[str, str]) -> None:
        self._base = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        self._exit_file = socket.with_suffix(".exit")
        command = f"{command}; echo $? > {self._exit_file}"
        subprocess.run(
            [*self._base, "new-session", "-d", "-s", "s", "-x", str(columns), "-y", str(rows), command],
            check=True,
            env={**os.environ, **env, "TERM": "xterm-256color"},
        )
        self("set", "-g", "status", "off")
        self("set", "-g", "remain-on-exit", "on")
        self("resize-window", "-t", "s", "-x", str(columns), "-y", str(rows))

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run([*self._base, *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    def screen(self) -> str:
        return self("capture-pane", "-p", "-t", "s")

    def keys(self, *keys: str) -> None:
        self("send-keys", "-t", "s", *keys)

    def type(self, text: str) -> None:
        self("send-keys", "-t", "s", "-l", text)

    def wait_for(self, condition: Callable[[str], object], what: str) -> str:
        """The first screen that fulfils the condition."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(screen := self.screen()):
            assert time.monotonic() < deadline, f"never saw {what}; the screen is:\n{screen}"
            time.sleep(0.05)
        return screen

    def exit_code(self) -> int:
        """Wait for the command to end. Its shell writes the code down: tmux 3.3 does not always know it."""
        deadline = time.monotonic() + PATIENCE_S
        while not (self._exit_file.exists() and (code := self._exit_file.read_text().strip())):
            assert time.monotonic() < deadline, f"never ended; the screen is:\n{self.screen()}"
            time.sleep(0.05)
        return int(code)

    def close(self) -> None:
        subprocess.run([*self._base, "kill-server"], check=False, capture_output=True)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Tmux]]:
    opened: list[Tmux] = []

    def open_terminal(columns: int, rows: int, *arguments: str) -> Tmux:
        command = " ".join([sys.executable, "-m", "kvscope.dashboard.cli", *arguments])
        runtime = tmp_path / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        opened.append(Tmux(tmp_path / "t", columns, rows, command, {"XDG_RUNTIME_DIR": str(runtime)}))
        return opened[-1]

    yield open_terminal
    for tmux in opened:
        tmux.close()


def requests_on(screen: str) -> set[str]:
    return set(re.findall(r"\br\d+\.\d\b", screen))


@pytest.mark.parametrize(("columns", "rows"), [(120, 36), (80, 24), (160, 45)])
def test_a_typed_prompt_shares_blocks_and_copies_on_write(
    terminal: Callable[..., Tmux], columns: int, rows: int
) -> None:
    tmux = terminal(columns, rows, "demo", "--max-steps-per-second", "1.5")
    tmux.wait_for(lambda screen: "LIVE" in screen, "LIVE")
    tmux.keys("i")
    tmux.type(PROMPT)
    tmux.keys("Enter")
    # Two sequences, and a block that both tables point at.
    tmux.wait_for(lambda screen: {"r1.0", "r1.1"} <= requests_on(screen), "two sequences")
    tmux.keys("Escape")
    tmux.wait_for(lambda screen: "new line" not in screen, "the grid in focus")  # else Esc 3 would be Alt+3
    if (columns, rows) == (80, 24):
        tmux.keys("3")
    tmux.wait_for(lambda screen: re.search(r"P0 .*refs 2 +(= r1\.1|= r1\.0)", screen), "P0 with ref count 2")
    tmux.wait_for(lambda screen: "CoW 1" in screen, "a copy-on-write counted")  # its line: see the sitting below
    tmux.keys("q")
    assert tmux.exit_code() == 0


# What a model might say: the clipboard set by OSC 52, and the title by OSC 2; the first is cut in two by a step.
REPLIES = ("\x1b]52;c;", "ZXZpbA==\x07", "\x1b]2;evil\x07", "done")


def clipboard(tmux: Tmux) -> str:
    return tmux("list-buffers", "-F", "#{buffer_sample}").strip()


def title(tmux: Tmux) -> str:
    return tmux("display-message", "-p", "-t", "s", "#{pane_title}").strip()


def test_what_a_model_says_sets_neither_clipboard_nor_title(terminal: Callable[..., Tmux], tmp_path: Path) -> None:
    directory = tmp_path / "e"
    directory.mkdir(mode=0o700)
    endpoints = directory_endpoints(directory)
    engine = StoryEngine(8, 4)
    with contextlib.closing(Publisher(endpoints.events)) as publisher, contextlib.ExitStack() as stack:
        control = ControlServer(endpoints.control, publisher, Mock(), read_only=True)
        stack.callback(control.close)
        for batch in [*engine.start(), *engine.submit("x", max_tokens=20)]:
            publisher.publish(batch)
        tmux = terminal(160, 45, "attach", str(directory))
        tmux("set", "-g", "set-clipboard", "on")
        tmux.wait_for(lambda screen: "LIVE" in screen, "LIVE")
        before = title(tmux)
        for reply in REPLIES:
            for batch in engine.step({"r1.0": reply}):
                publisher.publish(batch)
        tmux.wait_for(lambda screen: "␛]52;c;ZXZpbA==␇␛]2;evil␇done" in screen, "the reply, printable")
        assert (clipboard(tmux), title(tmux)) == ("", before)
        tmux.keys("q")
        assert tmux.exit_code() == 0
    # The same, printed as it is, shows that this terminal obeys.
    tmux("respawn-pane", "-k", "-t", "s", f"printf '{''.join(REPLIES)}'; cat")
    tmux.wait_for(lambda screen: "done" in screen, "what was printed")
    assert (clipboard(tmux), title(tmux)) == ("evil", "evil")


def test_a_terminal_that_is_too_small_is_told_so_and_recovers(terminal: Callable[..., Tmux]) -> None:
    tmux = terminal(100, 30, "demo")
    tmux.wait_for(lambda screen: "LIVE" in screen, "LIVE")
    tmux("resize-window", "-t", "s", "-x", "50", "-y", "15")
    tmux.wait_for(lambda screen: "60x20" in screen and "50x15" in screen, "both sizes")
    tmux("resize-window", "-t", "s", "-x", "100", "-y", "30")
    tmux.wait_for(lambda screen: "LIVE" in screen, "LIVE again")
    tmux.keys("q")
    assert tmux.exit_code() == 0


def test_a_copy_on_write_is_followed_from_the_ticker_to_the_block_to_both_tables(
    terminal: Callable[..., Tmux],
) -> None:
    """One sitting: two prompts in one breath, a filter, the copy, its block and tables, help, a small screen, leave."""
    tmux = terminal(160, 45, "demo", "--max-steps-per-second", "20")
    tmux.wait_for(lambda screen: "LIVE" in screen, "LIVE")
    tmux.keys("i")
    tmux.wait_for(lambda screen: "esc back" in screen, "the prompt in focus")
    tmux.type(f"{PROMPT}\rO Romeo max_tokens=8\r")
    tmux.wait_for(lambda screen: {"r1.0", "r1.1", "r2.0"} <= requests_on(screen), "both requests")
    tmux.keys("Escape")
    tmux.wait_for(lambda screen: "esc back" not in screen, "the grid in focus")

    tmux.keys("5", "/")
    tmux.wait_for(lambda screen: "Filter the events" in screen, "the filter's line")
    tmux.type("copy-on-write")
    tmux.wait_for(lambda screen: re.search(r"5 Events +/copy-on-write: [1-9]", screen), "the copy alone")
    tmux.keys("Enter")
    tmux.wait_for(lambda screen: "Filter the events" not in screen, "the events in focus")
    tmux.keys("Up", "Enter")
    screen = tmux.wait_for(lambda screen: "HISTORY" in screen and COPIED.search(screen), "the moment of the copy")
    copier, source, target = COPIED.search(screen).groups()  # type: ignore[union-attr]
    other = {"r1.0": "r1.1", "r1.1": "r1.0"}[copier]
    copied = rf"→ P{target} .*refs 1 .*copied from P{source}"
    tmux.wait_for(lambda screen: re.search(rf"P{target}  ref count 1  held by {copier} ", screen), "the private block")
    tmux.wait_for(lambda screen: f"table of {copier}" in screen and re.search(copied, screen), "the copier's table")
    tmux.keys("2")
    tmux.keys("Down" if other == "r1.1" else "Up")
    kept = rf"→ P{source} .*refs 1 "
    tmux.wait_for(lambda screen: f"table of {other}" in screen and re.search(kept, screen), "the other's table")

    tmux.keys("L")
    tmux.wait_for(lambda screen: "● LIVE" in screen, "LIVE again")
    tmux.keys("Space")
    tmux.wait_for(lambda screen: "HISTORY" in screen, "the view frozen")
    tmux.keys("?")
    tmux.wait_for(lambda screen: "Everywhere" in screen, "the help")
    tmux.keys("Escape")
    tmux.wait_for(lambda screen: "Everywhere" not in screen, "the dashboard")
    tmux("resize-window", "-t", "s", "-x", "60", "-y", "20")
    tmux.wait_for(lambda screen: "1 Block pool" in screen and "╭─ 5 Events" not in screen, "one list at a time")
    tmux("resize-window", "-t", "s", "-x", "160", "-y", "45")
    tmux.wait_for(lambda screen: "1 Block pool" in screen and "╭─ 5 Events" in screen, "every pane again")
    tmux.keys("q")
    assert tmux.exit_code() == 0
