"""Foreign text made printable: what a terminal would obey or hide becomes a visible symbol.

Prompts, model output, ids, file metadata and exception texts pass through here once, when they enter the viewer.
The mapping is per character, so an escape sequence split over two events is defused all the same.
"""

import unicodedata
from typing import Any

_REPLACEMENT = "�"
_TEXTLESS = frozenset({int, float, bool, type(None)})
_CONTROL_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "␡"}
# Cc: C1 controls. Cf: bidi, zero-width, tags. Cs: lone surrogates. Zl, Zp: line and paragraph separators.
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


class _PrintableTable(dict[int, str]):
    """A `str.translate` table that decides about a character once, when it first appears."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = _REPLACEMENT if unicodedata.category(character) in _UNPRINTABLE else character
        return self[code]


_TABLE = _PrintableTable(_CONTROL_PICTURES)


def make_printable(text: str) -> str:
    """Each character of `text`, with controls as control pictures and other invisible characters as U+FFFD.

    The result has as many characters as `text`, and none that a terminal acts upon.
    """
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_TABLE)


def printable_strings(value: Any) -> Any:
    """A value of plain types, every string in it made printable."""
    if isinstance(value, str):
        return make_printable(value)
    if isinstance(value, list | tuple):
        if _TEXTLESS.issuperset(map(type, value)):  # block lists: millions of numbers
            return list(value)
        return [printable_strings(item) for item in value]
    if isinstance(value, dict):
        return {make_printable(key) if isinstance(key, str) else key: printable_strings(v) for key, v in value.items()}
    return value


def counted(number: int, thing: str) -> str:
    """`1 block`, `2 blocks`, `1,024 batches`."""
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"
