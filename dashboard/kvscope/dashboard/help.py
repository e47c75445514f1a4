"""The help screen: every key, written from the bindings, and what the glyphs mean."""

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import ModalScreen
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.block_grid import BlockGrid
from kvscope.dashboard.events_pane import EventsPane
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.keys import DEFAULT_NAMES, KEYS, KeyNames, key_names
from kvscope.dashboard.pane import StripPane, key_names_of
from kvscope.dashboard.prompt import PromptInput
from kvscope.dashboard.requests_pane import RequestsPane
from kvscope.dashboard.strips import Part, make_strip, wrap_parts
from kvscope.dashboard.table_pane import TablePane

_PAST = ("recording", "history")
_OPTIONS = (
    "text, then options: n=2 max_tokens=64 temperature=0.8 top_k top_p seed stop ignore_eos; "
    "beam_width=4 length_penalty=1.0: beam search instead of drawing"
)
_ABOUT = {
    "grid": ("Block pool", "every physical block of the pool; the colour is the request that holds it"),
    "requests": ("Requests", "requests and their sequences; the selected one's blocks are lit in the pool"),
    "table": ("Block table", "one sequence's logical blocks, where each lies in the pool, and the text in its slots"),
    "text": ("Text", "what was asked, and what the model has written so far"),
    "events": ("Events", "what happened, as sentences; the newest is followed until you go up"),
    "block": ("Block", "the block under the cursor: its holders and its slots"),
    "host": ("Host pool", "blocks of host memory that preempted requests are swapped out to; see --swap-space"),
    "insight": ("Insight", "where the memory goes, and what reserving maxima would take for the same requests"),
    "prompt": ("Prompt", _OPTIONS),
}
_PANE_KEYS: dict[str, type[StripPane]] = {
    "grid": BlockGrid,
    "host": BlockGrid,
    "requests": RequestsPane,
    "table": TablePane,
    "events": EventsPane,
}


def draw_help(glyphs: Glyphs, width: int, focused: str | None = None, *, keys: KeyNames = DEFAULT_NAMES) -> list[Strip]:
    """The focused pane's own keys, then all keys by the place they work in, then the legend."""
    strips: list[Strip] = []
    if focused in _ABOUT:
        strips += _place(focused, width)
    everywhere = [(keys.all(key), key.about + _needs(key.needs)) for key in KEYS if key.needs not in _PAST]
    moving = [("F2 F3 F4 ...", "The pane of that number, also while writing"), ("Tab", "Next pane")]
    strips += _section("Everywhere", [*everywhere, *moving], width)
    past = [(keys.all(key), key.about) for key in KEYS if key.needs in _PAST]
    strips += _section("In a recording, and in an engine's past", past, width)
    for name in (*_PANE_KEYS, "prompt"):
        if name not in (focused, "host"):  # the host pool's keys are the block pool's
            strips += _place(name, width)
    strips += _section("Every pane", _of(StripPane.BINDINGS), width)
    return [*strips, *_section("Signs", _legend(glyphs), width)]


def _place(name: str, width: int) -> list[Strip]:
    title, about = _ABOUT[name]
    if name == "prompt":
        rows = [*_of(PromptInput.BINDINGS), ("", about)]
    else:
        keys = _PANE_KEYS.get(name, StripPane)
        rows = [*_of(keys.BINDINGS), ("", about)]
    return _section(title, rows, width)


def _of(bindings: Iterable[object]) -> list[tuple[str, str]]:
    return [(key_names(b.key), b.description) for b in bindings if isinstance(b, Binding)]


def _needs(what: str) -> str:
    return " (live)" if what in ("engine", "live") else ""


def _section(title: str, rows: list[tuple[str, str]], width: int) -> list[Strip]:
    lines: list[Strip] = [make_strip([(title, theme.BRAND)], width)]
    for keys, about in rows:
        head: Part = (f"  {keys:<16}", theme.STRONG)
        body = wrap_parts([(about, theme.TEXT)], max(width - 18, 10))
        lines.append(Strip.join([make_strip([head]), body[0]]).adjust_cell_length(width))
        lines += [Strip.join([make_strip([(" " * 18, theme.PLAIN)]), more]) for more in body[1:]]
    return [*lines, make_strip([], width)]


def _legend(glyphs: Glyphs) -> list[tuple[str, str]]:
    return [
        (glyphs.written, "written slot: its KV is there; as a block: full"),
        (glyphs.reserved, "reserved, not written: held, but no KV yet"),
        (glyphs.partly, "block with written and reserved slots"),
        (glyphs.free, "free"),
        (glyphs.cached, "cached: no table points at it, content kept"),
        ("2", "ref count: how many block tables point at the block"),
        (glyphs.copy, "copy-on-write: a private copy before a write to a shared block"),
        (glyphs.preempt, "preempted: gave up its blocks; KV is computed again later, or swapped to the host"),
        (glyphs.cross, "refused request, or batches that were dropped"),
        (glyphs.warning, "on the timeline: the audit found something"),
        ("colour", "the request that holds the block"),
    ]


class HelpPane(StripPane):
    def __init__(self, glyphs: Glyphs, focused: str | None) -> None:
        super().__init__(id="help-pane")
        self._glyphs, self._focused = glyphs, focused

    def draw(self, width: int) -> list[Strip]:
        return draw_help(self._glyphs, width, self._focused, keys=key_names_of(self))


class HelpScreen(ModalScreen[None]):
    """Closed by any of the keys one would try."""

    BINDINGS: ClassVar = [Binding("escape,question_mark,f1,q,enter", "dismiss_help", "close", show=False)]

    def __init__(self, glyphs: Glyphs, focused: str | None = None) -> None:
        super().__init__()
        self._glyphs, self._focused = glyphs, focused

    def compose(self) -> ComposeResult:
        pane = HelpPane(self._glyphs, self._focused)
        pane.border_title = "Help"
        pane.border_subtitle = "Esc closes"
        yield pane

    def action_dismiss_help(self) -> None:
        self.dismiss(None)
