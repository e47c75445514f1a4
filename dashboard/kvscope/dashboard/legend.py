"""The line under the grid: what colours say, how to change that, and what the cells of a zoom mean. Pure."""

from collections.abc import Iterable, Sequence

from rich.style import Style

from kvscope.dashboard import theme
from kvscope.dashboard.colouring import SCALES, ColourBy, alphabet
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.grid_layout import GridLayout, Zoom
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part, fit_whole

Item = Sequence[Part]  # what is left out as one where it does not fit


def legend(pool: PoolFrame, layout: GridLayout, by: ColourBy, glyphs: Glyphs, *, key: str, width: int) -> list[Part]:
    """`key` changes what the colours say. Of what does not fit `width` cells, the last is left out."""
    items: list[Item] = [[(f"{key} ", theme.BRAND), (f"by {by.value} ", theme.STRONG)]]
    if layout.zoom is Zoom.GROUPS:
        what = {ColourBy.OWNER: " ", ColourBy.STATE: ": most are", ColourBy.AGE: ": latest"}.get(by, ": highest")
        items += _words(f"{layout.group} block{'s' if layout.group > 1 else ''}/cell{what}")
    if layout.zoom is Zoom.HALVES:
        items += _halves_legend(pool, by, glyphs)
    elif by is ColourBy.OWNER:
        items += _owner_legend(layout, glyphs)
    elif by is ColourBy.STATE:
        items += _state_legend(layout, glyphs)
    else:
        items += _scale_legend(pool, layout, by, glyphs)
    return fit_whole(items, width)


def _halves_legend(pool: PoolFrame, by: ColourBy, glyphs: Glyphs) -> list[Item]:
    """Colours say it alone; what is faint comes last."""
    upper, lower, both = [*glyphs.halves]
    scale = (theme.STRONG,) if by is ColourBy.OWNER else SCALES[by][1:]
    if by in (ColourBy.STATE, ColourBy.AGE):
        scale = scale[::-1]
    faint = () if by is ColourBy.STATE else (theme.FAINT,)  # what is cached has a colour there
    samples = _samples(zip(both * len(_BARE[by]), (*scale, *faint), _BARE[by], strict=True))
    return [*_words(f"{upper} upper {lower} lower "), *samples, *_words(f"{glyphs.free} free", _since(pool, by))]


def _since(pool: PoolFrame, by: ColourBy) -> str:
    """From where on a mode knows anything."""
    is_late = by.needs_traces and pool.traces is not None and pool.traces.since_step
    return f"since step {pool.traces.since_step}" if is_late and pool.traces is not None else ""


def _owner_legend(layout: GridLayout, glyphs: Glyphs) -> list[Item]:
    if layout.zoom is Zoom.GROUPS:
        low, high = glyphs.levels[1], glyphs.levels[-1]
        words = _words(f"{low} few", f"{high} all held", f"{glyphs.cached} cached")
        tints = [(high, style) for style in theme.TINTS[1:]]
        some, half, most = _samples((*tint, word) for tint, word in zip(tints, ("some", "half", "most"), strict=True))
        return [*words, [("shared ", theme.SOFT), *some], half, most]
    states = f"{glyphs.reserved} reserved", f"{glyphs.free} free", f"{glyphs.cached} cached"
    if layout.zoom <= Zoom.SLOTS:
        return _words(f"{glyphs.written} written", *states, " number: refs")
    return _words(f"{glyphs.full} full", f"{glyphs.partly} partly", *states, " 2+ shared")


def _state_legend(layout: GridLayout, glyphs: Glyphs) -> list[Item]:
    by = ColourBy.STATE
    words = ("full", "partly", "reserved", "cached", "free")
    samples = _samples(zip(reversed(alphabet(by, glyphs)), reversed(SCALES[by]), words, strict=True))
    if layout.zoom >= Zoom.DENSE:
        return samples
    return [*samples, *_words(" number: refs" if layout.zoom <= Zoom.SLOTS else " 2+ shared")]


def _scale_legend(pool: PoolFrame, layout: GridLayout, by: ColourBy, glyphs: Glyphs) -> list[Item]:
    """Near, a number is exact and its colour says how much; further away one character says it too."""
    words = _WORDS[by] if by is ColourBy.AGE or layout.zoom <= Zoom.SLOTS else ("",) * len(_WORDS[by])
    digits = glyphs.written * len(words) if layout.zoom <= Zoom.SLOTS else _DIGITS[by]
    scale = SCALES[by][::-1] if by is ColourBy.AGE else SCALES[by][1:]
    notes = [_UNITS[by]] if layout.zoom <= Zoom.SLOTS else []
    if by is not ColourBy.AGE and layout.zoom > Zoom.SLOTS:
        notes.append(f"{glyphs.many} ten or more")
    if since := _since(pool, by):
        notes.append(since.replace("since", "? before") if by is ColourBy.AGE else since)
    empty = f"{glyphs.cached} cached" if by is ColourBy.REFS else f"{glyphs.reserved} reserved"
    return [*_samples(zip(digits, scale, words, strict=True)), *_words(*notes, empty, f"{glyphs.free} free")]


_DIGITS = {ColourBy.REFS: "1234", ColourBy.AGE: "01234", ColourBy.REUSE: "0123"}
_WORDS = {
    ColourBy.REFS: ("1", "2", "3", "4+"),
    ColourBy.AGE: ("now", "<10", "<100", "<1000", "more steps"),
    ColourBy.REUSE: ("0", "1", "2", "3+"),
}
_BARE = {
    ColourBy.OWNER: ("shared", "cached"),
    ColourBy.STATE: ("full", "partly", "reserved", "cached"),
    ColourBy.REFS: (*_WORDS[ColourBy.REFS], "cached"),
    ColourBy.AGE: (*_WORDS[ColourBy.AGE][:-1], "older"),
    ColourBy.REUSE: (*_WORDS[ColourBy.REUSE], "reserved"),
}
_UNITS = {ColourBy.REFS: "number: refs", ColourBy.AGE: "number: steps", ColourBy.REUSE: "number: hits"}


def _words(*words: str) -> list[Item]:
    return [[(f"{word} ", theme.SOFT)] for word in words if word]


def _samples(samples: Iterable[tuple[str, Style, str]]) -> list[Item]:
    """Characters in their colours, each with its words."""
    return [[(letter, style), (f" {words} " if words else " ", theme.SOFT)] for letter, style, words in samples]
