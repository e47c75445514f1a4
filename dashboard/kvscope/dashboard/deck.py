"""The panes of the screen: where each is, and what it shows of a frame and of what the user has chosen."""

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from kvscope.dashboard.events_pane import EventsPane
from kvscope.dashboard.footer import KeyFooter
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.insight_pane import InsightPane
from kvscope.dashboard.keys import PANES, KeyNames
from kvscope.dashboard.pane import StripPane, StripWidget
from kvscope.dashboard.panes import BlockPane, TextPane
from kvscope.dashboard.pools import Pools, host_title
from kvscope.dashboard.prompt import PromptBar
from kvscope.dashboard.requests_pane import RequestsPane
from kvscope.dashboard.screen_size import Arrangement
from kvscope.dashboard.selection import Selection, Shown, shown_sequence
from kvscope.dashboard.table_pane import TablePane
from kvscope.dashboard.timeline_bar import TimelineBar

POOLS = ("grid", "host")  # panes with blocks


class Deck(Vertical):
    """Everything but the message that the terminal is too small. `hint` stands where requests will be."""

    def __init__(self, glyphs: Glyphs, prompt: PromptBar, keys: KeyNames, *, hint: str) -> None:
        super().__init__(id="deck")
        self.header, self.gauge, self.banner = (StripWidget(id=name) for name in ("header", "gauge", "banner"))
        self.timeline = TimelineBar(glyphs, id="playback")
        self.pools, self.block = Pools(glyphs, id="pools"), BlockPane(glyphs, id="block")
        self.requests = RequestsPane(glyphs, id="requests", hint=hint)
        self.table, self.text = TablePane(glyphs, id="table"), TextPane(glyphs, id="text")
        self.events, self.insight = EventsPane(glyphs, id="events"), InsightPane(glyphs, id="insight")
        self._prompt, self._keys = prompt, keys
        self._front = "requests"  # the pane below the grid in the compact arrangement
        panes = (self.pools.device, self.pools.host, self.block, self.requests, self.table, self.text, self.events)
        self._panes: dict[str | None, StripPane] = {pane.id: pane for pane in (*panes, self.insight)}

    def compose(self) -> ComposeResult:
        yield from (self.header, self.gauge, self.timeline, self.banner)
        with Horizontal(id="main"):
            with Vertical(id="left"):
                yield from (self.pools, self.block)
            with Vertical(id="right"):
                yield from (self.requests, self.table, self.text)
        yield from (self.events, self.insight, self._prompt)
        yield KeyFooter()

    def bring_to_front(self, name: str) -> None:
        """The pane below the grid, where there is room for one."""
        self._front = name
        self.show_front()

    def show_front(self) -> None:
        for name in PANES:
            if name not in (*POOLS, "insight"):
                self._panes[name].set_class(name == self._front, "-front")
        self.query_one("#right").set_class(self._front not in ("block", "events"), "-front")

    def show_cells(self, frame: Frame, chosen: Selection) -> None:
        """The part of the picture that is seen at a glance."""
        self.pools.show(frame, chosen.key, chosen.cursor, chosen.host_cursor, chosen.colour_by)
        self.insight.observe(frame)

    def show_words(self, frame: Frame, chosen: Selection) -> None:
        """The part that is read."""
        block_id, pool = chosen.block_on_show(frame)
        self.block.show(frame, block_id, pool)
        self.requests.show(frame, chosen.key, chosen.holders_of_cursor(frame))
        shown = shown_sequence(frame, chosen.key)
        whole = shown is not None and chosen.key == shown[0].request_id and len(shown[0].sequences) > 1
        self.table.show(frame, shown, whole=whole)
        self.text.show(shown)
        self.events.show(frame.log)
        self.insight.redraw()
        if frame.info is not None:
            self._prompt.max_model_len = frame.info.max_model_len
        titles = {**PANES, **self._titles_of_lists(), **_titles_of_sequence(shown, whole=whole)}
        titles["grid"] += f"  by {chosen.colour_by.value}"
        titles["host"] = host_title(frame.host, self.pools.host.size.width)
        if block_id is not None:
            is_chosen = chosen.cursor is not None or pool is frame.host
            titles["block"] = f"Block {pool.name(block_id)}" + ("" if is_chosen else ", touched last")
        self._entitle(titles)

    def _titles_of_lists(self) -> dict[str, str]:
        return {name: f"{PANES[name]}  {self._panes[name].note}".rstrip() for name in ("requests", "events")}

    def _entitle(self, titles: dict[str, str]) -> None:
        """Each with its key; where one pane is shown at a time, the others are named below it."""
        key_of = self._keys.pane
        screen = self.screen
        one_at_a_time = screen.has_class(Arrangement.COMPACT.value) and not screen.has_class("-tall")
        others = [f"{key_of(name)} {PANES[name]}" for name in PANES if name not in (*POOLS, self._front)]
        for name, title in titles.items():
            pane = self._panes[name]
            pane.set_title(f"{key_of(name)} {title}")
            if name not in POOLS:
                pane.set_subtitle("  ".join(others) if one_at_a_time and name == self._front else "")


def _titles_of_sequence(shown: Shown | None, *, whole: bool) -> dict[str, str]:
    if shown is None:
        return {"table": "Block table", "text": "Text"}
    request, sequence = shown
    of_sequence = f" of {sequence.sequence_id}{' (swapped out)' if sequence.host_table else ''}"
    what = "Beams" if request.params.beam_width > 1 else "Candidates"
    table = f"{what} of {request.request_id}, side by side" if whole else f"Block table{of_sequence}"
    return {"table": table, "text": f"Text{of_sequence}"}
