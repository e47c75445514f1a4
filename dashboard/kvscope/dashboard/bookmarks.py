"""Bookmarks of the moments on show: in the recording this viewer writes, if it does; and always in the user's own list.

A list belongs to an engine life, not to a file: it is there for every recording of that life, wherever it lies and
whoever wrote it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import platformdirs
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import ModalScreen
from textual.widgets import Input

from kvscope.dashboard.state_files import append_line, read_lines
from kvscope.transport.recording.bookmarks import MAX_NOTE_CHARACTERS, Bookmark, clean, latest

_decoder = msgspec.json.Decoder(Bookmark)


class BookmarkList:
    """One life's bookmarks: what recordings hold, then the user's own, which are read once and appended at once."""

    def __init__(self, epoch: bytes, recorded: Iterable[Bookmark] = ()) -> None:
        self.epoch = epoch
        self._path = platformdirs.user_state_path("kvscope") / "bookmarks" / f"{epoch.hex()}.jsonl"
        self._latest = latest([*recorded, *_read(self._path)])

    def __iter__(self) -> Iterator[Bookmark]:
        return iter(self._latest)

    def note_at(self, seq: int, event: int) -> str | None:
        """None: no bookmark there."""
        return next((one.note for one in self._latest if (one.seq, one.event) == (seq, event)), None)

    def add(self, bookmark: Bookmark) -> None:
        """In memory, then on disk. Raises OSError: it is kept until the dashboard is left."""
        self._latest = latest([*self._latest, bookmark])
        append_line(self._path, msgspec.json.encode(bookmark))


def _read(path: Path) -> list[Bookmark]:
    """Lines that are none are skipped."""
    return [bookmark for line in read_lines(path) if (bookmark := _parse(line)) is not None]


def _parse(line: bytes) -> Bookmark | None:
    try:
        return clean(_decoder.decode(line))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class NoteScreen(ModalScreen[str | None]):
    """Asks for the note of the moment on show. Enter keeps it, Esc leaves things as they are."""

    BINDINGS: ClassVar = [Binding("escape", "leave", "close", show=False)]

    def __init__(self, note: str | None) -> None:
        super().__init__()
        self._note = note

    def compose(self) -> ComposeResult:
        is_new = self._note is None
        line = Input(self._note or "", placeholder="what is to be seen here", id="note", max_length=MAX_NOTE_CHARACTERS)
        line.border_title = "Bookmark with a note" if is_new else "Bookmark: empty takes it away"
        yield line

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())

    def action_leave(self) -> None:
        self.dismiss(None)
