"""The dashboard at one moment of a recording, as text or as a picture: drawn as on a terminal, without one."""

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvscope.dashboard.errors import CommandError
from kvscope.dashboard.go_to import parse_destination
from kvscope.dashboard.opening import dashboard_look
from kvscope.dashboard.terminal import MIN_COLUMNS, MIN_ROWS
from kvscope.transport.recording import Player, ReplaySource
from kvscope.transport.timetravel import Track

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from kvscope.dashboard.app import DashboardApp

MOMENTS = "start, end, step:412, seq:4211 or time:12.5s"
MIN_SIZE, MAX_SIZE = (MIN_COLUMNS, MIN_ROWS), (500, 200)
AUDIT_WAIT_S = 30.0  # a longer audit is drawn as far as it has come, and says so
POLL_S, LOOKS = 0.02, 4


def parse_size(text: str) -> tuple[int, int]:
    """`160x45` in columns and rows. Raises CommandError."""
    found = re.fullmatch(r"(\d{1,4})x(\d{1,4})", text, re.ASCII)
    size = (int(found[1]), int(found[2])) if found is not None else (0, 0)
    if not all(low <= value <= high for low, value, high in zip(MIN_SIZE, size, MAX_SIZE, strict=True)):
        raise CommandError(f"--size is COLUMNSxROWS, from {MIN_COLUMNS}x{MIN_ROWS} to {MAX_SIZE[0]}x{MAX_SIZE[1]}")
    return size


def parse_moment(text: str) -> Callable[[Player], None]:
    """What brings a player there; calling it raises CommandError where the recording is over, or has not begun."""
    kind, colon, value = text.partition(":")
    if text in ("start", "end"):
        return Player.seek_start if text == "start" else Player.seek_end
    if colon and kind == "time" and (destination := parse_destination(value)) and destination.time_ns is not None:
        time_ns = destination.time_ns
        return lambda player: _seek(player, player.seek_time, time_ns, player.index.time_ns_at, "time")
    if colon and kind in ("step", "seq") and re.fullmatch(r"\d{1,15}", value, re.ASCII):
        number = int(value)
        if kind == "step":
            return lambda player: _seek(player, player.seek_step, number, player.index.step_at, "step")
        return lambda player: _seek(player, player.seek_seq, number, player.index.seq_at, "seq")
    raise CommandError(f"--at is {MOMENTS}")


def _seek(
    player: Player, seek: Callable[[int], None], wanted: int, number_at: Callable[[int], int | None], kind: str
) -> None:
    first, last = number_at(0) or 0, number_at(player.length) or 0
    if not first <= wanted <= last:
        verb, bound = ("begins", first) if wanted < first else ("ends", last)
        shown = f"{bound / 1e9:.9f}s" if kind == "time" else bound  # so that what it says can be asked for
        raise CommandError(f"the recording {verb} at {kind}:{shown}")
    seek(wanted)


class _Still(ReplaySource):
    """A recording that stands where it is told to."""

    def __init__(self, track: Track, seek: Callable[[Player], None]) -> None:
        super().__init__(track)
        self.player.rewind()
        seek(self.player)

    def start(self) -> None:
        self.player.stand()


def draw_still(
    track: Track, seek: Callable[[Player], None], size: tuple[int, int], *, title: str, ascii_only: bool, as_svg: bool
) -> Iterable[str]:
    """The screen's lines, or those of an SVG file. Raises CommandError."""
    from kvscope.dashboard.app import DashboardApp

    source = _Still(track, seek)
    app = DashboardApp(source, title=title, ascii_only=ascii_only, look=dashboard_look())
    drawn: list[str] = []

    async def take(pilot: "Pilot[object]") -> None:
        await _is_told(source)
        while app.shown_revision != source.view.revision or not app.query("FooterKey"):
            await asyncio.sleep(POLL_S)
        app.draw_top()  # with all that the audit has found
        app.clear_notifications()
        drawn.extend(await _settled(app, pilot))
        if as_svg:
            drawn[:] = [app.export_screenshot()]
        app.exit()

    app.run(headless=True, size=size, auto_pilot=take, mouse=False)
    if not drawn:
        raise CommandError("the screen could not be drawn")
    return drawn


async def _is_told(source: ReplaySource) -> None:
    """Until the audit has looked at everything, or for some time."""
    end = time.monotonic() + AUDIT_WAIT_S
    while source.player.survey.is_working and time.monotonic() < end:
        await asyncio.sleep(POLL_S)


async def _settled(app: "DashboardApp", pilot: "Pilot[object]") -> list[str]:
    """The screen's lines once they have stopped changing: widgets arrange themselves in several turns."""
    looks: list[list[str]] = []
    while len(looks) < LOOKS or any(look != looks[-1] for look in looks[-LOOKS:]):
        await pilot.pause(POLL_S)
        looks.append([strip.text.rstrip() for strip in app.screen._compositor.render_strips()])
    return looks[-1]
