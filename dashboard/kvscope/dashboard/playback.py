"""Where a player is, and the timeline it is on, as lines. Pure: everything comes in as values."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.keys import DEFAULT_NAMES, KeyNames
from kvscope.dashboard.strips import Part, columns, make_strip, measure
from kvscope.events.notable import Notable, standing
from kvscope.transport.timetravel import Player

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100.0, 1000.0)
LABEL_WIDTH = 7
MIN_BAR_WIDTH, NOTE_WIDTH = 8, 24
_HINT = {
    "play": ("play",),
    "batch": ("step", "back"),
    "step": ("engine-step", "engine-step-back"),
    "event": ("event", "event-back"),
    "notable": ("notable", "last-notable"),
    "go to": ("go-to",),
}


class Moment(NamedTuple):
    """`position` of `length` batches, and `event` of `num_events` of the next one. Times since the engine's start."""

    playing: bool
    position: int
    length: int
    event: int
    num_events: int
    step: int
    last_step: int
    time_ns: int
    end_ns: int
    speed: float
    note: str = ""  # of the bookmark here
    looked_back: float | None = None  # while a look back is under way: how much of what lies before is done
    ended: bool = False  # a recording, played to its end


class Usage(NamedTuple):
    """What the survey knows of the track so far: per batch, blocks held and the `Notable` of the highest standing."""

    held: Sequence[int]
    kinds: bytes | bytearray
    num_blocks: int
    length: int  # batches of the whole track
    num_audited: int
    bookmarks: Sequence[int] = ()  # how many batches come before each


class Column(NamedTuple):
    """One cell of the timeline: the most blocks held in its stretch, None before the survey has been there."""

    held: int | None
    kind: int


class TimelineDrawing(NamedTuple):
    """The lines, and which cells of them are the timeline: `first_cell:first_cell + width`."""

    lines: list[Strip]
    first_cell: int
    width: int


def next_speed(speed: float, step: int) -> float:
    """The neighbouring one of SPEEDS."""
    nearest = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - speed))
    return SPEEDS[min(max(nearest + step, 0), len(SPEEDS) - 1)]


def read_moment(player: Player, seq: int | None, note: str = "") -> Moment:
    """In numbers the place that a picture shows: the player may be a batch further. `seq` is the picture's."""
    index, place = player.index, player.place
    shown = place.position if place.event else place.position - 1
    position, event = place
    if seq != (index.seqs[shown] if shown >= 0 else index.seq_at(0)):
        position, event = (index.after_seq(seq) if seq is not None else 0), 0
    done = min(position + (event > 0), len(index))
    return Moment(
        playing=player.playing,
        position=position,
        length=player.length,
        event=event,
        num_events=index.num_events(position) if event else 0,
        step=index.step_at(done),
        last_step=index.step_at(len(index)),
        time_ns=index.time_ns_at(done),
        end_ns=index.time_ns_at(len(index)),
        speed=player.speed,
        note=note,
        looked_back=player.looked_back,
        ended=player.ends and not player.playing and position == len(index),
    )


def read_usage(player: Player) -> Usage:
    """What the survey has found so far; its lists only grow."""
    survey = player.survey
    bookmarks = tuple(place.position for place in player.marks)
    return Usage(survey.held, survey.kinds, survey.num_blocks, player.length, survey.num_audited, bookmarks)


def fold_columns(usage: Usage, width: int) -> list[Column]:
    """The track in `width` stretches of equally many batches. A short track has several cells per batch."""
    found = []
    for cell in range(width):
        start, stop = stretch(cell, usage.length, width)
        held = usage.held[start:stop]
        found.append(Column(max(held, default=None), max(set(usage.kinds[start:stop]), default=0, key=standing)))
    for position in usage.bookmarks:
        place = cell_of(position, usage.length, width)
        found[place] = found[place]._replace(kind=Notable.BOOKMARK)
    return found


def stretch(cell: int, length: int, width: int) -> tuple[int, int]:
    """The batches `start:stop` of a cell; never none, unless there are none at all."""
    start = cell * length // width
    return start, min(max((cell + 1) * length // width, start + 1), length)


def head_cell(moment: Moment, width: int) -> int:
    """The cell of the batch that was applied last."""
    return cell_of(moment.position, moment.length, width)


def cell_of(position: int, length: int, width: int) -> int:
    """The cell of the last of `position` batches."""
    return min(max(position - 1, 0) * width // max(length, 1), width - 1)


class Folder:
    """`fold_columns` for a screen that asks many times a second for what seldom changes."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._cells: list[Column] = []

    def __call__(self, usage: Usage, width: int) -> list[Column]:
        key = (width, usage.length, len(usage.held), usage.num_audited, usage.bookmarks)
        if key != self._key:
            self._key, self._cells = key, fold_columns(usage, width)
        return self._cells


def draw_playback(
    moment: Moment,
    usage: Usage,
    glyphs: Glyphs,
    width: int,
    bar_height: int,
    *,
    fold: Callable[[Usage, int], list[Column]] = fold_columns,
    keys: KeyNames = DEFAULT_NAMES,
) -> TimelineDrawing:
    """One line with a small timeline if `bar_height` is 0; else a line of numbers, the timeline, and its marks."""
    if bar_height == 0:
        return _draw_brief(moment, usage, glyphs, width, fold)
    room = max(width - LABEL_WIDTH - 1, MIN_BAR_WIDTH)
    cells, head = fold(usage, room), head_cell(moment, room)
    peak = max((cell.held or 0 for cell in cells), default=0)
    lines = [_draw_numbers(moment, usage, peak, glyphs, width, keys=keys)]
    for row in reversed(range(bar_height)):
        bar = _bar_parts(cells, head, usage.num_blocks, glyphs, row=row, height=bar_height)
        lines.append(_labelled(" held" if row == bar_height - 1 else "", bar, width))
    lines.append(_labelled(" marks", [notable_look(cell.kind, glyphs) for cell in cells], width))
    return TimelineDrawing(lines, LABEL_WIDTH, room)


def _draw_brief(
    moment: Moment, usage: Usage, glyphs: Glyphs, width: int, fold: Callable[[Usage, int], list[Column]]
) -> TimelineDrawing:
    left: list[Part] = [_state_part(moment, glyphs, brief=True), (f" {_count(moment, moment.event)} ", theme.STRONG)]
    note = moment.note if len(moment.note) <= NOTE_WIDTH else moment.note[: NOTE_WIDTH - 1] + glyphs.ellipsis
    right: list[Part] = [(f" {glyphs.bookmark} {note}", theme.STRONG)] if note else []
    right.append((f" {moment.speed:g}{glyphs.times} ", theme.STRONG))
    room = max(width - measure(left) - measure(right), MIN_BAR_WIDTH)
    cells, head = fold(usage, room), head_cell(moment, room)
    bar = _bar_parts(cells, head, usage.num_blocks, glyphs, row=0, height=1)
    for place, cell in enumerate(cells):
        if cell.kind >= Notable.PREEMPTION and place != head:
            bar[place] = notable_look(cell.kind, glyphs)  # without a line for marks, the rare ones take the bar's place
    return TimelineDrawing([columns([*left, *bar], right, width)], measure(left), room)


def _draw_numbers(moment: Moment, usage: Usage, peak: int, glyphs: Glyphs, width: int, *, keys: KeyNames) -> Strip:
    left: list[Part] = [_state_part(moment, glyphs, brief=False)]
    left += [("  batch ", theme.SOFT), (_count(moment), theme.STRONG)]
    if moment.event:
        left += [("  event ", theme.SOFT), (f"{moment.event} of {moment.num_events}", theme.STRONG)]
    left += [("  step ", theme.SOFT), (f"{moment.step}", theme.STRONG), (f" of {moment.last_step}", theme.SOFT)]
    left += [("  ", theme.PLAIN), (f"{moment.time_ns / 1e9:.2f}", theme.STRONG)]
    left += [(f" of {moment.end_ns / 1e9:.2f} s", theme.SOFT)]
    if usage.length:
        left += [("  peak ", theme.SOFT), (f"{peak}", theme.STRONG), (f" of {usage.num_blocks} held", theme.SOFT)]
    if usage.num_audited < usage.length:
        left.append((f"  audited {_percent(usage.num_audited, usage.length)}", theme.NOTICE))
    right: list[Part] = [(f" {moment.speed:g}{glyphs.times} ", theme.STRONG)]
    if moment.note:
        left += [(f"  {glyphs.bookmark} ", theme.STRONG), (moment.note, theme.STRONG)]
    else:
        hint = "".join(f" {' '.join(keys[name] for name in names)} {what} " for what, names in _HINT.items())
        if measure(left) + measure(right) + len(hint) + 2 <= width:
            right.append((hint, theme.SOFT))
    return columns(left, right, width)


def _state_part(moment: Moment, glyphs: Glyphs, *, brief: bool) -> Part:
    if moment.looked_back is not None:
        return f" looking back {moment.looked_back:.0%}", theme.NOTICE
    if moment.ended:
        return f" {glyphs.pause} end" if brief else f" {glyphs.pause} the end", theme.NOTICE
    sign, word = (glyphs.play, "playing") if moment.playing else (glyphs.pause, "paused ")
    return f" {sign}" if brief else f" {sign} {word}", theme.GOOD if moment.playing else theme.NOTICE


def _count(moment: Moment, event: int = 0) -> str:
    begun = f"+{event}" if event else ""
    return f"{moment.position:>{len(str(moment.length))}}{begun}/{moment.length}"


def _labelled(label: str, cells: list[Part], width: int) -> Strip:
    return make_strip([(label.ljust(LABEL_WIDTH), theme.SOFT), *cells], width)


def _bar_parts(cells: list[Column], head: int, num_blocks: int, glyphs: Glyphs, *, row: int, height: int) -> list[Part]:
    """One row of the bars, `row` 0 at the bottom; the part behind the head is bright, the head a line through it."""
    parts: list[Part] = []
    for place, cell in enumerate(cells):
        if place == head:
            parts.append((glyphs.head, theme.CURSOR))
        elif cell.held is None:
            parts.append((glyphs.unknown, theme.FAINT))
        else:
            style = theme.TIME_PAST if place < head else theme.TIME_AHEAD
            parts.append((_level(cell.held, num_blocks, glyphs, row, height), style))
    return parts


def _level(held: int, num_blocks: int, glyphs: Glyphs, row: int, height: int) -> str:
    """How much of this row's share of the pool is held; anything above nothing is at least the lowest step."""
    steps = len(glyphs.levels) - 1
    filled = -(-held * steps * height // num_blocks) if num_blocks else 0
    in_row = min(max(filled - row * steps, 0), steps)
    return " " if in_row == 0 and row else glyphs.levels[in_row]


def notable_look(kind: int, glyphs: Glyphs) -> tuple[str, Style]:
    """Sign and colour of a `Notable`; the same signs as in the events pane."""
    match kind:
        case Notable.COPY:
            return glyphs.copy, theme.NOTICE
        case Notable.EVICTION:
            return glyphs.cached, theme.BRAND
        case Notable.PREEMPTION:
            return glyphs.preempt, theme.BAD
        case Notable.REFUSAL | Notable.DROP:
            return glyphs.cross, theme.BAD
        case Notable.BOOKMARK:
            return glyphs.bookmark, theme.STRONG
        case Notable.FINDING:
            return glyphs.warning, theme.BAD
    return " ", theme.PLAIN


def _percent(count: int, total: int) -> str:
    return f"{100 * count // total}%" if total else "0%"
