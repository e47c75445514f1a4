"""What the user does to look at something: go to panes, blocks, requests and moments, filter, zoom, choose colours."""

from kvscope.dashboard.block_grid import BlockGrid
from kvscope.dashboard.copies import HOST
from kvscope.dashboard.deck import POOLS, Deck
from kvscope.dashboard.dialogue import open_dialogue
from kvscope.dashboard.events_pane import EventsPane
from kvscope.dashboard.filter_screen import FilterChanged, FilterScreen
from kvscope.dashboard.filters import blocks_of, request_of, sequence_of
from kvscope.dashboard.pane import StripPane
from kvscope.dashboard.prompting import PromptingApp
from kvscope.dashboard.requests_pane import RequestsPane
from kvscope.dashboard.selection import shown_sequence
from kvscope.dashboard.table_pane import TablePane


class ChoosingApp(PromptingApp):
    """An app with a deck of panes; each of them says what was chosen in it, and all of them show it."""

    @property
    def deck(self) -> Deck:
        """Also while a dialogue lies above it."""
        return self.screen_stack[0].query_one(Deck)

    def draw(self) -> None:
        """Draw all panes again; the dashboard knows how."""
        raise NotImplementedError

    # --- blocks ---------------------------------------------------------------------------------------------------

    def on_block_grid_cursor_moved(self, message: BlockGrid.CursorMoved) -> None:
        self.chosen.point(message.block_id, message.letter)
        self.draw()

    def on_block_grid_picked(self, message: BlockGrid.Picked) -> None:
        """The next of the block's holders."""
        frame, key = self._frame, self.chosen.key
        holders = frame.holders(message.block_id, frame.host if message.letter == HOST else frame.pool)
        if holders:
            names = [name for name, _ in holders]
            following = names.index(key) + 1 if key in names else 0
            self.select(names[following % len(names)])

    def on_block_grid_colour_clicked(self) -> None:
        self.action_colour()

    def on_table_pane_token_pointed(self, message: TablePane.TokenPointed) -> None:
        self.chosen.point(message.block_id)
        self.draw()

    def action_zoom(self, step: int) -> None:
        self._zoomed().change_zoom(step)
        self.draw()

    def action_zoom_auto(self) -> None:
        self._zoomed().change_zoom(None)
        self.draw()

    def _zoomed(self) -> BlockGrid:
        """The grid that has the focus, else the block pool's."""
        return self.focused if isinstance(self.focused, BlockGrid) else self.query_one("#grid", BlockGrid)

    def action_colour(self) -> None:
        """Colours say something else of each block."""
        self.chosen.colour_by = self.chosen.colour_by.following
        self.draw()

    def on_pools_rearranged(self) -> None:
        self.call_after_refresh(self.draw)

    # --- requests, sequences and events ---------------------------------------------------------------------------

    def select(self, key: str | None) -> None:
        """Light up a request's or a sequence's blocks, or nothing."""
        self.chosen.key = key
        self.deck.query_one(RequestsPane).stop_following()
        self.draw()

    def on_requests_pane_chosen(self, message: RequestsPane.Chosen) -> None:
        self.select(message.key)

    def on_requests_pane_rearranged(self) -> None:
        self.draw()

    def on_table_pane_chosen(self, message: TablePane.Chosen) -> None:
        self.select(message.key)

    def on_events_pane_jumped(self, message: EventsPane.Jumped) -> None:
        """To the event's block and request, and to its moment: of a live engine, the view is frozen first."""
        entry = message.entry
        blocks, name = blocks_of(entry), sequence_of(entry.event) or request_of(entry.event)
        if blocks:
            self.chosen.point(blocks[-1])
        self.select(name or self.chosen.key)
        self.go_to_seq(entry.seq)

    async def action_filter(self) -> None:
        name = "events" if self.focused is not None and self.focused.id == "events" else "requests"
        self.action_pane(name)
        text = self.query_one(f"#{name}", StripPane).filter_text
        await open_dialogue(self, FilterScreen(name, text))

    def on_filter_changed(self, message: FilterChanged) -> None:
        self.deck.query_one(f"#{message.pane}", StripPane).set_filter(message.text, message.query)
        self.draw()

    def action_watch(self, what: str) -> None:
        """Look back from the block on show, or from the selected request."""
        if what.startswith("block"):
            block_id, pool = self.chosen.block_on_show(self._frame)
            if pool is self._frame.host:
                self.tell("one can look back from a block of the pool, not of the host pool", severity="warning")
            elif block_id is not None:
                self.chosen.cursor = block_id  # the next look back is at the same block
                self.look_back(what, block_id, pool.name(block_id))
            else:
                self.tell("choose a block first: the cursor keys in the pool", severity="warning")
            return
        shown = shown_sequence(self._frame, self.chosen.key)
        if shown is not None:
            if self.chosen.key is None:
                self.select(shown[0].request_id)  # the next look back is at the same request
            self.look_back(what, shown[0].request_id, shown[0].request_id)
        elif self._player is not None:
            self.tell("no request at this moment to look back from", severity="warning")

    # --- panes ----------------------------------------------------------------------------------------------------

    def action_go(self, name: str) -> None:
        """To a pane, also from the prompt."""
        self.action_pane(name)

    def action_pane(self, name: str) -> None:
        self.screen_stack[0].set_class(name == "insight", "-insight")
        if name not in (*POOLS, "insight"):
            self.deck.bring_to_front(name)
        self.screen.set_focus(self.deck.query_one(f"#{name}"))
        self.call_after_refresh(self.draw)

    async def action_back(self) -> None:
        """One level out: the insight screen, the token, the selection, then the cursor, then the past."""
        table = self.deck.query_one(TablePane)
        if self.screen_stack[0].has_class("-insight"):
            self.action_pane("grid")
        elif table.token is not None:
            table.point(None)
        elif self.chosen.key is not None:
            self.select(None)
        elif self.chosen.cursor is not None or self.chosen.host_cursor is not None:
            self.chosen.point(None)
            self.draw()
        else:
            self.action_live()
