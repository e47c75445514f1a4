"""The timeline as a widget: a click or a drag on it moves the player."""

from textual import events
from textual.message import Message

from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.pane import StripWidget, key_names_of
from kvscope.dashboard.playback import Folder, TimelineDrawing, draw_playback, read_moment, read_usage, stretch
from kvscope.transport.timetravel import Player


class TimelineBar(StripWidget):
    """Hidden while nothing is played."""

    class Pointed(Message):
        """The user wants the moment after `position` batches."""

        def __init__(self, position: int) -> None:
            super().__init__()
            self.position = position

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, TimelineBar.Pointed)

    class Ended(Message):
        """The end of a recording has been reached."""

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._glyphs, self._fold = glyphs, Folder()
        self._drawing = TimelineDrawing([], 0, 0)
        self._length = 0
        self._pointed: int | None = None
        self._has_ended: bool | None = None  # None: not drawn yet

    def draw(self, player: Player | None, seq: int | None, width: int, bar_height: int, note: str = "") -> None:
        """`seq` is of the batch that the panes show last."""
        if player is None:
            self.show([])
            return
        self._length = player.length
        moment = read_moment(player, seq, note)
        if moment.ended and self._has_ended is False:
            self.post_message(self.Ended())
        self._has_ended = moment.ended
        keys = key_names_of(self)
        self._drawing = draw_playback(
            moment, read_usage(player), self._glyphs, width, bar_height, fold=self._fold, keys=keys
        )
        self.show(self._drawing.lines)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._pointed = None
        self._point(event.x)
        self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button:
            self._point(event.x)

    def on_mouse_up(self) -> None:
        self.release_mouse()

    def _point(self, x: int) -> None:
        cell = min(max(x - self._drawing.first_cell, 0), self._drawing.width - 1)
        if not self._length:
            return
        position = stretch(cell, self._length, self._drawing.width)[1]
        if position != self._pointed:
            self._pointed = position
            self.post_message(self.Pointed(position))
