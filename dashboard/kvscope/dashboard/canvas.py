"""The screen in cells, as Textual wants it and as the terminal has it, and the shortest way from one to the other.

Textual sends whole lines of whole widgets. Here they are laid into a picture, and only cells that differ from what
the terminal was last sent become bytes: a jump, the change of colours, the characters. The difference is taken when
there is room on the line, never earlier, so any number of pictures may be skipped in between.

A cell is one grapheme and its SGR parameters. A grapheme two cells wide has "" in its second cell.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from rich.cells import cell_len, split_graphemes
from rich.color import ColorSystem
from rich.style import Style
from textual.strip import Strip

MAX_STYLES = 4096  # to remember
MAX_LAID = 64  # stretches of a line that are told apart
SHORT_GAP = 4  # a jump costs as much as this many cells
# What Rich can say: attributes by the group that one code switches off, and that code.
_GROUP = {"1": "weight", "2": "weight", "3": "slant", "4": "line", "21": "line", "5": "blink", "6": "blink"}
_GROUP |= {"7": "reverse", "8": "hidden", "9": "strike", "51": "frame", "52": "frame", "53": "overline"}
_OFF = {"weight": "22", "slant": "23", "line": "24", "blink": "25", "reverse": "27", "hidden": "28", "strike": "29"}
_OFF |= {"frame": "54", "overline": "55", "ink": "39", "ground": "49"}
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


class Row(NamedTuple):
    """One line of cells."""

    graphemes: list[str]
    styles: list[str]


class Sgrs:
    """SGR parameters of styles, remembered by a style's id: to hash one takes longer."""

    def __init__(self, find: Callable[[Style | None], str]) -> None:
        self._find = find
        self._known: dict[int, tuple[Style | None, str]] = {}  # as long as a style is kept its id is no other's

    def of(self, style: Style | None) -> str:
        known = self._known.get(id(style))
        return known[1] if known is not None else self._remember(style)

    def _remember(self, style: Style | None) -> str:
        if len(self._known) >= MAX_STYLES:
            self._known.clear()
        sgr = self._find(style)
        self._known[id(style)] = style, sgr
        return sgr


class Canvas:
    """What the screen should show, and what the terminal has been sent."""

    def __init__(self, colors: ColorSystem) -> None:
        self.sgrs = Sgrs(lambda style: Strip.render_ansi(style, colors) if style else "")  # in this terminal's colours
        self.width = self.height = 0
        self._wanted: list[Row] = []
        self._sent: list[Row | None] = []  # None: anything may stand there
        self._dirty: dict[int, list[Iterable[int]]] = {}  # by line: the columns that were laid, each time
        self._narrow = set(map(chr, range(32, 127)))  # characters known to take one cell

    def resize(self, width: int, height: int) -> bool:
        """If this is another size: everything is blank, and anything may stand on the terminal."""
        is_new = (width, height) != (self.width, self.height)
        if is_new:
            self.width, self.height = width, height
            self._wanted = [Row([" "] * width, [""] * width) for _ in range(height)]
            self.forget()
        return is_new

    def forget(self) -> None:
        """The terminal may show anything: the next changes are the whole picture."""
        self._sent = [None] * self.height
        self._dirty = {y: [range(self.width)] for y in range(self.height)}

    def paint(self, x: int, y: int, strip: Strip, sgrs: Sgrs | None = None, num_blanks: int = 0) -> None:
        """Lay a strip into the picture, and blanks after it; what would lie outside of it is cut off. `sgrs` may know
        styles by others.
        """
        sgrs = sgrs or self.sgrs
        cells, styles = self._lay_out(strip, sgrs)
        if num_blanks:
            cells, styles = [*cells, *" " * num_blanks], styles + [sgrs.of(None)] * num_blanks
        self.lay(x, y, cells, styles)

    def lay(self, x: int, y: int, cells: Sequence[str], cell_styles: Sequence[str]) -> None:
        """The same with cells: a grapheme and the SGR parameters for each."""
        if not 0 <= y < self.height or x >= self.width:
            return
        graphemes, styles = self._wanted[y]
        if graphemes[x] == "":  # the first half of a wide one is left alone: a terminal blanks it
            graphemes[x - 1] = " "
        stop = x + len(cell_styles)
        graphemes[x:stop], styles[x:stop] = cells, cell_styles
        if stop < len(graphemes) and graphemes[stop] == "":
            graphemes[stop] = " "
        if self.width < len(graphemes) and graphemes[self.width] == "":
            graphemes[self.width - 1] = " "  # it does not fit
        del graphemes[self.width :], styles[self.width :]
        self._soil(y, range(max(x - 1, 0), min(stop + 1, self.width)))

    def put(self, x: int, y: int, cells: Sequence[tuple[int, str, str]]) -> None:
        """The same with single cells, from left to right: where each is, counted from `x`, its grapheme, one wide, and
        its style.
        """
        if not 0 <= y < self.height:
            return
        graphemes, styles = self._wanted[y]
        columns, last = [], self.width - 1
        for column, grapheme, style in cells:
            at = x + column
            if at < last and graphemes[at] and graphemes[at + 1]:
                graphemes[at], styles[at] = grapheme, style
                columns.append(at)
            else:  # at the edge, or half of a wide one
                self.lay(at, y, grapheme, [style])
        self._soil(y, columns)

    def _soil(self, y: int, columns: Iterable[int]) -> None:
        laid = self._dirty.setdefault(y, [])
        laid.append(columns)
        if len(laid) > MAX_LAID:  # the line has been busy for long
            self._dirty[y] = [range(self.width)]

    def _lay_out(self, strip: Strip, sgrs: Sgrs) -> tuple[Sequence[str], list[str]]:
        """The cells of a strip, and the style of each."""
        texts: list[str] = []
        styles: list[str] = []
        for text, style, control in strip:
            if not control:
                texts.append(text)
                styles += [sgrs.of(style)] * len(text)
        joined = "".join(texts)
        if not self._narrow.issuperset(joined):
            self._narrow.update(char for char in {*joined} - self._narrow if cell_len(char) == 1)
        return (joined, styles) if self._narrow.issuperset(joined) else _split(texts, styles)

    def differs(self) -> bool:
        """Whether the terminal shows something else than it should."""
        self._dirty = {y: laid for y, laid in self._dirty.items() if self._wanted[y] != self._sent[y]}
        return bool(self._dirty)

    def take_changes(self) -> str:
        """What brings the terminal from what it was sent to what it should show; it counts as sent from now on."""
        pieces: list[str] = []
        style = ""
        for y, laid in sorted(self._dirty.items()):
            wanted, sent = self._wanted[y], self._sent[y]
            columns = _changed(wanted, sent, laid)
            if columns:
                style = _write_row(pieces, y, wanted, _spans(wanted.styles, columns), style)
                self._sent[y] = _now_sent(wanted, sent, columns)
        self._dirty.clear()
        return "".join(pieces) + transition(style, "")


def _split(texts: Sequence[str], styles: Sequence[str]) -> tuple[list[str], list[str]]:
    """Graphemes into cells, one or two each; control characters get none, whoever sent them."""
    cells: list[str] = []
    cell_styles: list[str] = []
    first = 0
    for text in texts:
        for start, stop, width in split_graphemes(text)[0]:
            grapheme = _CONTROL.sub("", text[start:stop])
            if width:
                cells += [grapheme or " ", *[""] * (width - 1)]
                cell_styles += [styles[first + start]] * width
        first += len(text)
    return cells, cell_styles


def _changed(wanted: Row, sent: Row | None, laid: Sequence[Iterable[int]]) -> Sequence[int]:
    """The columns of a line, in order, that differ from what was sent: no others than were laid."""
    graphemes, styles = wanted
    if sent is None:
        return range(len(graphemes))
    columns = laid[0] if len(laid) == 1 else sorted(set[int]().union(*laid))
    old_graphemes, old_styles = sent
    return [x for x in columns if graphemes[x] != old_graphemes[x] or styles[x] != old_styles[x]]


def _now_sent(wanted: Row, sent: Row | None, columns: Sequence[int]) -> Row:
    """What was sent, brought up to date where it differed."""
    if sent is None:
        return Row(wanted.graphemes[:], wanted.styles[:])
    for x in columns:
        sent.graphemes[x], sent.styles[x] = wanted.graphemes[x], wanted.styles[x]
    return sent


def _spans(styles: Sequence[str], columns: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open intervals of columns to write, with short gaps where they cost less than a jump."""
    spans: list[tuple[int, int]] = []
    start = stop = -SHORT_GAP
    for x in columns:
        if x != stop and (x - stop >= SHORT_GAP or len({*styles[stop - 1 : x]}) > 1):
            spans.append((start, stop))
            start = x
        stop = x + 1
    return [*spans[1:], (start, stop)]


def _write_row(pieces: list[str], y: int, row: Row, spans: list[tuple[int, int]], style: str) -> str:
    """Append what writes these columns; `style` is the one in force before, the result the one afterwards."""
    graphemes, styles = row
    at: int | None = None  # where the terminal's cursor is
    for start, end in spans:
        stop = end
        while stop < len(graphemes) and not graphemes[stop]:
            stop += 1  # the other half of a wide grapheme
        x = start
        while x < stop:
            pieces.append("" if x == at else f"\x1b[{y + 1};{x + 1}H" if at is None else f"\x1b[{x - at}C")
            wanted, first = styles[x], x
            x += 1
            while x < stop and styles[x] == wanted and len(graphemes[x - 1]) < 2:
                x += 1
            if wanted != style:
                pieces.append(transition(style, wanted))
                style = wanted
            pieces.extend(graphemes[first:x])
            at = x if len(graphemes[x - 1]) < 2 else None  # terminals disagree about the widths of sequences
    return style


@lru_cache(maxsize=1 << 11)  # the pairs in use, not every pair of hours
def transition(before: str, after: str) -> str:
    """The shortest escape sequence from one set of SGR parameters to another, both counted from the default."""
    if before == after:
        return ""
    if not after:
        return "\x1b[m"
    old, new = _groups(before), _groups(after)
    changes = [_OFF[name] for name in old if name not in new]
    for name, codes in new.items():
        if name in old and old[name] != codes and name not in {"ink", "ground"}:
            changes.append(_OFF[name])  # attributes of a group add up
        if old.get(name) != codes:
            changes.append(codes)
    whole = f"0;{after}" if before else after
    return f"\x1b[{min(';'.join(changes), whole, key=len)}m"


def _groups(sgr: str) -> dict[str, str]:
    """SGR parameters by what switches them off together."""
    found: dict[str, str] = {}
    codes = iter(sgr.split(";") if sgr else ())
    for code in codes:
        name = _GROUP.get(code) or ("ground" if code[0] == "4" or code[:2] == "10" else "ink")
        if code in {"38", "48"}:
            mode = next(codes)
            found[name] = ";".join([code, mode, *(next(codes) for _ in range(3 if mode == "2" else 1))])
        else:
            found[name] = f"{found[name]};{code}" if name in found else code
    return found


def colors_of(name: str | None) -> ColorSystem:
    """A colour system by Rich's name of it; where there are no colours, filters have seen to that."""
    return {"standard": ColorSystem.STANDARD, "256": ColorSystem.EIGHT_BIT}.get(name or "", ColorSystem.TRUECOLOR)
