"""Exports can be read back: events fold to the same state, rows are the pool after each batch."""

import csv
import json
from pathlib import Path

import pytest

from kvscope.analysis.export import POOL_COLUMNS, event_lines, pool_rows
from kvscope.events.codec import EVENT_CLASSES
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.transport.recording import Recording

from .test_check import folded
from .test_stats import recount


def test_every_event_is_a_line_in_order(crowded: Recording) -> None:
    lines = [json.loads(line) for line in event_lines(crowded)]
    expected = [(seq, batch, event) for seq, batch in crowded.batches for event in batch.events]
    assert len(lines) == len(expected)
    for line, (seq, batch, event) in zip(lines, expected, strict=True):
        header = {name: line.pop(name) for name in ("seq", "step", "phase", "time_ns")}
        assert header == {"seq": seq, "step": batch.step, "phase": batch.phase, "time_ns": batch.time_ns}
        assert EVENT_CLASSES[line["type"]] is type(event)
        import msgspec

        assert msgspec.convert(line, type(event)) == event


def test_a_late_recording_begins_with_a_full_state(crowded: Recording) -> None:
    late = Recording(Path("x"), crowded.batches[8:], folded(crowded, 8), 7)
    first = json.loads(next(event_lines(late)))
    assert (first["seq"], first["type"]) == (7, "full_state")
    assert first["state"]["ref_counts"] == folded(crowded, 8).ref_counts


def test_no_line_has_a_line_break(crowded: Recording) -> None:
    assert all("\n" not in line for line in [*event_lines(crowded), *pool_rows(crowded)])


@pytest.mark.parametrize("which", ["calm", "crowded"])
def test_pool_rows(which: str, request: pytest.FixtureRequest) -> None:
    recording = request.getfixturevalue(which)
    rows = list(csv.DictReader(pool_rows(recording)))
    assert tuple(rows[0]) == POOL_COLUMNS
    assert len(rows) == len(recording.batches)
    state = EngineState()
    for row, (seq, batch) in zip(rows, recording.batches, strict=True):
        state = apply_batch(state, batch)
        figures = recount(state)
        statuses = [each.status for each in state.requests.values()]
        assert row == {
            "seq": str(seq),
            "step": str(batch.step),
            "phase": batch.phase,
            "time_ms": f"{batch.time_ns / 1e6:.3f}",
            "free": str(figures.free),
            "held": str(figures.held),
            "cached": str(figures.cached),
            "shared": str(figures.shared),
            "reserved_unwritten_slots": str(figures.unwritten_slots),
            "running": str(statuses.count("running")),
            "waiting": str(statuses.count("waiting") + statuses.count("preempted")),
        }
