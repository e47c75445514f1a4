"""One key marks the moment on show, live or past, and asks for a note."""

import asyncio
from typing import NamedTuple

from kvscope.dashboard.bookmarks import BookmarkList, NoteScreen
from kvscope.dashboard.dialogue import open_dialogue
from kvscope.dashboard.time_travel import TimeTravelApp
from kvscope.transport.recording.bookmarks import Bookmark, clean
from kvscope.transport.recording.tap import Tap
from kvscope.transport.timetravel import Place


class _Moment(NamedTuple):
    seq: int
    event: int


class BookmarkingApp(TimeTravelApp):
    """Keeps the bookmarks of the engine life on show, and has the player stop at them."""

    _bookmarks: BookmarkList | None = None

    def action_bookmark(self) -> None:
        self.run_worker(self._ask_for_note(), exit_on_error=False)

    def note_here(self) -> str:
        """Of the bookmark at the moment on show in the past; empty: none, or one without a note."""
        if self._player is None:
            return ""
        moment, bookmarks = self._moment_on_show(), self._bookmarks_on_show()
        if moment is None or bookmarks is None:
            return ""
        return bookmarks.note_at(*moment) or ""

    def mark_places(self) -> None:
        """Tell the player which moments are marked."""
        player, bookmarks = self._player, self._bookmarks_on_show()
        if player is None or bookmarks is None or not player.length:
            return
        index = player.index
        before = index.seq_at(0)
        first, last = index.seqs[0] if before is None else before, index.seqs[-1]
        player.mark(Place(index.after_seq(one.seq), one.event) for one in bookmarks if first <= one.seq <= last)

    async def _ask_for_note(self) -> None:
        """About the moment on show: a player stops first, so that it stays that one while the user writes."""
        if self._player is not None:
            await asyncio.to_thread(self._player.pause)
        moment, bookmarks = self._moment_on_show(), self._bookmarks_on_show()
        if moment is None or bookmarks is None:
            self.notify("nothing has happened yet that could be marked", timeout=3)
            return
        note = bookmarks.note_at(*moment)

        def keep(answer: str | None) -> None:
            if answer is not None:
                kept = clean(
                    Bookmark(seq=moment.seq, event=moment.event, note=answer or (None if note is not None else ""))
                )
                self.run_worker(self._keep(bookmarks, kept), exit_on_error=False)

        await open_dialogue(self, NoteScreen(note), keep)

    async def _keep(self, bookmarks: BookmarkList, bookmark: Bookmark) -> None:
        tap: Tap | None = getattr(self._source, "tap", None)
        if tap is not None and self._source.view.state.epoch == bookmarks.epoch:
            await asyncio.to_thread(tap.bookmark, bookmark, self._source.view)
        try:
            await asyncio.to_thread(bookmarks.add, bookmark)
        except OSError as error:
            self.notify(f"kept until you leave: {error.strerror}", severity="warning", markup=False)
        self.mark_places()
        self.draw_top()

    def _moment_on_show(self) -> _Moment | None:
        if self._player is None:
            seq = self._source.view.last_seq
            return None if seq is None else _Moment(seq, 0)
        position, event = self._player.place
        seq = self._player.index.seq_at(position)
        return None if seq is None else _Moment(seq, event)

    def _bookmarks_on_show(self) -> BookmarkList | None:
        epoch = self._source.view.state.epoch if self._player is None else self._player.index.epoch
        if epoch and (self._bookmarks is None or self._bookmarks.epoch != epoch):
            self._bookmarks = BookmarkList(epoch, getattr(self._source, "bookmarks", ()))
        return self._bookmarks if epoch else None
