"""Folds a transposed batch without an object for every event: the same state as event by event.

Most of what an engine says is one written slot and one token of every running sequence, in one run each. Runs of these
two are folded from their columns; everything else, and whatever is out of the ordinary in them, event by event.
"""

import re
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from kvscope.events import types as ev
from kvscope.events.column_codes import Singles, Values
from kvscope.events.fold import apply_event, begin_batch, folds
from kvscope.events.state import EngineState, RequestState, SequenceState
from kvscope.events.transposed import NO_GROUP, EventColumns, Transposed
from kvscope.events.types import Event

_RUNS = re.compile(rb"(.)\1*", re.DOTALL)
_Found = list[tuple[RequestState, SequenceState]]


class _Run(NamedTuple):
    """Events `first:stop` of a group, which follow each other."""

    group: EventColumns
    first: int
    stop: int

    def column(self, name: str) -> Values:
        return self.group.fields[name][self.first : self.stop]

    def apply_one_by_one(self, state: EngineState) -> EngineState:
        if folds(self.group.kind):
            for event in self.group.events[self.first : self.stop]:
                state = apply_event(state, event)
        return state


def apply_transposed(state: EngineState, batch: Transposed) -> EngineState:
    """Fold the batch into the state, which is changed and returned.

    Raises:
        FoldError: an event does not fit; the state is then unusable and a snapshot must replace it.
    """
    begin_batch(state, batch.others)
    done, others = [0] * len(batch.groups), iter(batch.others.events)
    finder = _Finder()
    for match in _RUNS.finditer(batch.order):
        number, length = batch.order[match.start()], match.end() - match.start()
        if number == NO_GROUP:
            for event in islice(others, length):
                state = apply_event(state, event)
            finder.forget()
            continue
        run = _Run(batch.groups[number], done[number], done[number] + length)
        done[number] = run.stop
        fold = _FROM_COLUMNS.get(run.group.kind)
        if fold is None:
            state = run.apply_one_by_one(state)
            finder.forget()
        else:
            fold(state, run, finder.find(state, run))
    return state


class _Finder:
    """Finds the sequences of a run; the tokens of a step go to those that wrote a slot in it."""

    def __init__(self) -> None:
        self._found: _Found = []
        self._of: tuple[int, int, int] | None = None

    def find(self, state: EngineState, run: _Run) -> _Found:
        """Raises FoldError for a sequence nobody announced."""
        wanted = id(run.group.fields["sequence_id"]), run.first, run.stop
        if wanted != self._of:
            self._found, self._of = list(map(state.find, run.column("sequence_id"))), wanted
        return self._found

    def forget(self) -> None:
        """Other events have been folded: who was there may be gone."""
        self._of = None


def _slots_written(state: EngineState, run: _Run, found: _Found) -> None:
    block_size = state.info.block_size if state.info is not None else 1
    written, starts, stops = state.written_slots, run.column("start"), run.column("stop")
    writes, stamp = (state.traces.writes, state.traces.stamp(state.step)) if state.traces else (None, 0)
    for place, ((_, sequence), start, stop) in enumerate(zip(found, starts, stops, strict=True), run.first):
        table, place_in_table = sequence.block_table, start // block_size - sequence.num_released
        if stop - start == 1 and 0 <= place_in_table < len(table):
            block_id = table[place_in_table]
            written[block_id], written.touched[block_id] = start % block_size + 1, 1
            sequence.num_written = stop
            if writes is not None:
                writes[block_id] = stamp
        else:
            apply_event(state, run.group.events[place])


def _tokens_generated(state: EngineState, run: _Run, found: _Found) -> None:
    ids, pieces = run.group.fields["token_ids"], run.group.fields["pieces"]
    if not isinstance(ids, Singles) or not isinstance(pieces, Singles) or _are_scored(run):
        run.apply_one_by_one(state)
        return
    columns = ids.elements[run.first : run.stop], pieces.elements[run.first : run.stop], run.column("text")
    time_ns = state.time_ns
    for (request, sequence), token_id, piece, text in zip(found, *columns, strict=True):
        sequence.token_ids.append(token_id)
        sequence.pieces.append(piece)
        sequence.text += text
        if request.first_token_ns is None:
            request.first_token_ns = time_ns
    state.counters.generated_tokens += run.stop - run.first


def _are_scored(run: _Run) -> bool:
    scores = run.group.fields.get("score", [])
    return len(scores) != scores.count(None)


_FROM_COLUMNS: dict[type[Event], Callable[[EngineState, _Run, _Found], None]] = {
    ev.SlotsWritten: _slots_written,
    ev.TokensGenerated: _tokens_generated,
}
