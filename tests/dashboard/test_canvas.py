"""Whatever is painted, in whatever order, skipped or not: the terminal shows the picture."""

import re

import pyte
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard.canvas import Canvas, transition

WIDTH, HEIGHT = 12, 3
STYLES = [
    None, Style(color="red"), Style(color="bright_blue", bgcolor="#102030"), Style(bold=True), Style(reverse=True),
    Style(bold=True, italic=True, color="#ff8000"), Style(underline=True, strike=True), Style(bgcolor="green"),
]  # fmt: skip
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


TEXTS = st.text("ab .│■界世é\x1b\x9b\n", max_size=8)  # control characters must never get through
STRIPS = st.lists(st.builds(Segment, TEXTS, st.sampled_from(STYLES), st.none()), max_size=4).map(Strip)
PAINT = st.tuples(st.integers(0, WIDTH - 1), st.integers(0, HEIGHT - 1), STRIPS)
CELL = st.tuples(st.integers(0, WIDTH), st.sampled_from("xy│"), st.sampled_from(["", "1", "31"]))
CELLS = st.lists(CELL, max_size=4, unique_by=lambda cell: cell[0]).map(sorted)
PUT = st.tuples(st.integers(0, WIDTH - 1), st.integers(0, HEIGHT - 1), CELLS)
STEPS = st.lists(st.one_of(PAINT, PUT, st.sampled_from(["send", "lose"])), max_size=30)


class Terminal:
    """What a person would see."""

    def __init__(self) -> None:
        self.screen = pyte.Screen(WIDTH, HEIGHT)
        self.screen.reset_mode(pyte.modes.DECAWM)  # as Textual has it
        self._stream = pyte.Stream(self.screen)

    def feed(self, text: str) -> None:
        self._stream.feed(text)

    def lose(self) -> None:
        """Anything may stand there, in any colour."""
        self.feed("\x1b[31;45m" + "".join(f"\x1b[{y + 1};1H" + "?" * WIDTH for y in range(HEIGHT)) + "\x1b[m")

    def rows(self) -> list[list[pyte.screens.Char]]:
        return [[self.screen.buffer[y][x] for x in range(WIDTH)] for y in range(HEIGHT)]


@settings(deadline=None)
@given(steps=STEPS, colors=st.sampled_from([ColorSystem.STANDARD, ColorSystem.EIGHT_BIT, ColorSystem.TRUECOLOR]))
def test_changes_bring_the_terminal_to_what_a_whole_picture_shows(steps: list[object], colors: ColorSystem) -> None:
    canvas, terminal = Canvas(colors), Terminal()
    canvas.resize(WIDTH, HEIGHT)
    for step in steps:
        if step == "lose":
            terminal.lose()
            canvas.forget()
        elif step == "send":
            changes = canvas.take_changes()
            assert not {"\n", "\x9b"} & {*changes}
            terminal.feed(changes)
        elif isinstance(step[2], Strip):  # type: ignore[index]
            canvas.paint(*step)  # type: ignore[misc]
        else:
            canvas.put(*step)  # type: ignore[misc]
    for graphemes, _ in canvas._wanted:  # no half of a wide one is left over
        assert [cell_len(grapheme) == 2 for grapheme in graphemes] == [*(g == "" for g in graphemes[1:]), False]
        assert graphemes[0]
    terminal.feed(canvas.take_changes())
    assert not canvas.differs()
    whole = Terminal()
    canvas.forget()
    whole.feed(canvas.take_changes())
    assert terminal.rows() == whole.rows()
    assert terminal.screen.cursor.attrs == whole.screen.default_char  # nothing left on for whoever writes next


@settings(deadline=None)
@given(strip=STRIPS, x=st.integers(0, WIDTH - 1))
def test_a_strip_looks_as_textual_would_have_drawn_it(strip: Strip, x: int) -> None:
    strip = Strip([Segment(CONTROL.sub("", text), style) for text, style, _ in strip]).crop(0, WIDTH - x)
    canvas, ours, textuals = Canvas(ColorSystem.TRUECOLOR), Terminal(), Terminal()
    canvas.resize(WIDTH, HEIGHT)
    canvas.paint(x, 1, strip)
    ours.feed(canvas.take_changes())
    textuals.feed(f"\x1b[2;{x + 1}H")
    for text, style, _ in strip:
        textuals.feed(f"\x1b[0;{Strip.render_ansi(style, ColorSystem.TRUECOLOR) if style else ''}m{text}")
    assert ours.rows() == textuals.rows()


def apply(attributes: dict[str, str], sequence: str) -> dict[str, str]:
    """What a terminal makes of one SGR sequence: attributes by name."""
    off = {"22": "12", "23": "3", "24": "4", "25": "56", "27": "7", "29": "9"}
    codes = iter(sequence.removeprefix("\x1b[").removesuffix("m").split(";"))
    for code in codes if sequence else ():
        if code in {"", "0"}:
            attributes = {}
        elif code in off:
            attributes = {name: value for name, value in attributes.items() if name not in off[code]}
        elif code in {"38", "48"}:
            mode = next(codes)
            value = [mode, *(next(codes) for _ in range(3 if mode == "2" else 1))]
            attributes = {**attributes, {"38": "ink", "48": "ground"}[code]: ";".join([code, *value])}
        elif code in {"39", "49"}:
            attributes = {name: v for name, v in attributes.items() if name != {"39": "ink", "49": "ground"}[code]}
        elif len(code) == 1:
            attributes = {**attributes, code: code}
        else:
            attributes = {**attributes, "ground" if code[0] == "4" or len(code) == 3 else "ink": code}
    return attributes


SGR = st.tuples(
    st.lists(st.sampled_from("12345679"), unique=True).map(sorted),
    st.sampled_from([[], ["31"], ["97"], ["38;5;200"], ["38;2;1;4;9"]]),
    st.sampled_from([[], ["41"], ["107"], ["48;5;1"], ["48;2;10;22;30"]]),
).map(lambda parts: ";".join([code for part in parts for code in part]))


@given(before=SGR, after=SGR)
def test_a_transition_ends_with_the_attributes_wanted_and_costs_no_more_than_saying_them_all(
    before: str, after: str
) -> None:
    sequence = transition(before, after)
    assert apply(apply({}, f"\x1b[{before}m"), sequence) == apply({}, f"\x1b[{after}m")
    assert len(sequence) <= len(f"\x1b[0;{after}m")


def test_cells_that_stay_are_not_sent_again() -> None:
    canvas = Canvas(ColorSystem.TRUECOLOR)
    canvas.resize(80, 24)
    canvas.take_changes()
    canvas.paint(0, 5, Strip([Segment("free blocks: 41 of 64" + " " * 59)]))
    canvas.take_changes()
    canvas.paint(0, 5, Strip([Segment("free blocks: 40 of 64" + " " * 59)]))
    assert canvas.take_changes() == "\x1b[6;15H0"
    canvas.paint(0, 5, Strip([Segment("free blocks: 40 of 64" + " " * 59)]))
    assert not canvas.differs()
    assert canvas.take_changes() == ""
