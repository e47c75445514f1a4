"""How fast the dashboard draws a pool of a million blocks; prints one table, each goal beside its figure.

    python benchmarks/dashboard.py [--seconds 10] [--frames 120]

Every dashboard runs in a pseudo-terminal of 200x50 that this process empties. Times of frames are CPU time of the
whole process between two frames, the folding of events left out, at 30 a second: every third one brings words, which
shows in the mean. Shares of a core are of the process with everything in it: sockets, decoding, folding, drawing. An
engine's stream comes from a process of its own over ipc sockets. The peers are Textual's DataTable and the import of
Textual, in the same run.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pty
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT, FPS = 200, 50, 30
HERE = Path(__file__).resolve().parent
KEYS = "абвгдежзийклмнопрстуфхцчшщъыьэюя"  # no event and no model of this run says any of them


class Figure(NamedTuple):
    """A line of the table; the goal is a limit from above unless it says `at least`."""

    what: str
    value: float
    unit: str
    goal: float
    at_least: bool = False
    note: str = ""
    is_void: bool = False  # the machine had too little time for the process: the figure says nothing

    def line(self) -> str:
        met = self.value >= self.goal if self.at_least else self.value <= self.goal
        goal = f"{'>=' if self.at_least else '<='} {self.goal:g} {self.unit}"
        verdict = "void" if self.is_void else "met" if met else "MISSED"
        return f"{self.what:<52}{goal:>12}{self.value:>10.2f} {self.unit:<3} {verdict:<7} {self.note}"


class Terminal:
    """A program in a pseudo-terminal that is emptied as fast as it fills."""

    def __init__(self, command: Sequence[str]) -> None:
        self.started = time.monotonic()
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
            os.environ.pop("NO_COLOR", None)
            os.execvp(command[0], command)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        self.num_bytes, self._seen, self._waiting = 0, b"", threading.Event()
        self._wanted, self.arrived_at = b"", 0.0
        self.ended = threading.Event()
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        tail = b""  # enough to see why a program ended
        with contextlib.suppress(OSError):
            while data := os.read(self._fd, 1 << 20):
                if b"\x1b[?2026$p" in data:
                    os.write(self._fd, b"\x1b[?2026;2$y")
                self.num_bytes += len(data)
                if self._wanted and self._wanted in tail[-64:] + data:
                    self.arrived_at, self._wanted = time.monotonic(), b""
                    self._waiting.set()
                tail = (tail + data)[-3000:]
        self.last_words = tail.decode(errors="replace")
        self.ended.set()

    def expect(self, text: str, *, after: str = "", timeout_s: float = 60.0) -> float:
        """Type `after`; the moment at which `text` has arrived, and how long that took."""
        self._waiting.clear()
        self._wanted = text.encode()
        started = time.monotonic()
        self.write(after)
        if not self._waiting.wait(timeout_s):
            raise TimeoutError(f"{text!r} never came to the screen")
        return self.arrived_at - started

    def write(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        if not self.ended.is_set():
            os.kill(self.pid, signal.SIGTERM)
        self.ended.wait(10)
        os.waitpid(self.pid, 0)
        os.close(self._fd)


def viewer(kind: str, out: Path, *arguments: object) -> list[str]:
    return [sys.executable, str(HERE / "dashboard_viewer.py"), kind, str(out), *map(str, arguments)]


def run_viewer(kind: str, folder: Path, *arguments: object) -> dict[str, list[list[float]]]:
    """Run one of the dashboards that time themselves, to its end."""
    out = folder / f"{kind}.json"
    os.environ["TEXTUAL_FPS"] = "1000"  # the pace is the measurement's
    terminal = Terminal(viewer(kind, out, *arguments))
    os.environ.pop("TEXTUAL_FPS")
    if not terminal.ended.wait(170):
        terminal.close()
        raise TimeoutError(f"{kind} has not ended")
    terminal.close()
    if not out.exists():
        raise RuntimeError(f"{kind} ended without a result:\n{terminal.last_words}")
    return dict(json.loads(out.read_text()))


def p95(values: Sequence[float]) -> float:
    return sorted(values)[round(0.95 * (len(values) - 1))]


def measure_frames(folder: Path, group: int, num_frames: int) -> list[Figure]:
    """Building and drawing, at a million blocks and 20,000 block events a second."""
    figures = []
    for scattered, what, goal in ((True, "frame, every line changes", 8), (False, "frame, changes cluster", 4)):
        result = run_viewer("frames", folder, 1_000_000, group, int(scattered), num_frames, 20_000 // FPS)
        build, draw, lines = zip(*result["samples"], strict=True)
        both = [a + b for a, b in zip(build, draw, strict=True)]
        note = f"build {statistics.median(build):.2f}, draw {statistics.median(draw):.2f}, "
        note += f"mean {statistics.mean(both):.2f}, p95 {p95(both):.2f}, with words; "
        note += f"{statistics.median(lines):.0f} of {result['rows']} lines"
        figures.append(Figure(f"{what}: build + draw, median", statistics.median(both), "ms", goal, note=note))
    return figures


def measure_list(folder: Path, num_frames: int) -> list[Figure]:
    """2,000 rows, 200 changes a frame, ours and DataTable."""
    ours, theirs = (
        statistics.median(run_viewer(kind, folder, num_frames)["samples"]) for kind in ("requests", "datatable")
    )
    note = f"{ours:.2f} ms against {theirs:.2f} ms a frame"
    return [Figure("request list of 2,000 rows, against DataTable", theirs / ours, "x", 20, at_least=True, note=note)]


@contextlib.contextmanager
def engine(folder: Path, num_blocks: int, group: int, events_per_s: int, *, scattered: bool) -> Iterator[Path]:
    """An engine that publishes; the path of its log of sequence numbers and times."""
    directory, log = folder / "e", folder / "engine.log"
    directory.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE / "dashboard_engine.py"), str(directory), str(log)]
    process = subprocess.Popen([*command, *map(str, (num_blocks, group, events_per_s, int(scattered)))])
    try:
        wait_until(log.exists, "the engine's first batch")
        yield log
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come about")
        time.sleep(0.02)


def measure_watching(folder: Path, group: int, seconds: float) -> list[Figure]:
    """A viewer on a live engine: share of a core, keys, events."""
    figures = []
    for num_blocks, events_per_s, goal in ((1_000_000, 20_000, 50), (100_000, 2_000, 15)):
        seen = folder / "seen.log"
        here = group if num_blocks == 1_000_000 else max(group // 10, 2)
        with engine(folder, num_blocks, here, events_per_s, scattered=True) as log:
            terminal = Terminal(viewer("watch", seen, folder / "e"))
            try:
                wait_for_live(terminal, seen)
                time.sleep(2)
                busy, started, first = terminal.cpu_s(), time.monotonic(), terminal.num_bytes
                time.sleep(seconds)
                elapsed = time.monotonic() - started
                share = 100 * (terminal.cpu_s() - busy) / elapsed
                kb_per_s = (terminal.num_bytes - first) / elapsed / 1000
                latencies, frames = event_latencies(log, seen, started, started + elapsed)
                keys = key_latencies(terminal)
            finally:
                terminal.close()
        size = f"{num_blocks:,} blocks, {events_per_s:,} events/s"
        note = f"{frames / elapsed:.1f} frames/s, {kb_per_s:.0f} kB/s"
        figures.append(
            Figure(f"{size}: share of a core", share, "%", goal, note=note, is_void=frames < 0.8 * FPS * elapsed)
        )
        if num_blocks == 1_000_000:
            note = f"median {statistics.median(keys):.1f}"
            figures.append(Figure("key to screen, p95", p95(keys), "ms", 50, note=note))
            note = f"median {statistics.median(latencies):.1f}"
            figures.append(Figure("event to screen, p95", p95(latencies), "ms", 120, note=note))
    return figures


def key_latencies(terminal: Terminal) -> list[float]:
    """From writing a letter for the prompt line to its arrival on the screen, in ms."""
    terminal.write("i")
    time.sleep(0.5)
    found = []
    for letter in KEYS:
        found.append(1000 * terminal.expect(letter, after=letter))
        time.sleep(0.037)  # at another phase of the frames each time
    return found


def event_latencies(log: Path, seen: Path, start: float, stop: float) -> tuple[list[float], int]:
    """From a batch's publication to the end of the first display that has it, in ms; and the number of displays."""
    shown = [line.split() for line in seen.read_text().splitlines()]
    displays = [(int(seq), int(time_ns)) for seq, time_ns, _ in shown]
    found, place = [], 0
    for line in log.read_text().splitlines():
        seq, published_ns = map(int, line.split())
        while place < len(displays) and displays[place][0] < seq:
            place += 1
        if place < len(displays) and start * 1e9 <= published_ns < stop * 1e9:
            found.append((displays[place][1] - published_ns) / 1e6)
    return found, sum(start * 1e9 <= time_ns < stop * 1e9 for _, time_ns in displays)


def wait_for_live(terminal: Terminal, seen: Path) -> None:
    wait_until(
        lambda: terminal.ended.is_set() or (seen.exists() and "LIVE" in seen.read_text()), "a viewer that follows"
    )
    if terminal.ended.is_set():
        raise RuntimeError(f"the viewer has ended:\n{terminal.last_words}")


def measure_start(folder: Path) -> list[Figure]:
    """`kvscope attach` until its first picture, and `python -c 'import textual'`, in turns."""
    ours, theirs, busy = [], [], []
    with engine(folder, 1_024, 4, 100, scattered=True):
        command = [sys.executable, "-m", "kvscope.dashboard.cli", "attach", str(folder / "e")]
        for _ in range(7):
            started = time.monotonic()
            subprocess.run([sys.executable, "-c", "import textual"], check=True)
            theirs.append(time.monotonic() - started)
            terminal = Terminal(command)
            terminal.expect("POOL")
            ours.append(terminal.arrived_at - terminal.started)
            busy.append(terminal.cpu_s())
            terminal.close()
    median = statistics.median(ours)
    note = f"CPU {statistics.median(busy):.2f} s; {median / statistics.median(theirs):.1f} x `import textual`"
    return [Figure("kvscope attach: first picture", median, "s", 0.8, note=note)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--frames", type=int, default=120)
    parser.add_argument("--only", choices=["frames", "list", "watch", "start"], nargs="*")
    args = parser.parse_args()
    only = args.only or ["frames", "list", "watch", "start"]
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="kvz") as name:
        folder = Path(name)
        group = 0
        if {"frames", "watch"} & {*only}:
            group = int(run_viewer("frames", folder, 1_000_000, 1_000, 0, 1, 100)["group"])  # type: ignore[call-overload]
        if "frames" in only:
            figures += measure_frames(folder, group, args.frames)
        if "list" in only:
            figures += measure_list(folder, args.frames)
        if "watch" in only:
            figures += measure_watching(folder, group, args.seconds)
        if "start" in only:
            figures += measure_start(folder)
    print(f"{'':<52}{'goal':>12}{'figure':>10}")
    for figure in figures:
        print(figure.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
