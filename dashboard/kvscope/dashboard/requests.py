"""The list of requests and their sequences: which lines there are, and how one is drawn. Pure."""

from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, overload

from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.copies import RequestFrame, SequenceFrame
from kvscope.dashboard.filters import EVERYTHING, SORTS, Query, filter_requests, sort_requests
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.owners import distinct_blocks
from kvscope.dashboard.strips import Part, clip, clip_start, fit_parts, flat, make_strip, measure
from kvscope.events.describe import describe_waiting
from kvscope.events.text import counted
from kvscope.events.types import RequestPreempted
from kvscope.transport.source import LogEntry


class Row(NamedTuple):
    """One line of the list: a request, or one of its sequences."""

    request: RequestFrame
    sequence: SequenceFrame | None

    @property
    def key(self) -> str:
        return self.request.request_id if self.sequence is None else self.sequence.sequence_id


def order_requests(frame: Frame) -> list[RequestFrame]:
    """Running, preempted and waiting ones in order of arrival, then the finished ones, latest first."""
    running, preempted, waiting, finished = (list[RequestFrame]() for _ in range(4))
    lists = {"running": running, "preempted": preempted, "finished": finished}
    for request in frame.requests:
        lists.get(request.status, waiting).append(request)
    return [*running, *preempted, *waiting, *reversed(finished)]


class Rows(Sequence[Row]):
    """The lines of some requests, each made when somebody looks at it: of thousands a screen shows thirty."""

    def __init__(self, requests: Sequence[RequestFrame]) -> None:
        self.requests = requests
        self._stops = list(accumulate(1 + len(request.sequences) for request in requests))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[line] for line in range(*index.indices(len(self)))]
        line = range(len(self))[index]
        place = bisect_right(self._stops, line)
        request = self.requests[place]
        number = line - self._stops[place] + len(request.sequences)  # from -1, the request itself
        return Row(request, request.sequences[number] if number >= 0 else None)


def list_rows(frame: Frame, query: Query = EVERYTHING, order: str = SORTS[0]) -> Rows:
    """Two or more lines per request that passes: the request, then one per sequence."""
    return Rows(sort_requests(filter_requests(order_requests(frame), query), order))


def last_preemptions(frame: Frame) -> dict[str, LogEntry]:
    """For each request that is preempted now, the event that did it, as far as the log reaches."""
    open_ids = {request.request_id for request in frame.requests if request.status == "preempted"}
    found: dict[str, LogEntry] = {}
    for entry in reversed(frame.log) if open_ids else ():
        event = entry.event
        if isinstance(event, RequestPreempted) and event.request_id in open_ids:
            found.setdefault(event.request_id, entry)
            if len(found) == len(open_ids):
                break
    return found


def draw_request_row(
    frame: Frame,
    row: Row,
    selected: str | None,
    glyphs: Glyphs,
    width: int,
    *,
    preempted: Mapping[str, LogEntry] = MappingProxyType({}),
    lit: Container[str] = (),
) -> Strip:
    """One line of the list, in exactly `width` cells; `lit` are the sequences that hold the block under the cursor."""
    if row.sequence is None:
        words = _request_words(frame, row.request, preempted.get(row.request.request_id), glyphs, width)
    else:
        words = _sequence_words(frame, row.request, row.sequence, glyphs, width)
    chosen = row.key == selected
    mark: Part = (glyphs.cursor if chosen else glyphs.dot if row.key in lit else " ", theme.BRAND)
    strip = make_strip([mark, *words], width)
    return strip.apply_style(theme.ROW) if chosen else strip


def row_facts(frame: Frame, row: Row) -> tuple[int, float | None]:
    """What a line shows that its request does not know: blocks shared with others, and tokens per second."""
    if row.sequence is not None:
        return frame.pool.count_shared(row.sequence.table), None
    request = row.request
    shared = frame.pool.count_shared(distinct_blocks(request)) if request.status == "running" else 0
    return shared, tokens_per_second(frame, request)


def _request_words(
    frame: Frame, request: RequestFrame, preempted: LogEntry | None, glyphs: Glyphs, width: int
) -> list[Part]:
    ended = request.status == "finished"
    name_style = theme.SOFT if ended else theme.owner_style(request.owner) + Style(bold=True)
    glyph, words, style = _status(request, preempted, glyphs)
    parts: list[Part] = [(f"{request.request_id} ", name_style), (f"{glyph} {words}", style)]
    parts += [(f"  {fact}", theme.SOFT if ended else theme.TEXT) for fact in _facts(frame, request)]
    if request.num_hypotheses:
        parts.append((f"  {request.num_hypotheses} of {request.params.beam_width} hypotheses", theme.TEXT))
    if request.num_preemptions and request.status != "preempted":
        parts.append((f"  {glyphs.preempt} preempted {request.num_preemptions}{glyphs.times}", theme.NOTICE))
    room = width - 1 - measure(parts)
    if room < 0:
        return fit_parts(parts, width - 1, glyphs)
    if room >= 12:
        prompt = _clip_quoted(flat(request.prompt, glyphs), room - 4, glyphs)
        parts.append((f"  {prompt}", theme.FAINT if ended else theme.SOFT))
    return parts


def _clip_quoted(text: str, room: int, glyphs: Glyphs) -> str:
    return f'"{clip(text, room, glyphs)}"'


def _status(request: RequestFrame, preempted: LogEntry | None, glyphs: Glyphs) -> tuple[str, str, Style]:
    match request.status:
        case "running":
            return glyphs.play, "running", theme.GOOD
        case "preempted":
            words = f"preempted {request.num_preemptions}{glyphs.times}"
            if preempted is not None and isinstance(event := preempted.event, RequestPreempted):
                itself = event.for_request_id == request.request_id
                words += f" by {'its own growth' if itself else event.for_request_id}"
                words += f" at step {preempted.step}, lost {counted(event.tokens_lost, 'token')}"
            reason = f"; {_reason(request)}" if request.waiting is not None else ""
            return glyphs.preempt, words + reason, theme.NOTICE
        case "finished":
            return glyphs.tick, "finished", theme.SOFT
        case _:
            reason = f": {_reason(request)}" if request.waiting is not None else ""
            return glyphs.wait, f"waiting{reason}", theme.NOTICE


def _reason(request: RequestFrame) -> str:
    waiting = request.waiting
    return "" if waiting is None else describe_waiting(waiting.kind, waiting.needed, waiting.available)


def _facts(frame: Frame, request: RequestFrame) -> list[str]:
    """Progress, speed, time to the first token, and its blocks: those of several sequences count once."""
    generated = sum(sequence.num_generated for sequence in request.sequences)
    facts = []
    if request.status == "running":
        blocks = distinct_blocks(request)
        shared, copies = frame.pool.count_shared(blocks), sum(sequence.num_copies for sequence in request.sequences)
        facts.append(
            f"{len(blocks)} blk" + (f" {shared} shared" if shared else "") + (f" {copies} CoW" if copies else "")
        )
    if request.status != "waiting":
        facts.append(f"{generated}/{request.params.max_tokens * len(request.sequences)} tok")
    if (wait_ns := request.first_token_wait_ns) is not None:
        if (rate := tokens_per_second(frame, request)) is not None:
            facts.append(f"{rate:.1f}/s")
        facts.append(f"first {format_seconds(wait_ns)}")
    return facts


def tokens_per_second(frame: Frame, request: RequestFrame) -> float | None:
    """After its first token, to a tenth; None while there is nothing to measure."""
    if request.first_token_ns is None or request.status == "waiting":
        return None
    until_ns = request.finished_ns if request.finished_ns is not None else frame.time_ns
    elapsed_ns = until_ns - request.first_token_ns
    number = sum(sequence.num_generated for sequence in request.sequences) - len(request.sequences)
    return round(number * 1e9 / elapsed_ns, 1) if elapsed_ns > 0 and number > 0 else None


def format_seconds(elapsed_ns: int) -> str:
    """`12 ms`, `1.5 s`."""
    return f"{elapsed_ns / 1e6:.0f} ms" if elapsed_ns < 1_000_000_000 else f"{elapsed_ns / 1e9:.1f} s"


def _sequence_words(
    frame: Frame, request: RequestFrame, sequence: SequenceFrame, glyphs: Glyphs, width: int
) -> list[Part]:
    ended = request.status == "finished" or sequence.finish_reason is not None
    style = theme.FAINT if request.status == "finished" else theme.SOFT
    shared = frame.pool.count_shared(sequence.table)
    facts = [f"{sequence.num_generated} tok"]
    if sequence.table or not ended:
        facts.append(f"{len(sequence.table)} blk")
    if shared:
        facts.append(f"{shared} shared")
    if sequence.host_table:
        facts.append(f"{len(sequence.host_table)} blk on host")
    if sequence.num_copies:
        facts.append(f"{sequence.num_copies} CoW")
    if sequence.score is not None:
        facts.append(f"score {sequence.score:.2f}")
    parts: list[Part] = [(f"  {sequence.sequence_id} ", style), (" ".join(facts), style)]
    if sequence.finish_reason is not None:
        is_cut = sequence.finish_reason == "length" and sequence.num_generated < request.params.max_tokens
        by_model = f" of the model: {frame.info.max_model_len}" if is_cut and frame.info is not None else ""
        parts.append((f" {glyphs.tick} {sequence.finish_reason}{by_model}", style))
    room = width - 1 - measure(parts) - 2
    if room >= 6 and sequence.text:
        text_style = theme.FAINT if request.status == "finished" else theme.TEXT
        parts += [("  ", theme.PLAIN), (clip_start(flat(sequence.text, glyphs), room, glyphs), text_style)]
    return parts
