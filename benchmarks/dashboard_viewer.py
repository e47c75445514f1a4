"""The processes that benchmarks/dashboard.py runs in a terminal of its own: dashboards that time themselves.

    frames    folds a load and draws frame after frame; CPU of building, of drawing and of both
    watch     follows an engine over its sockets at 30 frames a second; which batch was on the screen when
    requests  the request list of 2,000 rows, 200 changes a frame
    datatable the same with Textual's DataTable

Each writes lines of JSON into the file it is given.
"""

import asyncio
import inspect
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dashboard_load import Load
from textual.app import App, ComposeResult
from textual.widgets import DataTable

from kvscope.dashboard.app import DashboardApp
from kvscope.dashboard.block_grid import BlockGrid
from kvscope.dashboard.copies import RequestFrame, SequenceFrame
from kvscope.dashboard.frames import FrameBuilder, build_frame
from kvscope.dashboard.glyphs import UNICODE
from kvscope.dashboard.pump import FrameReady
from kvscope.dashboard.requests_pane import RequestsPane
from kvscope.dashboard.sparing import SparingApp
from kvscope.dashboard.terminal import run_screen
from kvscope.dashboard.viewer import Connected
from kvscope.events.types import SamplingParams
from kvscope.transport.client import EngineClient
from kvscope.transport.endpoints import directory_endpoints
from kvscope.transport.source import ListSource, View

FPS, WARM_UP = 30, 20
STYLES = Path(inspect.getfile(DashboardApp)).with_name("dashboard.tcss")
NUM_ROWS, NUM_CHANGES = 2_000, 200


def cpu_ms() -> float:
    return time.process_time_ns() / 1e6


class Still:
    """A frame pump that never brings a frame."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class TimedApp(App[None]):
    """Says when what it draws has been handed to the terminal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.displayed, self._painted = asyncio.Event(), asyncio.Event()

    def post_display_hook(self) -> None:
        self.displayed.set()

    async def drawn(self) -> None:
        """The next refresh has been painted."""
        self.displayed.clear()
        self._painted.clear()
        self.call_after_refresh(self._painted.set)  # the same each time: Textual looks up a new one's parameters
        await self._painted.wait()


class FramesApp(TimedApp, DashboardApp):
    """Draws `num_frames` frames, 30 a second as in use: each after `events_per_frame` more block events."""

    CSS_PATH = STYLES

    def __init__(self, load: Load, num_frames: int, events_per_frame: int, out: Path) -> None:
        super().__init__(ListSource(load.begin()), title="bench", fps=FPS)
        self._pump: Any = Still()
        self._load, self._num_frames, self._per_frame, self._out = load, num_frames, events_per_frame, out

    def on_mount(self) -> None:
        self.run_worker(self._measure())

    async def _measure(self) -> None:
        await asyncio.sleep(0.5)  # until the screen has been laid out
        builder, grid, samples = FrameBuilder(), self.query_one("#grid", BlockGrid), []
        begun = time.monotonic()
        for number in range(-WARM_UP, self._num_frames):
            await asyncio.sleep(max(begun + (number + WARM_UP) / FPS - time.monotonic(), 0))
            self._source.view.apply(number + WARM_UP + 1_000, self._load.next(self._per_frame))
            before = [grid.line_at(y) for y in range(grid.content_height)]
            started = cpu_ms()
            frame = build_frame(self._source.view, builder)
            built = cpu_ms()
            self.post_message(FrameReady(frame))
            await self.drawn()
            ended = cpu_ms()
            if number >= 0:
                num_lines = sum(grid.line_at(y) != strip for y, strip in enumerate(before))
                samples.append([built - started, ended - built, num_lines])
        write(self._out, {"samples": samples, "group": grid.layout_now.group, "rows": grid.layout_now.rows})
        self.exit()


class WatchApp(TimedApp, DashboardApp):
    """Notes which batch has been on the screen since when."""

    CSS_PATH = STYLES

    def __init__(self, source: Connected, out: Path) -> None:
        super().__init__(source, title="bench", fps=FPS)
        self._out, self._noted = out.open("w"), -1

    def post_display_hook(self) -> None:
        super().post_display_hook()
        seq = self._frame.seq
        if seq is not None and seq != self._noted:
            self._noted = seq
            self._out.write(f"{seq} {time.monotonic_ns()} {self._frame.status.name}\n")
            self._out.flush()


class ListApp(TimedApp):
    """A list of requests, as a dashboard's pane or as a DataTable; CPU per frame of 200 changes."""

    CSS = "RequestsPane { border: none; height: 1fr; } DataTable { height: 1fr; }"

    def __init__(self, kind: str, num_frames: int, out: Path) -> None:
        super().__init__()
        self._kind, self._num_frames, self._out = kind, num_frames, out
        self._random = random.Random(0)

    def compose(self) -> ComposeResult:
        yield RequestsPane(UNICODE, id="requests", hint="") if self._kind == "requests" else DataTable[str]()

    def on_mount(self) -> None:
        self.run_worker(self._measure())

    async def _measure(self) -> None:
        change = self._changing_pane() if self._kind == "requests" else self._changing_table()
        await self.drawn()
        samples = []
        for number in range(-WARM_UP, self._num_frames):
            show = change()
            started = cpu_ms()
            show()
            await self.drawn()
            if number >= 0:
                samples.append(cpu_ms() - started)
        write(self._out, {"samples": samples})
        self.exit()

    def _changing_pane(self) -> Callable[[], Callable[[], None]]:
        """Makes the values of a frame, as a frame builder does; drawing them is what is measured."""
        pane, builder = self.query_one(RequestsPane), FrameBuilder()
        frame, requests = build_frame(View(), builder), [make_request(number) for number in range(NUM_ROWS // 2)]

        def change() -> Callable[[], None]:
            for _ in range(NUM_CHANGES):
                place = self._random.randrange(len(requests))
                sequence = requests[place].sequences[0]
                text = f"{sequence.text[-60:]} w{place}"
                changed = sequence._replace(text=text, num_written=sequence.num_written + 1)
                requests[place] = requests[place]._replace(sequences=(changed,))
            return partial(pane.show, frame._replace(requests=tuple(requests)), None)

        return change

    def _changing_table(self) -> Callable[[], Callable[[], None]]:
        table = self.query_one(DataTable)
        columns = table.add_columns("id", "state", "blocks", "shared", "tokens", "first", "rate", "text")
        rows = [table.add_row(f"r{n}", "running", "7", "1", "9", "10 ms", "3.5", "a word") for n in range(NUM_ROWS)]

        def show(changes: list[tuple[Any, Any, str]]) -> None:
            for row, column, text in changes:
                table.update_cell(row, column, text)

        def change() -> Callable[[], None]:
            pick = self._random.choice
            changes = [(pick(rows), pick(columns[2:]), f"w{self._random.randrange(9999)}") for _ in range(NUM_CHANGES)]
            return partial(show, changes)

        return change


class OwnListApp(ListApp, SparingApp):
    """Ours with the terminal's driver that the dashboard has."""


def make_request(number: int) -> RequestFrame:
    sequence = SequenceFrame(f"r{number}.0", (1, 2, 3), 40, ("a", " word"), 2, "a word", 0, None)
    return RequestFrame(f"r{number}", "a prompt", "running", None, 0, SamplingParams(), (sequence,), number % 7 + 1)


def write(out: Path, value: object) -> None:
    out.write_text(json.dumps(value))


def watch(directory: Path, out: Path) -> None:
    client = EngineClient(directory_endpoints(directory)).connect(20)
    source = Connected(client)
    try:
        run_screen(WatchApp(source, out))
    finally:
        source.close()


def main(kind: str, out: str, *arguments: str) -> None:
    if kind == "watch":
        watch(Path(arguments[0]), Path(out))
    elif kind == "frames":
        num_blocks, group, scattered, num_frames, per_frame = map(int, arguments)
        load = Load(num_blocks, group, scattered=bool(scattered))
        run_screen(FramesApp(load, num_frames, per_frame, Path(out)))
    else:
        kind_of_app = OwnListApp if kind == "requests" else ListApp
        run_screen(kind_of_app(kind, int(arguments[0]), Path(out)))


if __name__ == "__main__":
    main(*sys.argv[1:])
