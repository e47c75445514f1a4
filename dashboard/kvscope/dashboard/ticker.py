"""One event of the log as a line. Pure."""

from functools import lru_cache

from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.strips import Part, flat, make_strip
from kvscope.events import types as ev
from kvscope.events.types import Event
from kvscope.transport.source import LogEntry


def draw_entry(entry: LogEntry, glyphs: Glyphs, *, brief: bool = False) -> Strip:
    """Sequence number, step (unless `brief`), phase, a glyph for the kind, and the sentence."""
    head = f"{entry.seq:>5} " if brief else f"{entry.seq:>6} step {entry.step:<5} "
    return _draw(head, _phase_word(entry.phase), type(entry.event), entry.sentence, glyphs)


@lru_cache(maxsize=512)  # what is in view; a strip that has been shown carries several kilobytes of Textual's caches
def _draw(head: str, phase: str, kind: type[Event], sentence: str, glyphs: Glyphs) -> Strip:
    glyph, style, loud = _look(kind, glyphs)
    parts: list[Part] = [
        (head, theme.FAINT),
        (f"{phase:<5} ", theme.SOFT),
        (f"{glyph} ", style),
        (flat(sentence, glyphs), style if loud else theme.TEXT),
    ]
    return make_strip(parts)


def _phase_word(phase: str) -> str:
    """`commit` as `done`: the forward pass has finished."""
    return {"commit": "done", "control": "ctrl"}.get(phase, phase)


def _look(kind: type[Event], glyphs: Glyphs) -> tuple[str, Style, bool]:
    """Glyph, colour, and whether the whole sentence takes the colour: what a reader must not miss."""
    if kind is ev.BlockCopied:
        return glyphs.copy, theme.NOTICE, True
    if kind is ev.RequestPreempted:
        return glyphs.preempt, theme.BAD, True
    if kind in (ev.RequestRefused, ev.AuditFinding, ev.BatchesDropped):
        return glyphs.cross, theme.BAD, True
    if kind is ev.RequestWaiting:
        return glyphs.wait, theme.NOTICE, False
    if kind is ev.BlocksAllocated:
        return glyphs.reserved, theme.BRAND, False
    if kind is ev.SlotsWritten:
        return glyphs.written, theme.BRAND, False
    if kind in (ev.BlocksShared, ev.SequenceForked):
        return "=", theme.STRONG, False
    if kind in (ev.BlocksReleased, ev.BlocksOutOfWindow):
        return "-", theme.SOFT, False
    if kind in (ev.RequestFinished, ev.SequenceFinished, ev.HypothesisFinished, ev.BeamSearchFinished):
        return glyphs.tick, theme.GOOD, False
    return glyphs.separator, theme.SOFT, False
