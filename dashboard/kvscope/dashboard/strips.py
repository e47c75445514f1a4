"""Building strips from styled words. Text is measured in terminal cells and never read as markup."""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.theme import FAINT, TEXT

Part = tuple[str, Style]


def make_strip(parts: Iterable[Part], width: int | None = None) -> Strip:
    """One line; with `width`, cropped or padded to exactly that many cells."""
    segments = [Segment(text, style) for text, style in parts if text]
    length = sum([cell_len(segment.text) for segment in segments])
    if width is not None and length < width:  # at once: a strip is dear to make
        segments.append(Segment(" " * (width - length)))
        length = width
    strip = Strip(segments, length)
    return strip if width is None else strip.adjust_cell_length(width)


def merged(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one style as one part: fewer escape sequences, less to compare."""
    found: list[Part] = []
    for text, style in parts:
        if found and found[-1][1] is style:
            found[-1] = (found[-1][0] + text, style)
        elif text:
            found.append((text, style))
    return found


def measure(parts: Iterable[Part]) -> int:
    return sum(cell_len(text) for text, _ in parts)


def clip(text: str, width: int, glyphs: Glyphs) -> str:
    """The start of `text` that fits `width` cells, an ellipsis showing that there is more."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(width - 1, 0)).rstrip() + glyphs.ellipsis if width > 0 else ""


def fit_parts(parts: Sequence[Part], room: int, glyphs: Glyphs) -> list[Part]:
    """The first of these that fit `room` cells, the last one clipped."""
    fitted: list[Part] = []
    for text, style in parts:
        left = room - measure(fitted)
        if measure([(text, style)]) > left:
            return [*fitted, (clip(text, left, glyphs), style)]
        fitted.append((text, style))
    return fitted


def fit_whole(items: Iterable[Sequence[Part]], room: int) -> list[Part]:
    """As many of these as fit `room` cells whole, from the first on; the space after the last one need not."""
    fitted: list[Part] = []
    for item in items:
        if cell_len("".join(text for text, _ in (*fitted, *item)).rstrip()) > room:
            break
        fitted += item
    return fitted


def clip_start(text: str, width: int, glyphs: Glyphs) -> str:
    """The end of `text` that fits `width` cells: what a model wrote last."""
    if cell_len(text) <= width:
        return text
    tail = text[-max(width - 1, 0) :] if width > 1 else ""
    while cell_len(tail) > width - 1:
        tail = tail[1:]
    return glyphs.ellipsis + tail.lstrip() if width > 0 else ""


def pad(text: str, width: int) -> str:
    """`text` in exactly `width` cells."""
    return set_cell_size(text, width)


def flat(text: str, glyphs: Glyphs) -> str:
    """Line breaks as one visible sign, so that a text stays on its line."""
    return text.replace("\r", "").replace("\n", glyphs.newline).replace("␊", glyphs.newline).replace("\t", " ")


def quote_piece(piece: str, glyphs: Glyphs) -> str:
    """A token's text in quotes, so that its spaces can be seen."""
    return f'"{flat(piece, glyphs)}"'


def piece_parts(pieces: Sequence[str], style: Style, glyphs: Glyphs) -> list[Part]:
    """Token texts side by side with a thin bar between them, so that their spaces can be seen."""
    parts: list[Part] = []
    for index, piece in enumerate(pieces):
        if index:
            parts.append((glyphs.bar, FAINT))
        parts.append((flat(piece, glyphs), style))
    return parts


def wrap_parts(parts: Sequence[Part], width: int) -> list[Strip]:
    """Break styled text into lines of `width` cells, at spaces where there are some, and at line breaks."""
    lines: list[list[Part]] = [[]]
    room = width
    for text, style in parts:
        for number, paragraph in enumerate(text.replace("␊", "\n").split("\n")):
            if number:
                lines.append([])
                room = width
            for word in _words(paragraph):
                fits = cell_len(word) <= room or room == width
                if not fits:
                    lines.append([])
                    room = width
                for chunk in _chunks(word if fits else word.lstrip(" "), width):
                    if cell_len(chunk) > room:
                        lines.append([])
                        room = width
                    lines[-1].append((chunk, style))
                    room -= cell_len(chunk)
    return [make_strip(line, width) for line in lines]


def columns(left: Sequence[Part], right: Sequence[Part], width: int) -> Strip:
    """`left` at the left edge, `right` at the right edge; the left one gives way when both do not fit."""
    room = max(width - measure(right), 0)
    return Strip.join([make_strip(left, room), make_strip(right)]).adjust_cell_length(width)


def blank(width: int) -> Strip:
    return make_strip([(" " * width, TEXT)])


def _words(text: str) -> list[str]:
    words, start = [], 0
    for index in range(1, len(text)):
        if text[index] == " " and text[index - 1] != " ":
            words.append(text[start:index])
            start = index
    return [*words, text[start:]] if text else []


def _chunks(word: str, width: int) -> list[str]:
    if cell_len(word) <= width:
        return [word]
    chunks, chunk, size = [], "", 0
    for character in word:
        cells = cell_len(character)
        if size + cells > width:
            chunks.append(chunk)
            chunk, size = "", 0
        chunk += character
        size += cells
    return [*chunks, chunk]
