"""Moments somebody has marked, with a note: kept in a recording's channel of their own, or in a list beside it."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from kvscope.events.text import make_printable

MAX_NOTE_CHARACTERS = 200
MAX_BOOKMARKS = 1000

_Place = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Bookmark(msgspec.Struct, frozen=True, kw_only=True):
    """The moment after batch `seq` and `event` events of the next one. Without a note it takes an earlier one away."""

    seq: _Place
    event: _Place = 0
    note: str | None = None


_decoder = msgspec.msgpack.Decoder(Bookmark)


def encode_bookmark(bookmark: Bookmark) -> bytes:
    return msgspec.msgpack.encode(bookmark)


def decode_bookmark(data: bytes) -> Bookmark | None:
    """Its note made printable; None for what is not a bookmark: the recording is as good without it."""
    try:
        return clean(_decoder.decode(data))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def clean(bookmark: Bookmark) -> Bookmark:
    """With a note that is short and safe for a terminal."""
    if bookmark.note is None:
        return bookmark
    return msgspec.structs.replace(bookmark, note=make_printable(bookmark.note.strip()[:MAX_NOTE_CHARACTERS]))


def latest(bookmarks: Iterable[Bookmark]) -> list[Bookmark]:
    """In the order of their moments; of several for one moment the last counts. The newest, if there are too many."""
    found: dict[tuple[int, int], Bookmark] = {}
    for bookmark in bookmarks:
        place = bookmark.seq, bookmark.event
        found.pop(place, None)
        if bookmark.note is not None:
            found[place] = bookmark
    return sorted(list(found.values())[-MAX_BOOKMARKS:], key=lambda bookmark: (bookmark.seq, bookmark.event))
