"""Requests that were refused a moment ago: they never enter the state, so the log is all that tells of them."""

from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.strips import clip, flat, make_strip
from kvscope.events.types import RequestRefused
from kvscope.transport.source import LogEntry

SHOWN_NS = 20_000_000_000  # of the engine's time
MAX_SHOWN = 3


class RecentRefusals:
    """Found in the log; of one that goes on, the new entries alone are looked at."""

    def __init__(self) -> None:
        self._last: LogEntry | None = None
        self._found: list[LogEntry] = []

    def look(self, frame: Frame) -> list[LogEntry]:
        """The latest few, oldest first."""
        fresh: list[LogEntry] = []
        for entry in reversed(frame.log) if frame.counters.refusals else ():
            if entry is self._last:
                break
            if isinstance(entry.event, RequestRefused):
                fresh.append(entry)
        else:
            self._found = []  # another log
        self._last = frame.log[-1] if frame.log else None
        known = [*self._found, *reversed(fresh)]
        self._found = [entry for entry in known if 0 <= frame.time_ns - entry.time_ns < SHOWN_NS][-MAX_SHOWN:]
        return self._found


def draw_refusal(entry: LogEntry, glyphs: Glyphs, width: int) -> Strip:
    """A line of the request list."""
    event = entry.event
    assert isinstance(event, RequestRefused)
    head = f" {event.request_id} {glyphs.cross} refused: "
    return make_strip(
        [(head, theme.BAD), (clip(flat(event.reason, glyphs), width - len(head), glyphs), theme.TEXT)], width
    )
