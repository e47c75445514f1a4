"""The dashboard on a terminal whose line is busy, lost and resized at random: in the end nothing stale is left."""

from __future__ import annotations

import errno
import random
import re
import threading
from contextlib import asynccontextmanager

import numpy as np
import pyte
import pytest
from test_app import live, running, strips_of, until
from textual.drivers.linux_driver import LinuxDriver
from textual.messages import TerminalSupportsSynchronizedOutput

from kvscope.dashboard import terminal_driver
from kvscope.dashboard.block_grid import BlockGrid
from kvscope.dashboard.canvas import Canvas, colors_of
from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.grid_layout import NO_LIGHT, Zoom
from kvscope.dashboard.pool_frame import TracesFrame
from kvscope.dashboard.sparing import Opening
from kvscope.dashboard.terminal_driver import MAX_ON_THE_WAY, QUESTION, TerminalDriver
from kvscope.dashboard.themed import Look

LAY = Opening.lay
KEYS = ("question_mark", "escape", "ctrl+p", "1", "2", "5", "7", "plus", "j")


class Line(TerminalDriver):
    """What is written reaches a screen in memory, once the line is not busy."""

    def __init__(self, app, size: tuple[int, int]) -> None:
        super().__init__(app, size=size)
        self.terminal = pyte.Screen(*size)
        self.terminal.reset_mode(pyte.modes.DECAWM)
        self._stream = pyte.Stream(self.terminal)
        self.is_busy = False
        self.written: list[str] = []
        self.sent = ""
        self.num_frames = self.num_at_once = 0

    def _give(self, data: str) -> None:
        self._num_given += 1
        self._size_given += len(data)
        self.written.append(data)
        self.num_at_once = max(self.num_at_once, len(self.written))
        if not self.is_busy:
            self.deliver()

    def deliver(self) -> None:
        for data in self.written:
            self.num_frames += data != QUESTION
            self.sent += data
            self._stream.feed(data.replace(QUESTION, ""))
            self._take()
        self.written.clear()

    def rows(self) -> list[list[object]]:
        return rows(self.terminal)


def rows(terminal: pyte.Screen) -> list[list[object]]:
    return [[terminal.buffer[y][x] for x in range(terminal.columns)] for y in range(terminal.lines)]


def believed(app) -> list[list[object]]:
    """What Textual holds to be on the screen, drawn on a fresh terminal."""
    canvas, terminal = Canvas(colors_of(app.console.color_system)), pyte.Screen(*app.size)
    canvas.resize(*app.size)
    for y, strip in enumerate(strips_of(app)):
        canvas.paint(0, y, strip)
    pyte.Stream(terminal).feed(canvas.take_changes())
    return rows(terminal)


@asynccontextmanager
async def on_a_line(monkeypatch, source, size=(80, 24), **options):
    """The dashboard, which draws on a terminal in memory."""
    monkeypatch.setattr("textual.drivers.linux_driver.signal.signal", lambda *_: None)
    async with running(source, size, **options) as (app, pilot):
        headless, line = app._driver, Line(app, size)
        app._driver = line
        app.screen.refresh()
        try:
            yield app, pilot, line
        finally:
            app._driver = headless


async def resize(pilot, line: Line, width: int, height: int) -> None:
    line.terminal.resize(height, width)
    await pilot.resize_terminal(width, height)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_the_terminal_ends_with_the_picture(monkeypatch, seed):
    rng, source = random.Random(seed), live()
    async with on_a_line(monkeypatch, source) as (app, pilot, line):
        for _ in range(25):
            match rng.choice(("step", "step", "step", "key", "busy", "resize", "blank")):
                case "step":
                    source.feed(source.engine.step())
                case "key":
                    await pilot.press(
                        rng.choice(("question_mark", "escape", "ctrl+p", "1", "2", "5", "7", "plus", "j"))
                    )
                case "busy":
                    line.is_busy = not line.is_busy
                    if not line.is_busy:
                        line.deliver()
                case "resize":
                    await resize(pilot, line, rng.choice((60, 80, 120)), rng.choice((20, 24, 40)))
                case "blank":  # the terminal comes back from a shell
                    line.terminal.reset()
                    line.num_starts += 1
                    app.screen.refresh()
            await pilot.pause(0.005)
        line.is_busy = False
        line.deliver()
        await until(pilot, lambda: line.rows() == believed(app), "the same picture")


@pytest.mark.parametrize("look", [{}, {"theme": "kvscope-light"}, {"no_color": True}])
async def test_lines_that_go_round_the_compositor_are_those_it_would_have_drawn(monkeypatch, look):
    """Cells of the far zooms and lines of every pane, with blocks lit and dimmed, in any colours."""
    if look.get("no_color"):
        monkeypatch.setenv("NO_COLOR", "1")
    source, wanted = live(), {name: value for name, value in look.items() if name != "no_color"}
    async with on_a_line(monkeypatch, source, (160, 45), look=Look(**wanted)) as (app, pilot, line):
        await until(pilot, lambda: line.rows() == believed(app), "the first picture")
        grid, laid = app.query_one("#grid", BlockGrid), []
        for zoom, selected in ((Zoom.DENSE, None), (Zoom.HALVES, None), (Zoom.GROUPS, "r1"), (Zoom.DENSE, "r2.0")):
            grid.change_zoom(zoom - grid.layout_now.zoom)
            app.select(selected)
            monkeypatch.setattr(Opening, "lay", lambda *cells: laid.append(cells) or LAY(*cells))
            for _ in range(6):
                source.feed(source.engine.step())
                await until(pilot, lambda: app.shown_revision == source.view.revision, "the step")
                await until(pilot, lambda: line.rows() == believed(app), "the same picture")
        ones = np.ones(app._frame.pool.num_blocks, np.int32)
        pool = app._frame.pool._replace(refs=ones, written=ones, traces=TracesFrame(ones, 5 * ones, 1, 0))
        for by in (ColourBy.AGE, ColourBy.REUSE):  # the same numbers stand for other characters
            grid.show(pool, NO_LIGHT._replace(by=by), {})
            row = grid.line_at(0).text.rstrip()
            await until(
                pilot, lambda row=row: row in "".join(line.terminal.display), "the same picture by another mode"
            )
        assert laid


async def test_frames_are_dropped_and_never_queued(monkeypatch):
    source = live()
    async with on_a_line(monkeypatch, source) as (app, pilot, line):
        await until(pilot, lambda: line.rows() == believed(app), "the first picture")
        app._sync_available = True  # a frame is one text, with the marks around it
        line.is_busy, line.num_at_once = True, 0
        for _ in range(20):
            source.feed(source.engine.step())
            app._frame = app._frame._replace(step=app._frame.step + 1)
            app.draw()
            await pilot.pause(0.02)
        assert line.num_at_once == 1  # that which the line is busy with
        line.is_busy = False
        line.deliver()
        await until(pilot, lambda: line.rows() == believed(app), "the newest picture")


async def test_a_frame_waits_for_the_receipt_of_those_before_it(monkeypatch):
    monkeypatch.setattr(terminal_driver, "PATIENCE_S", 1000.0)
    async with on_a_line(monkeypatch, live()) as (app, pilot, line):
        await until(pilot, lambda: line.rows() == believed(app), "the first picture")
        app.max_frames_per_second = 1000
        line.process_message(TerminalSupportsSynchronizedOutput())  # it answers
        app.bell = lambda: None
        line._size_received = line._size_given
        app._canvas.forget()
        app.screen.refresh()
        await until(pilot, lambda: len(line._asked) == 1, "a question after the frame")
        line._size_given += MAX_ON_THE_WAY
        app._canvas.forget()
        app.screen.refresh()
        called = []
        assert not app.has_room(lambda: called.append(line.num_frames))
        await pilot.pause(0.05)
        assert not line.has_room
        assert not called
        line.process_message(TerminalSupportsSynchronizedOutput())  # the receipt
        line._size_received = line._size_given
        await until(pilot, lambda: called and len(line._asked) == 1, "the next frame, and its question")
        monkeypatch.setattr(terminal_driver, "PATIENCE_S", 0.0)
        assert line.has_room  # an answer that never comes stops nothing


async def test_at_most_so_many_frames_unless_a_key_is_pressed(monkeypatch):
    async with on_a_line(monkeypatch, live()) as (app, pilot, line):
        await until(pilot, lambda: line.rows() == believed(app), "the first picture")
        app.max_frames_per_second = 1
        app._next_frame_s = app._hurry_until_s = 0.0
        await pilot.pause(0.3)
        before = line.num_frames
        for number in range(10):
            app._frame = app._frame._replace(step=number)
            app.draw()
            await pilot.pause(0.03)
        assert line.num_frames - before <= 1
        await pilot.press("question_mark")
        await until(pilot, lambda: line.rows() == believed(app), "help at once", timeout_s=10)


@pytest.mark.parametrize(
    ("name", "codes"),
    [("standard", r"3\d|4\d|9\d|10\d"), ("256", r"[34]8;5;\d+"), ("truecolor", r"[34]8;2;\d+;\d+;\d+")],
)
async def test_the_colours_asked_for_are_the_ones_sent(monkeypatch, name, codes):
    async with on_a_line(monkeypatch, live(), look=Look(color_system=name)) as (_, pilot, line):
        await until(pilot, lambda: line.sent, "the first picture")
        for parameters in re.findall(r"\x1b\[([0-9;]+)m", line.sent):
            assert re.fullmatch(rf"(({codes}|[0-9]|2[2-9]|[34]9)(;|$))+", parameters), parameters  # 39, 49: none


async def test_a_key_sends_everything_again(monkeypatch):
    async with on_a_line(monkeypatch, live()) as (app, pilot, line):
        await until(pilot, lambda: line.rows() == believed(app), "the first picture")
        line.terminal.reset()
        await pilot.press("ctrl+l")
        await until(pilot, lambda: line.rows() == believed(app), "the picture again")


async def test_leaving_waits_for_answers_that_would_else_be_typed_into_the_shell(monkeypatch):
    async with on_a_line(monkeypatch, live()) as (app, pilot, line):
        await until(pilot, lambda: line.rows() == believed(app), "the first picture")
        answer = TerminalSupportsSynchronizedOutput()
        line.process_message(answer)
        line.ask_for_receipt()
        received: list[int] = []
        monkeypatch.setattr(LinuxDriver, "stop_application_mode", lambda _: received.append(line._size_received))
        monkeypatch.setattr(terminal_driver, "GOODBYE_S", 60.0)
        reader = threading.Timer(0.05, line.process_message, (answer,))
        reader.start()
        line.stop_application_mode()
        assert received == [line._size_given]
        reader.join()


async def test_an_answer_that_comes_after_a_stall_is_no_receipt_for_a_later_frame(monkeypatch):
    async with on_a_line(monkeypatch, live()) as (app, pilot, line):
        await until(pilot, lambda: line.rows() == believed(app), "the first picture")
        answer = TerminalSupportsSynchronizedOutput()
        line.process_message(answer)
        line.ask_for_receipt()
        monkeypatch.setattr(terminal_driver, "PATIENCE_S", 0.0)
        await until(pilot, lambda: line.has_room and not line._asked, "enough of waiting")
        monkeypatch.setattr(terminal_driver, "PATIENCE_S", 1000.0)
        line.ask_for_receipt()
        received = line._size_received
        line.process_message(answer)  # the first question's
        assert (line._size_received, len(line._asked)) == (received, 1)
        line.process_message(answer)
        assert (line._size_received, len(line._asked)) == (line._size_given, 0)

        line.ask_for_receipt()
        monkeypatch.setattr(terminal_driver, "PATIENCE_S", 0.0)
        await until(pilot, lambda: line.has_room and not line._asked, "enough again")
        monkeypatch.setattr(terminal_driver, "LATE_S", 0.0)
        await until(pilot, lambda: not line._owes(), "lost, not late")
        monkeypatch.setattr(terminal_driver, "PATIENCE_S", 1000.0)
        line.ask_for_receipt()
        line.process_message(answer)
        assert (line._size_received, len(line._asked)) == (line._size_given, 0)


class Gone:
    """The file of a terminal that nobody holds any more."""

    def write(self, text: str) -> None:
        raise OSError(errno.EIO, "Input/output error")


async def test_a_terminal_that_has_gone_ends_the_dashboard(monkeypatch):
    async with on_a_line(monkeypatch, live()) as (app, pilot, line):
        await until(pilot, lambda: line.rows() == believed(app), "the first picture")
        codes: list[int] = []
        monkeypatch.setattr(app, "exit", lambda *, return_code: codes.append(return_code))
        line._file._file = Gone()
        line._num_given += 1
        line._file.write("a frame")
        await until(pilot, lambda: codes == [129], "the end")
        assert line.has_room  # nobody waits for it


async def test_a_grid_without_room_draws_nothing_of_another_pool():
    """A host pool that comes back after a restart, smaller, is asked for lines before it is told of its room."""
    async with running(live()) as (app, _):
        grid, light = app.query_one("#grid", BlockGrid), NO_LIGHT._replace(by=ColourBy.REFS)
        many, few = (np.ones(count, np.int32) for count in (20_000, 8))
        pool = app._frame.pool
        grid.show(pool._replace(refs=many, written=many), light, {})
        assert grid.layout_now.zoom is Zoom.GROUPS
        grid.display = False
        grid.show(pool._replace(refs=few, written=few), light, {})
        assert [grid.line_at(y).text.strip() for y in range(3)] == ["", "", ""]
