"""Stop strings: where a text ends because the user said so."""

from collections.abc import Sequence


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string begins."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(found, default=None)


def cut_at_stop(text: str, new_text: str, stops: Sequence[str]) -> str:
    """The part of `new_text` before the first stop string. A stop string that began in `text` leaves what was said."""
    place = first_stop(text + new_text, stops)
    return new_text if place is None else (text + new_text)[len(text) : place]
