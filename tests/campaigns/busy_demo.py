#!/usr/bin/env python3
"""Somebody types prompts into a dashboard for hours: memory of both processes by the minute, and every exception.

    python tests/campaigns/busy_demo.py [--minutes 120] [--steps-per-second 20] [--seed N]

`kvscope serve` with the blocks of `kvscope demo`, and `kvscope attach` in a pseudo-terminal of 120x36. A prompt is
typed every second or so, with options that make it share, copy, wait and end early; now and then another pane is
opened. The first half hour, until the dashboard's memory of the past is full, is warm-up; growth is the slope of what
follows. Exit code 1: an exception in either process's output, one that ended by itself or not with 0, or, in a run of
an hour and more, growth of more than 1 MiB an hour.
"""

import argparse
import fcntl
import os
import pty
import random
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

from lab import TETHER, clean_up_when_ended, resident_bytes, wait_until

from kvscope.dashboard.demo import SERVE_ARGUMENTS
from kvscope.transport.timetravel.history import MAX_NS

START_S = 180.0
NUM_COLUMNS, NUM_ROWS = 120, 36
MAX_GROWTH_MIB_PER_HOUR = 1.0
JUDGED_MINUTES = 60
WARM_UP_MINUTES = MAX_NS // 60_000_000_000 + 2  # until the dashboard's memory of the past is full
TAIL_BYTES = 1 << 16
WORDS = ("O Romeo", "my lord", "what say you", "now is the winter", "good night", "sweet prince", "to be", "or not")
F2_TO_F7 = ("\x1bOQ", "\x1bOR", "\x1bOS", "\x1b[15~", "\x1b[17~", "\x1b[18~")
QUIT = "\x11"  # Ctrl-Q
FAILURE = re.compile(r"Traceback|Exception|Error:|invariant \d")  # Insight says "no invariant broken"


class Command:
    """One kvscope command; `said` is the last of what it wrote."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", NUM_ROWS, NUM_COLUMNS, 0, 0))
        env = os.environ | {name: str(home) for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME")}
        self.process = subprocess.Popen(
            [*TETHER, sys.executable, "-m", "kvscope.dashboard.cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(slave)
        self.num_bytes, self.said, self.failures = 0, "", 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while chunk := self._read_chunk():
            self.num_bytes += len(chunk)
            text = chunk.decode("utf-8", "replace")
            self.failures += len(FAILURE.findall(self.said[-20:] + text)) - len(FAILURE.findall(self.said[-20:]))
            self.said = (self.said + text)[-TAIL_BYTES:]

    def _read_chunk(self) -> bytes:
        try:
            return os.read(self._master, TAIL_BYTES)
        except OSError:  # the other end is closed
            return b""

    def keys(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait(self) -> int:
        """The exit code, once everything it said is read."""
        code = self.process.wait(60)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def type_something(screen: Command, chances: random.Random) -> None:
    """A prompt as somebody would type it, and at times a look at another pane."""
    words = chances.choices(WORDS, k=chances.randint(1, 8))
    options = f"n={chances.choice((1, 1, 2, 4))} max_tokens={chances.randint(4, 64)} seed={chances.randrange(1000)}"
    screen.keys(f"{' '.join(words)} {options}\r")
    if chances.random() < 0.2:
        screen.keys(chances.choice(F2_TO_F7))
        time.sleep(1)
        screen.keys("i")


def watch(engine: Command, screen: Command, args: argparse.Namespace) -> list[list[float]]:
    """Type for so many minutes; for each the median resident MiB of both, kB/s to the terminal, and prompts."""
    chances = random.Random(args.seed)
    minutes: list[list[float]] = []
    screen.keys("i")
    time.sleep(1)
    for minute in range(1, args.minutes + 1):
        sizes: list[tuple[int, int]] = []
        started, num_bytes, prompts = time.monotonic(), screen.num_bytes, 0
        while time.monotonic() < started + 60:
            type_something(screen, chances)
            prompts += 1
            sizes.append((resident_bytes(engine.process.pid), resident_bytes(screen.process.pid)))
            time.sleep(chances.uniform(0.5, 1.5))
        both = [statistics.median(one) / 2**20 for one in zip(*sizes, strict=True)]
        minutes.append([*both, (screen.num_bytes - num_bytes) / 60e3, prompts])
        print(f"{minute:>6}{both[0]:>12.1f}{both[1]:>15.1f}{minutes[-1][2]:>10.1f}{prompts:>9}", flush=True)
    return minutes


def growth(values: list[float]) -> float:
    """MiB an hour after the warm-up; zero where there is nothing to compare."""
    after = values[min(len(values) // 2, WARM_UP_MINUTES) :]
    return statistics.linear_regression(range(len(after)), after).slope * 60 if len(after) > 1 else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=120)
    parser.add_argument("--steps-per-second", type=float, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    args = parser.parse_args()
    clean_up_when_ended()
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        home = Path(name)
        steps = ("--max-steps-per-second", str(args.steps_per_second))
        commands = [Command(home, "serve", *SERVE_ARGUMENTS, "--name", "busy", *steps)]
        try:
            wait_until(lambda: "engine busy ready" in commands[0].said, "an engine", START_S)
            commands.append(Command(home, "attach", "busy"))
            wait_until(lambda: "LIVE" in commands[1].said, "a dashboard", START_S)
            print(f"{'minute':>6}{'engine MiB':>12}{'dashboard MiB':>15}{'kB/s out':>10}{'prompts':>9}", flush=True)
            minutes = watch(commands[0], commands[1], args)
            commands[1].keys(QUIT)
            codes = [commands[1].wait()]
            commands[0].process.send_signal(signal.SIGTERM)
            codes.append(commands[0].wait())
        finally:
            for command in commands:
                command.kill()
    grown = [growth([row[column] for row in minutes]) for column in (0, 1)]
    failures = sum(command.failures for command in commands)
    print(f"growth after warm-up: engine {grown[0]:+.1f}, dashboard {grown[1]:+.1f} MiB/h; ", end="")
    print(f"{failures} exceptions; exit codes {codes[0]} and {codes[1]}; seed {args.seed}")
    is_flat = args.minutes < JUDGED_MINUTES or max(grown) <= MAX_GROWTH_MIB_PER_HOUR
    return 0 if is_flat and not failures and codes == [0, 0] else 1


if __name__ == "__main__":
    sys.exit(main())
