"""Folds a transposed batch without an object for every event: the same state as event by event.

Most of what an engine says is one written slot and one token of every running sequence, in one run each. Runs of these
two are folded from their columns; everything else, and whatever is out of the ordinary in them, event by event.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kvscope.events import types as ev
from kvscope.events.column_codes import Singles, Values
from kvscope.events.finder import COMINGS_AND_GOINGS, Finder
from kvscope.events.fold import apply_event, begin_batch, folds
from kvscope.events.state import EngineState, FoldError
from kvscope.events.transposed import NO_GROUP, EventColumns, Transposed
from kvscope.events.types import Batch, Event

_RUNS = re.compile(rb"(.)\1*", re.DOTALL)


class _Run(NamedTuple):
    """Events `first:stop` of a group, which follow each other."""

    group: EventColumns
    first: int
    stop: int

    def column(self, name: str) -> Values:
        values = self.group.fields[name]
        return values if self.stop - self.first == self.group.count else values[self.first : self.stop]

    def apply_one_by_one(self, state: EngineState) -> None:
        for event in self.group.events[self.first : self.stop]:
            apply_event(state, event)


def apply_transposed(state: EngineState, batch: Transposed, finder: Finder | None = None) -> EngineState:
    """Fold the batch into the state, which is changed and returned.

    With the same `finder` for batch after batch, each is quicker; nothing else may then change the state in between.

    Raises:
        FoldError: an event does not fit; the state is then unusable and a snapshot must replace it.
    """
    begin_batch(state, batch.others)
    finder = Finder(state) if finder is None else finder
    finder.follow(state)
    following = {number: _one_by_one(group) for number, group in enumerate(batch.groups)}
    following[NO_GROUP] = iter(batch.others.events)
    done = [0] * len(batch.groups)
    for match in _RUNS.finditer(batch.order):
        number, length = batch.order[match.start()], match.end() - match.start()
        events = following[number]
        if events is not None:
            state = _apply_events(state, islice(events, length), finder)
            continue
        run = _Run(batch.groups[number], done[number], done[number] + length)
        done[number] = run.stop
        _FROM_COLUMNS[run.group.kind](state, run, finder)
    return state


def apply_watched(state: EngineState, batch: Batch, finder: Finder) -> EngineState:
    """As `apply_batch`, while the finder follows."""
    begin_batch(state, batch)
    finder.follow(state)
    return _apply_events(state, batch.events, finder)


def _apply_events(state: EngineState, events: Iterable[Event], finder: Finder) -> EngineState:
    for event in events:
        if type(event) in COMINGS_AND_GOINGS:
            finder.before(event)
        state = apply_event(state, event)
    finder.follow(state)
    return state


def _one_by_one(group: EventColumns) -> Iterator[Event] | None:
    """The group's events; None: they are folded from its columns."""
    if group.kind in _FROM_COLUMNS:
        return None
    return iter(group.events) if folds(group.kind) else iter(())


def _slots_written(state: EngineState, run: _Run, finder: Finder) -> None:
    """Raises FoldError."""
    starts, stops = np.asarray(run.column("start")), np.asarray(run.column("stop"))
    block_size = state.info.block_size if state.info is not None else 0
    several = np.flatnonzero(stops - starts != 1).tolist() if block_size else range(len(starts))
    logicals, slots = np.divmod(starts, max(block_size, 1))
    columns = run.column("sequence_id"), logicals.tolist(), slots.tolist(), stops.tolist()
    first = 0
    for place in (*several, len(starts)):
        rows = columns if place - first == len(starts) else [column[first:place] for column in columns]
        _write_one_each(state, rows, finder)
        if place < len(starts):
            apply_event(state, run.group.event(run.first + place))
        first = place + 1


def _write_one_each(state: EngineState, rows: Sequence[Any], finder: Finder) -> None:
    """One slot of each sequence: `rows` are the sequences' ids, logical blocks, slots in them, and next positions."""
    sequence_ids, *numbers = rows
    written, touched = state.written_slots, state.written_slots.touched
    writes, stamp = (state.traces.writes, state.traces.stamp(state.step)) if state.traces else (None, 0)
    try:
        for (_, sequence), logical, slot, stop in zip(map(finder.__getitem__, sequence_ids), *numbers, strict=True):
            place = logical - sequence.num_released
            if place < 0:
                raise IndexError
            block_id = sequence.block_table[place]
            written[block_id], touched[block_id] = slot + 1, 1
            sequence.num_written = stop
            if writes is not None:
                writes[block_id] = stamp
    except (IndexError, OverflowError):
        raise FoldError("a sequence holds no block for a position, or a block no such slot") from None


def _tokens_generated(state: EngineState, run: _Run, finder: Finder) -> None:
    ids, pieces = run.column("token_ids"), run.column("pieces")
    if not isinstance(ids, Singles) or not isinstance(pieces, Singles) or _are_scored(run):
        run.apply_one_by_one(state)
        return
    found, texts = map(finder.__getitem__, run.column("sequence_id")), run.column("text")
    time_ns = state.time_ns
    for (request, sequence), token_id, piece, text in zip(found, ids.elements, pieces.elements, texts, strict=True):
        sequence.token_ids.append(token_id)
        sequence.pieces.append(piece)
        sequence.text += text
        if request.first_token_ns is None:
            request.first_token_ns = time_ns
    state.counters.generated_tokens += run.stop - run.first


def _are_scored(run: _Run) -> bool:
    scores = run.group.fields.get("score")
    return isinstance(scores, list) and len(scores) != scores.count(None)


_FROM_COLUMNS: dict[type[Event], Callable[[EngineState, _Run, Finder], None]] = {
    ev.SlotsWritten: _slots_written,
    ev.TokensGenerated: _tokens_generated,
}
