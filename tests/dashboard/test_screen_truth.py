"""The screen read back: random pools drawn by the real widgets at every zoom, every cell and number decoded.

The decoder knows the legend and the glyphs, as a user does, and nothing of how the grid is laid out or drawn. What it
reads is compared with plain lists, block by block: id, slots, ref count, logical number, holders, texts, colour.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest
from dashboard_story import engine_info
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.style import Style
from test_app import strips_of, until
from textual.app import App
from textual.geometry import Region

from kvscope.dashboard import theme
from kvscope.dashboard.app import DashboardApp
from kvscope.dashboard.block_grid import BlockGrid
from kvscope.dashboard.cards import build_captions
from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.frames import Frame, FrameBuilder, build_frame
from kvscope.dashboard.glyphs import ASCII, UNICODE, Glyphs
from kvscope.dashboard.grid_layout import MAX_CARDS, Zoom, lay_out
from kvscope.dashboard.header import draw_gauge
from kvscope.dashboard.minimap import blocks_in_view, draw_map
from kvscope.dashboard.owners import owner_code
from kvscope.dashboard.palettes import DARK
from kvscope.dashboard.pools import host_title
from kvscope.dashboard.selection import light_of
from kvscope.events.columns import Column
from kvscope.events.state import Counters, EngineState, RequestState, SequenceState
from kvscope.events.traces import Traces
from kvscope.events.types import SamplingParams
from kvscope.transport.source import View

NOW = 9_999  # the step of every picture


class World(NamedTuple):
    """A pool in plain lists; `tables` by sequence. What is selected, and where the cursor is."""

    block_size: int
    refs: list[int]
    written: list[int]
    tables: dict[str, list[int]]
    counters: Counters
    selected: str | None
    cursor: int | None
    letter: str = "P"  # of the pool; H: the host's
    num_written: Mapping[str, int] = {}  # positions, by sequence; of the host's pool
    by: ColourBy = ColourBy.OWNER
    ages: tuple[int | None, ...] = ()  # of each block's last write, in steps; None: not seen
    hits: tuple[int, ...] = ()

    def holders(self, block_id: int) -> list[str]:
        return [f"{name} L{table.index(block_id)}" for name, table in self.tables.items() if block_id in table]

    def texts(self, block_id: int) -> list[str]:
        """Of its written slots, as the first holder has them."""
        first = next(table for table in self.tables.values() if block_id in table)
        start = first.index(block_id) * self.block_size
        return [f"t{start + slot}" for slot in range(self.written[block_id])]

    def slots(self, block_id: int, glyphs: Glyphs) -> str:
        held, written = self.refs[block_id] > 0, self.written[block_id]
        full, empty = (glyphs.written, glyphs.reserved) if held else (glyphs.cached, glyphs.free)
        return full * written + empty * (self.block_size - written)

    def state(self, block_id: int, glyphs: Glyphs) -> str:
        """The block as one character."""
        written = self.written[block_id]
        if not self.refs[block_id]:
            return glyphs.cached if written else glyphs.free
        return glyphs.reserved if not written else glyphs.full if written == self.block_size else glyphs.partly

    def count(self, block_id: int) -> str:
        """The ref count as far zooms show it."""
        refs = self.refs[block_id]
        return "" if refs < 2 else str(refs) if refs < 10 else "+"

    def number(self, block_id: int) -> str:
        """What the mode counts, in three characters at most; as near zooms show it."""
        refs, written = self.refs[block_id], self.written[block_id]
        if self.by not in (ColourBy.AGE, ColourBy.REUSE):
            return str(refs or "")
        number = self.ages[block_id] if self.by is ColourBy.AGE else self.hits[block_id]
        if not written or number is None:
            return "?" if written else ""
        return str(number) if number < 1000 else f"{number // 1000}k"

    def digit(self, block_id: int) -> str:
        """The same in one character, or none where it says nothing."""
        if self.by is ColourBy.AGE:
            number = self.number(block_id)
            return number if number in ("", "?", "0") else str(min(len(str(self.ages[block_id])), 4))
        if self.by is ColourBy.REUSE:
            return self.number(block_id) if self.hits[block_id] < 10 else "+" * (self.written[block_id] > 0)
        if self.by is ColourBy.REFS:
            return self.count(block_id) or str(self.refs[block_id] or "")
        return self.count(block_id)

    def char(self, block_id: int, glyphs: Glyphs) -> str:
        """A cell of its own in a far zoom."""
        return (self.digit(block_id) if self.by is not ColourBy.STATE else "") or self.state(block_id, glyphs)

    def colour(self, block_id: int) -> str:
        lit = self.tables.get(self.selected or "", [])
        if lit and block_id not in lit:
            return DARK["faint"]
        if self.by is ColourBy.STATE:
            kinds = dict(zip("~_=#", ("owner-4", "owner-5", "owner-2", "owner-1"), strict=True))
            return DARK[kinds.get(self.state(block_id, ASCII), "faint")]
        if self.by is not ColourBy.OWNER:
            return DARK[ramp(self.by, self.digit(block_id))]
        owners = {name.rpartition(".")[0] for name, table in self.tables.items() if block_id in table}
        if len(owners) != 1:
            return DARK["strong"] if owners else DARK["faint"]
        return DARK[f"owner-{owner_code(owners.pop())}"]

    def ink(self, block_id: int) -> str | None:
        """As half a cell: nothing where it is free."""
        if block_id == self.cursor:
            return DARK["cursor"]
        return self.colour(block_id) if self.refs[block_id] or self.written[block_id] else None


def ramp(by: ColourBy, digit: str) -> str:
    """The name of the colour that a digit of a mode has."""
    colours = ("soft", "share-1", "share-2", "share-3")
    order = {ColourBy.REFS: "1234", ColourBy.REUSE: "0123", ColourBy.AGE: "3210"}[by]
    if digit.isdecimal() and by is not ColourBy.AGE:
        return colours[min(order.index(digit) if digit in order else 3, 3)]
    return colours[order.index(digit)] if digit and digit in order else "share-3" if digit == "+" else "faint"


@st.composite
def worlds(draw: st.DrawFn, min_blocks: int, max_blocks: int) -> World:
    num_blocks, block_size = draw(st.integers(1, max_blocks)), draw(st.integers(1, 5))
    ids = st.integers(0, num_blocks - 1)
    names = [f"r{request}.{index}" for request in (1, 2, 9) for index in range(draw(st.integers(1, 5)))]
    tables = {name: draw(st.lists(ids, max_size=min(num_blocks, 40), unique=True), name) for name in names}
    refs = [0] * num_blocks
    for block_id in (block_id for table in tables.values() for block_id in table):
        refs[block_id] += 1
    random = draw(st.randoms(use_true_random=False))
    written = [random.randint(0, block_size) if count else random.choice([0, block_size]) for count in refs]
    counters = Counters(copies=draw(st.integers(0, 999)), preemptions=draw(st.integers(0, 99)))
    selected = draw(st.none() | st.sampled_from(names), "selected")
    ages = tuple(random.choice([None, 0, random.randint(1, 9), random.randint(9, 100), 999, 4321]) for _ in refs)
    hits = tuple(random.choice([0, 1, 2, 3, 9, 10, 1234]) for _ in refs)
    by, cursor = draw(st.sampled_from(ColourBy), "by"), draw(st.none() | ids, "cursor")
    return World(block_size, refs, written, tables, counters, selected, cursor, by=by, ages=ages, hits=hits)


@st.composite
def host_worlds(draw: st.DrawFn, max_blocks: int) -> World:
    """Swapped-out requests: their sequences share blocks at the beginning, and each may have more of its own."""
    num_blocks, block_size = draw(st.integers(1, max_blocks)), draw(st.integers(1, 5))
    unused = draw(st.permutations(range(num_blocks)))
    refs, written = [0] * num_blocks, [0] * num_blocks
    tables: dict[str, list[int]] = {}
    num_written: dict[str, int] = {}
    for request in (1, 2, 9):
        trunk, unused = unused[:2], unused[2:]
        for index in range(draw(st.integers(1, 4))):
            own, unused = unused[: (count := draw(st.integers(0, 2)))], unused[count:]
            table, name = [*trunk, *own], f"r{request}.{index}"
            missing = draw(st.integers(0, block_size - 1)) if own else 0
            tables[name], num_written[name] = table, len(table) * block_size - missing
            for block_id in table:
                refs[block_id] += 1
                written[block_id] = block_size - (missing if block_id == table[-1] else 0)
    selected = draw(st.none() | st.sampled_from([*tables]), "selected")
    cursor = draw(st.none() | st.integers(0, num_blocks - 1), "cursor")
    by = draw(st.sampled_from([ColourBy.OWNER, ColourBy.STATE, ColourBy.REFS]), "by")
    return World(block_size, refs, written, tables, Counters(), selected, cursor, "H", num_written, by)


def frame_of(world: World) -> Frame:
    requests: dict[str, RequestState] = {}
    for name, table in world.tables.items():
        request_id = name.rpartition(".")[0]
        pieces = [f"t{position}" for position in range(len(table) * world.block_size)]
        if request_id not in requests:
            requests[request_id] = RequestState(
                request_id=request_id, prompt="a prompt", prompt_token_ids=[], prompt_pieces=[],
                params=SamplingParams(), sequences=[], status="running",
            )  # fmt: skip
        where = {"block_table" if world.letter == "P" else "host_table": table}
        requests[request_id].sequences.append(
            SequenceState(sequence_id=name, pieces=pieces, num_written=world.num_written.get(name, 0), **where)
        )
    on_host = world.letter == "H"
    state = EngineState(
        info=engine_info(1 if on_host else len(world.refs), world.block_size),
        ref_counts=Column([0] if on_host else world.refs),
        written_slots=Column([0] if on_host else world.written),
        host_ref_counts=world.refs if on_host else [],
        requests=requests,
        counters=world.counters,
    )
    view = View()
    view.replace_state(state, 1)
    builder = FrameBuilder()
    if world.ages:
        state.step, state.traces = NOW, Traces(len(world.refs), since_step=100)
        state.traces.writes = Column([0 if age is None else NOW - 100 + 1 - age for age in world.ages])
        state.traces.hits = Column(world.hits)
        builder.wants_traces = True
    return build_frame(view, builder)


EMPTY = World(1, [0], [0], {}, Counters(), None, None)


class Cell(NamedTuple):
    char: str
    style: Style


class PictureApp(App[None]):
    """The grid, as the dashboard has it."""

    CSS_PATH = Path(inspect.getfile(DashboardApp)).with_name("dashboard.tcss")

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        self.glyphs = glyphs

    def compose(self):
        yield BlockGrid(self.glyphs, id="grid")

    def show(self, frame: Frame, world: World) -> None:
        pool = frame.host if world.letter == "H" else frame.pool
        light = light_of(frame, world.selected, world.cursor, world.letter)._replace(by=world.by)
        self.query_one(BlockGrid).show(pool, light, build_captions(frame, pool))

    def lines(self, region: Region) -> list[list[Cell]]:
        """What is on the screen there."""
        strips = [strip.crop(region.x, region.right) for strip in strips_of(self)]
        visible = strips[region.y : region.bottom]
        return [[Cell(char, style) for text, style, _ in strip for char in text] for strip in visible]

    def read_grid(self) -> list[list[Cell]]:
        """Every line of the grid, scrolled through from top to bottom, and its legend."""
        grid = self.query_one(BlockGrid)
        found: dict[int, list[Cell]] = {}
        while len(found) < grid.virtual_size.height:
            grid.scroll_to(y=len(found), animate=False, force=True)
            found |= enumerate(self.lines(grid.scrollable_content_region), start=grid.scroll_offset.y)
        return [found[y] for y in sorted(found)]


def words(line: list[Cell]) -> str:
    return "".join(cell.char for cell in line)


def check_style(world: World, block_id: int, cell: Cell, *, on_glyph: bool) -> None:
    """`on_glyph`: the cursor is on the glyph itself; else it is on the block's name."""
    if on_glyph and block_id == world.cursor:
        assert cell.style.bgcolor is not None
        assert cell.style.bgcolor.name == DARK["cursor"]
    else:
        assert cell.style.color is not None
        assert cell.style.color.name == world.colour(block_id), f"colour of P{block_id}"


def check_name(world: World, block_id: int, cell: Cell) -> None:
    is_marked = cell.style.bgcolor is not None and cell.style.bgcolor.name == DARK["cursor"]
    assert is_marked == (block_id == world.cursor), f"the cursor, at P{block_id}"


def is_clipped(shown: str, whole: str, glyphs: Glyphs) -> bool:
    return shown.endswith(glyphs.ellipsis) and whole.startswith(shown[: -len(glyphs.ellipsis)].rstrip())


def read_near(world: World, lines: list[list[Cell]], glyphs: Glyphs, zoom: Zoom) -> list[int]:
    """CARDS and SLOTS: name, slots, ref count, and what is beside or below them; the ids in order."""
    pattern = re.compile(
        rf"{world.letter}(\d+) +([{re.escape(glyphs.written + glyphs.reserved + glyphs.cached + glyphs.free)}]+) "
    )
    seen = []
    for y, line in enumerate(lines):
        matches = list(pattern.finditer(words(line)))
        for match, following in zip_longest(matches, matches[1:]):
            block_id, stop = int(match[1]), following.start() if following else len(line)
            seen.append(block_id)
            assert match[2] == world.slots(block_id, glyphs)
            check_name(world, block_id, line[match.start()])
            check_style(world, block_id, line[match.start(2)], on_glyph=False)
            tail = words(line[match.end() : stop]).rstrip()
            below = words(lines[y + 1][match.start() : stop]).rstrip() if y + 1 < len(lines) else ""
            if zoom is Zoom.CARDS:
                check_card(world, block_id, tail, below, glyphs)
            else:
                room = matches[1].start() - matches[0].end() if len(matches) > 1 else 0
                check_slots(world, block_id, tail, below, glyphs, room=room)
    return seen


def check_card(world: World, block_id: int, tail: str, below: str, glyphs: Glyphs) -> None:
    refs, holders = world.refs[block_id], world.holders(block_id)
    if not refs:
        number = f"{world.number(block_id)} ".lstrip()
        assert (tail, below) == (f"{number}cached" if world.written[block_id] else "free", "")
        return
    number = world.number(block_id)
    whole = f"{number} " * bool(number) + f" {glyphs.separator} ".join(holders)
    assert tail == whole or is_clipped(tail, whole, glyphs)
    texts = glyphs.bar.join(world.texts(block_id)) or "reserved, nothing written yet"
    assert below == texts or is_clipped(below, texts, glyphs)


def check_slots(world: World, block_id: int, tail: str, below: str, glyphs: Glyphs, *, room: int) -> None:
    """The logical number is left out where cells stand close together, or the number before it leaves no room."""
    holders, lit = world.holders(block_id), world.tables.get(world.selected or "", [])
    logical = f"L{lit.index(block_id)}" if block_id in lit else ""
    number = world.number(block_id)
    both = f"{number} {logical}"
    assert tail.split() == both.split() or (room < max(7, len(both) + 1) and tail == number)
    if below and not below.lstrip().startswith(world.letter):
        more = f" +{len(holders) - 1}" if len(holders) > 1 else ""
        whole = f"{holders[0]}{more}"
        assert below == whole or is_clipped(below, whole, glyphs)


def read_blocks(world: World, lines: list[list[Cell]], glyphs: Glyphs) -> list[int]:
    """BLOCKS: a glyph and a number each, with names where there is room, else in rows that begin with one."""
    seen = []
    for line in (line for line in lines if words(line).strip()):
        text = words(line)
        names = list(re.finditer(world.letter + r"(\d+) +", text))
        first = int(names[0][1]) if names else 0
        if len(names) == 1 and len(text[names[0].end() :].split()) > 1:
            starts = [(first + index, x) for index, x in enumerate(range(names[0].end(), len(text.rstrip()), 3))]
        else:
            starts = [(int(match[1]), match.end()) for match in names]
            for match in names:
                check_name(world, int(match[1]), line[match.start()])
        for block_id, x in starts:
            seen.append(block_id)
            assert text[x] == world.state(block_id, glyphs)
            assert text[x + 1 : x + 3].strip() == world.digit(block_id)
            check_style(world, block_id, line[x], on_glyph=True)
    return seen


def read_dense(world: World, lines: list[list[Cell]], glyphs: Glyphs) -> list[int]:
    """DENSE: one character per block; a ref count above one in place of the state."""
    seen = []
    for line in (line for line in lines if words(line).strip()):
        text = words(line)
        name = re.match(rf" *{world.letter}(\d+) ", text)
        assert name
        for block_id, x in enumerate(range(name.end(), len(text.rstrip())), start=int(name[1])):
            seen.append(block_id)
            assert text[x] == world.char(block_id, glyphs)
            check_style(world, block_id, line[x], on_glyph=True)
    return seen


def read_halves(world: World, lines: list[list[Cell]], glyphs: Glyphs) -> list[int]:
    """HALVES: in each cell a block and, below it, one of the row of blocks that follows; both by colour alone."""
    seen = []
    shown = [line for line in lines if words(line).strip()]
    columns = len(words(shown[0]).split(maxsplit=1)[1].rstrip())
    for line in shown:
        text = words(line)
        name = re.match(rf" *{world.letter}(\d+) ", text)
        assert name
        below = []
        for block_id, x in enumerate(range(name.end(), len(text.rstrip())), start=int(name[1])):
            inks = inks_of(line[x], line[0], glyphs)
            for place, ink in zip((block_id, block_id + columns), inks, strict=True):
                assert ink == (world.ink(place) if place < len(world.refs) else None), f"P{place}"
            seen.append(block_id)
            below += [block_id + columns] if block_id + columns < len(world.refs) else []
        seen += below
    return seen


def inks_of(cell: Cell, label: Cell, glyphs: Glyphs) -> tuple[str | None, str | None]:
    """The colours of a cell's halves; None: the pane's ground, as under the label."""
    text, ground = (colour.name if colour is not None else None for colour in (cell.style.color, cell.style.bgcolor))
    ground = ground if cell.style.bgcolor != label.style.bgcolor else None
    upper, lower, both = glyphs.halves
    return {glyphs.free: (None, None), upper: (text, ground), lower: (ground, text), both: (text, text)}[cell.char]


def read_groups(world: World, lines: list[list[Cell]], glyphs: Glyphs, group: int) -> list[int]:
    """GROUPS: how many of a cell's blocks are held, in steps; in colours, how many of these are shared."""
    seen = []
    for line in (line for line in lines if words(line).strip()):
        text = words(line)
        name = re.match(rf" *{world.letter}(\d+) ", text)
        assert name
        for start, x in zip(range(int(name[1]), len(world.refs), group), range(name.end(), len(text)), strict=False):
            blocks = range(start, min(start + group, len(world.refs)))
            if text[x] == " ":
                break
            seen += blocks
            check_group(world, blocks, line[x], glyphs)
    return seen


def check_group(world: World, blocks: range, cell: Cell, glyphs: Glyphs) -> None:
    if world.by is not ColourBy.OWNER:
        check_told_group(world, blocks, cell, glyphs)
        return
    held = [block_id for block_id in blocks if world.refs[block_id]]
    level = glyphs.levels[-(-len(held) * (len(glyphs.levels) - 1) // len(blocks))]
    assert cell.char == (level if held or not any(world.written[b] for b in blocks) else glyphs.cached)
    lit = [block_id for block_id in blocks if block_id in world.tables.get(world.selected or "", [])]
    if world.cursor in blocks:
        check_style(world, world.cursor, cell, on_glyph=True)
    elif lit or not held or world.tables.get(world.selected or "", []):
        check_style(world, (lit or held or blocks)[0], cell, on_glyph=True)
    else:
        num_shared = sum(world.refs[block_id] > 1 for block_id in held)
        thirds = sum(num_shared * 3 > third * len(held) for third in (0, 1, 2))
        assert cell.style.color is not None
        assert cell.style.color.name == DARK[("soft", "share-1", "share-2", "share-3")[thirds]]


def check_told_group(world: World, blocks: range, cell: Cell, glyphs: Glyphs) -> None:
    """By state what most are; else what the block with the largest number says."""
    chars = [world.char(block_id, glyphs) for block_id in blocks]
    order = {
        ColourBy.STATE: glyphs.free + glyphs.cached + glyphs.reserved + glyphs.partly + glyphs.full,
        ColourBy.REFS: glyphs.free + glyphs.cached + "123456789+",
        ColourBy.AGE: glyphs.free + glyphs.reserved + "?43210",
        ColourBy.REUSE: glyphs.free + glyphs.reserved + "0123456789+",
    }[world.by]
    by_count = {char: chars.count(char) if world.by is ColourBy.STATE else 1 for char in chars}
    assert cell.char == max(by_count, key=lambda char: (by_count[char], order.index(char)))
    lit = world.tables.get(world.selected or "", [])
    if world.cursor in blocks:
        check_style(world, world.cursor, cell, on_glyph=True)
    elif lit and not any(block_id in lit for block_id in blocks):
        check_style(world, blocks[0], cell, on_glyph=True)
    else:
        told = blocks[chars.index(cell.char)]
        check_style(world._replace(selected=None), told, cell, on_glyph=True)


def read_numbers(world: World, text: str) -> None:
    """The lines above the grid."""
    refs, written, size = world.refs, world.written, world.block_size
    held = [block_id for block_id, count in enumerate(refs) if count]
    shared = [block_id for block_id in held if refs[block_id] > 1]
    waste = sum(size - written[block_id] for block_id in held)
    expected = {
        r"(\d+)/(\d+) blocks": (len(held), len(refs)),
        r"shared (\d+)": (len(shared),),
        r"cached (\d+)": (sum(not count and slots > 0 for count, slots in zip(refs, written, strict=True)),),
        r"waste (\d+) slots (\d+)%": (waste, round(100 * waste / (len(held) * size)) if held else 0),
        r"CoW (\d+)": (world.counters.copies,),
        r"preempted (\d+)": (world.counters.preemptions,),
    }
    if saved := sum(refs[block_id] - 1 for block_id in shared):
        expected[r"saves (\d+)"] = (saved,)
    for pattern, numbers in expected.items():
        found = re.search(pattern, text)
        assert found, pattern
        assert tuple(map(int, found.groups())) == numbers, pattern


def read_back(app: PictureApp, world: World) -> None:
    """Show it, and compare what is on the screen then, at one zoom after the other."""
    glyphs = app.glyphs
    app.show(frame_of(world), world)
    grid = app.query_one(BlockGrid)
    for zoom in Zoom:
        grid.change_zoom(zoom - grid.layout_now.zoom)
        if grid.layout_now.zoom is not zoom:
            assert zoom <= Zoom.SLOTS or (zoom is Zoom.HALVES and not glyphs.halves)
            continue  # a card or a slot too many for this pool, or no half-block characters
        *lines, legend = app.read_grid()
        assert words(legend).startswith(f"c by {world.by.value} ")
        if zoom is Zoom.GROUPS:
            group = re.search(r"(\d+) blocks?/cell", words(legend))
            assert group
            seen = read_groups(world, lines, glyphs, int(group[1]))
        elif zoom <= Zoom.SLOTS:
            seen = read_near(world, lines, glyphs, zoom)
        else:
            read = {Zoom.BLOCKS: read_blocks, Zoom.DENSE: read_dense, Zoom.HALVES: read_halves}[zoom]
            seen = read(world, lines, glyphs)
        assert seen == list(range(len(world.refs))), f"blocks at {zoom.name}"


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
async def test_pools_can_be_read_from_the_screen_at_every_zoom(glyphs):
    """Small pools, with every zoom, large ones that must be scrolled, and hosts'; all examples in one running app."""
    app = PictureApp(glyphs)

    @settings(max_examples=25, deadline=None)
    @given(world=worlds(1, MAX_CARDS) | worlds(800, 1500) | host_worlds(MAX_CARDS))
    def compare(world: World) -> None:
        read_back(app, world)

    async with app.run_test(size=(72, 14)) as pilot:
        app.show(frame_of(EMPTY), EMPTY)
        await until(pilot, lambda: app.query_one("#grid").region.height > 2)
        compare()


@settings(max_examples=60, deadline=None)
@given(world=worlds(1, 200), width=st.integers(60, 250))
def test_the_numbers_above_the_grid_are_those_of_the_pool(world, width):
    read_numbers(world, "\n".join(strip.text for strip in draw_gauge(frame_of(world), UNICODE, width)))


@settings(max_examples=30, deadline=None)
@given(world=host_worlds(60), width=st.integers(60, 250))
def test_the_numbers_of_the_host_pool_are_those_of_its_blocks(world, width):
    frame = frame_of(world)
    held, shared = sum(count > 0 for count in world.refs), sum(count > 1 for count in world.refs)
    gauge = "\n".join(strip.text for strip in draw_gauge(frame, UNICODE, width))
    assert f" host {held}/{len(world.refs)} " in gauge
    title = host_title(frame.host, width)
    assert title.startswith(f"Host pool  {held}/{len(world.refs)} blocks")
    assert (f", {shared} shared" in title) == (shared > 0)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), world=worlds(20, 400), width=st.integers(30, 200))
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_the_map_shows_all_of_the_pool_and_which_part_is_in_view(glyphs, data, world, width):
    frame = frame_of(world)
    layout = lay_out(frame.pool, width, 1, Zoom.DENSE)
    top = data.draw(st.integers(0, layout.rows - 1), "top")
    in_view = blocks_in_view(frame.pool, layout, top, data.draw(st.integers(1, 9), "height"))
    light = light_of(frame, world.selected, world.cursor)._replace(by=world.by)
    cells, ruler = (
        [Cell(char, style) for text, style, _ in strip for char in text]
        for strip in draw_map(frame.pool, in_view, light, glyphs, width)
    )
    assert words(cells).startswith(" map ")
    seen: list[int] = []
    group = -(-len(world.refs) // (width - 6))
    for x, start in enumerate(range(0, len(world.refs), group), start=5):
        blocks = range(start, min(start + group, len(world.refs)))
        check_group(world, blocks, cells[x], glyphs)
        marked = ruler[x].style is not None and ruler[x].style.color == theme.BRAND.color
        assert marked == any(block_id in in_view for block_id in blocks), blocks
        seen += blocks
    assert seen == list(range(len(world.refs)))
    assert not words(cells)[x + 1 :].strip()
    first = top * layout.columns
    assert in_view.start == first
    named = f"P{first}-P{in_view.stop - 1}"
    shown = words(ruler).replace(glyphs.window, " ").strip()
    assert shown == named or (width < 60 and shown and named.startswith(shown))
