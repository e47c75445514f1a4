#!/usr/bin/env python3
"""What the dashboard writes to its terminal, and whether a slow line slows anything but the screen; prints one table.

    python benchmarks/terminal_bytes.py [--seconds 10] [--cases decode million ...] [--textual]

Every case is the real dashboard in a process of its own, on a pseudo-terminal that is read as fast as its line allows.
A frame is what lies between the marks of a synchronised update. Letters that occur nowhere else are typed into the
prompt: echo is the time until one of them is read back. Stall is the longest that a 5 ms timer of the event loop came
late, write the longest that handing over a text to be written kept the loop; loop is its CPU time per frame; busy is
the share of one core that the process had, events included. `--textual` runs each case once more with Textual's own
output. On a busy machine only kB/s, loop and the ratios to Textual's output mean anything.

    decode    8 sequences of a real engine without a model, 1,024 blocks, 30 steps/s, at 12 frames/s
    million   1,000,000 blocks, 400 requests, 20,000 blocks allocated, written or released a second, scattered
    ..., ssh  the same behind a line that takes megabytes at once and delivers them at its rate; 12 frames/s
    storm     8,000 blocks, a tenth of them changing hands 50 times a second: every line changes in every frame
"""

import argparse
import fcntl
import json
import os
import pty
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import ClassVar, NamedTuple

HERE = Path(__file__).resolve().parent
WARM_UP_S = 4.0
START_S = 60.0
LETTERS = "".join(map(chr, range(0x10D0, 0x10F1)))  # Georgian: one cell each, and on no screen of ours
FRAME, ASKS_FOR_SYNC, HAS_SYNC = b"\x1b[?2026h", b"\x1b[?2026$p", b"\x1b[?2026;2$y"
QUIT = b"\x11"


class Case(NamedTuple):
    """`link` is bytes/s, `is_ssh` whether it holds what it has not delivered; goals are None where there is none."""

    name: str
    feed: str
    columns: int
    rows: int
    fps: int
    link: float | None = None
    is_ssh: bool = False
    max_kb_per_s: float | None = None
    min_frames_per_s: float | None = None
    max_stall_ms: float | None = None


CASES = [
    Case("decode", "decode", 80, 24, 12, max_kb_per_s=20),
    Case("million", "million", 200, 50, 30, max_kb_per_s=400),
    Case("million, 250 kB/s", "million", 200, 50, 30, 250e3, min_frames_per_s=10, max_stall_ms=50),
    Case("storm", "storm", 200, 50, 30),
    Case("storm, 250 kB/s", "storm", 200, 50, 30, 250e3, min_frames_per_s=10, max_stall_ms=50),
    Case("storm, ssh 250 kB/s", "storm", 200, 50, 12, 250e3, is_ssh=True, max_stall_ms=50),
    Case("storm, ssh 50 kB/s", "storm", 200, 50, 12, 50e3, is_ssh=True, max_stall_ms=50),
]


class Line:
    """The reader's end of a pseudo-terminal, which lets `rate` bytes a second through.

    One that `holds` reads at once and delivers later, as the daemons and sockets of ssh do; another one reads late.
    """

    def __init__(self, master: int, rate: float | None, *, holds: bool) -> None:
        self._master, self._rate, self._holds = master, rate, holds
        self._held, self._tail, self.words = b"", b"", b""
        self._credit, self._topped_up = 0.0, time.monotonic()
        self.num_bytes = self.num_frames = 0
        self.seen: dict[str, float] = {}  # when a letter came back

    def read(self, seconds: float) -> None:
        """Read for that long."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            room = 1 << 16 if self._rate is None else self._earn(now)
            if self._holds:
                self._held += self._read_chunk(1 << 16, 0.002)
                chunk, self._held = self._held[:room], self._held[room:]
                self._take(chunk)
            elif room < 1024:
                time.sleep(0.002)
            else:
                self._take(self._read_chunk(room, min(end - now, 0.05)))

    def _earn(self, now: float) -> int:
        """What may be read now; a line that was idle has saved up 10 ms."""
        assert self._rate is not None
        self._credit = min(self._credit + (now - self._topped_up) * self._rate, self._rate / 100)
        self._topped_up = now
        return int(self._credit)

    def _read_chunk(self, room: int, patience_s: float) -> bytes:
        if not select.select([self._master], [], [], patience_s)[0]:
            return b""
        try:
            return os.read(self._master, room)
        except OSError:  # the other end has left
            time.sleep(0.01)
            return b""

    def _take(self, chunk: bytes) -> None:
        self._credit -= len(chunk)
        self.num_bytes += len(chunk)
        self.words = (self.words + chunk)[-2000:]
        joined = self._tail + chunk
        os.write(self._master, HAS_SYNC * joined.count(ASKS_FOR_SYNC))
        self.num_frames += joined.count(FRAME)
        for letter in LETTERS:
            if letter not in self.seen and letter.encode() in joined:
                self.seen[letter] = time.monotonic()
        # What has been counted is not looked at again; marks begin alike, and the question is the longer one.
        self._tail = b"" if joined.endswith((FRAME, ASKS_FOR_SYNC)) else joined[-8:]


def measure(case: Case, seconds: float, *, textual: bool = False) -> dict[str, float]:
    """Run one case; what was seen, by column of the table."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", case.rows, case.columns, 0, 0))
    with tempfile.TemporaryDirectory(prefix="kvb") as directory:
        report = Path(directory) / "report"
        env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "XDG_CONFIG_HOME": directory}
        if textual:
            env["TERMINAL_BYTES_PEER"] = "textual"
        if case.is_ssh:
            env["SSH_CONNECTION"] = "10.0.0.1 1 10.0.0.2 22"
        command = [sys.executable, __file__, "--child", case.feed, "--fps", str(case.fps), "--report", str(report)]
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
        os.close(slave)
        line = Line(master, case.link, holds=case.is_ssh)
        try:
            deadline = time.monotonic() + START_S
            while not report.exists():
                line.read(0.1)
                if time.monotonic() > deadline or process.poll() is not None:
                    raise TimeoutError(f"{case.name}: no screen; the last words: {line.words!r}")
            os.write(master, b"i")
            line.read(WARM_UP_S)
            process.send_signal(signal.SIGUSR1)  # from here on
            line.num_bytes = line.num_frames = 0
            started, typed = time.monotonic(), {}
            pause_s = seconds / (len(LETTERS) + 1)
            for letter in LETTERS:
                line.read(pause_s)
                typed[letter] = time.monotonic()
                os.write(master, letter.encode())
            line.read(pause_s)
            elapsed_s, num_bytes, num_frames = time.monotonic() - started, line.num_bytes, line.num_frames
            process.send_signal(signal.SIGUSR1)  # up to here
            line.read(1.0)
            os.write(master, QUIT)
            while process.poll() is None:
                line.read(0.05)
            inside = json.loads(report.read_text())
        finally:
            process.kill()
            process.wait()
            os.close(master)
    echoes = sorted(line.seen[letter] - at if letter in line.seen else float("inf") for letter, at in typed.items())
    return {
        "kB/s": num_bytes / elapsed_s / 1e3,
        "frames/s": num_frames / elapsed_s,
        "echo p95 ms": 1e3 * echoes[int(0.95 * (len(echoes) - 1))],
        **inside,
        "loop ms": inside["loop ms"] / max(num_frames, 1),
    }


def verdict(case: Case, seen: dict[str, float]) -> str:
    checks = [
        ("kB/s", case.max_kb_per_s, "<="),
        ("frames/s", case.min_frames_per_s, ">="),
        ("stall ms", case.max_stall_ms, "<="),
    ]
    words = []
    for name, goal, sign in checks:
        if goal is not None:
            is_met = seen[name] <= goal if sign == "<=" else seen[name] >= goal
            words.append(f"{'ok' if is_met else 'NOT'} {name} {sign} {goal:g}")
    return ", ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--cases", nargs="*", help="beginnings of their names; all unless given")
    parser.add_argument("--textual", action="store_true", help="each case also with Textual's own output")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--fps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return show(args.child, args.fps, args.report)
    columns = ("kB/s", "frames/s", "stall ms", "write ms", "echo p95 ms", "loop ms", "busy %")
    print(f"{'':<21}{'screen':>8}{'fps':>5}" + "".join(f"{name:>12}" for name in columns))
    failed = False
    for case in CASES:
        if args.cases and not case.name.startswith(tuple(args.cases)):
            continue
        for textual in (False, True) if args.textual else (False,):
            seen = measure(case, args.seconds, textual=textual)
            words = "" if textual else verdict(case, seen)
            failed |= "NOT" in words
            size = f"{case.columns}x{case.rows}"
            row = "".join(f"{seen[name]:>12,.1f}" for name in columns)
            label = "  as Textual sends it" if textual else case.name
            print(f"{label:<21}{size:>8}{case.fps:>5}{row}  {words}", flush=True)
    return int(failed)


# --- the process that is measured -------------------------------------------------------------------------------------


def show(feed: str, fps: int, report: Path) -> int:
    """The dashboard on a synthetic source. SIGUSR1 begins the measurement, and ends it."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "campaigns")]
    import asyncio

    from terminal_feeds import FEEDS
    from textual.driver import Driver
    from textual.drivers.linux_driver import LinuxDriver

    from kvscope.dashboard.app import DashboardApp
    from kvscope.dashboard.opening import FPS_OVER_SSH, is_over_ssh
    from kvscope.dashboard.terminal import run_screen

    def cpu_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    class Watched(DashboardApp):
        """Notes how late a timer of its event loop comes."""

        CSS_PATH = Path(sys.modules[DashboardApp.__module__].__file__ or "").with_name("dashboard.tcss")
        marks: ClassVar[list[tuple[float, float, float]]] = []
        longest_s = longest_write_s = 0.0

        def get_driver_class(self) -> type[Driver]:
            usual = LinuxDriver if os.environ.get("TERMINAL_BYTES_PEER") else super().get_driver_class()

            class Timed(usual):  # type: ignore[misc, valid-type]
                """Notes how long a text is held before the event loop goes on."""

                def write(driver, data: str) -> None:  # noqa: N805
                    begun = time.monotonic()
                    super().write(data)
                    if len(self.marks) == 1:
                        self.longest_write_s = max(self.longest_write_s, time.monotonic() - begun)

            return Timed

        def on_mount(self) -> None:
            signal.signal(signal.SIGUSR1, lambda *_: self.marks.append((time.monotonic(), cpu_s(), time.thread_time())))
            self.run_worker(self._watch())
            report.touch()

        async def _watch(self) -> None:
            while True:
                due = time.monotonic() + 0.005
                await asyncio.sleep(0.005)
                if len(self.marks) == 1 and due > self.marks[0][0]:
                    self.longest_s = max(self.longest_s, time.monotonic() - due)

    app = Watched(FEEDS[feed](), title=feed, fps=fps)
    if is_over_ssh():
        app.max_frames_per_second = FPS_OVER_SSH
    code = run_screen(app)
    (begun, cpu_begun, loop_begun), (ended, cpu_ended, loop_ended) = app.marks
    seen = {
        "stall ms": 1e3 * app.longest_s,
        "write ms": 1e3 * app.longest_write_s,
        "busy %": 100 * (cpu_ended - cpu_begun) / (ended - begun),
        "loop ms": 1e3 * (loop_ended - loop_begun),
    }
    report.write_text(json.dumps(seen))
    return code


if __name__ == "__main__":
    sys.exit(main())
