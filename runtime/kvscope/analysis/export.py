"""A recording as plain data: JSON lines of its events, and its pool's time series as CSV."""

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvscope.analysis.pool_meter import PoolMeter
from kvscope.analysis.walk import Observer, walk
from kvscope.events.columns import column_to_list
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Event
from kvscope.transport.recording.stored_series import AnyRecording

POOL_COLUMNS = (
    "seq",
    "step",
    "phase",
    "time_ms",
    "free",
    "held",
    "cached",
    "shared",
    "reserved_unwritten_slots",
    "running",
    "waiting",
)


def event_lines(recording: AnyRecording) -> Iterator[str]:
    """One JSON object per event: `seq`, `step`, `phase`, `time_ns`, `type`, then the event's own fields.

    A recording that began in mid-life begins with a `full_state`, so that the lines can be folded.
    """
    initial = recording.initial_state
    if initial is not None:
        yield _event_line(recording.initial_seq, initial.step, initial.phase, initial.time_ns, FullState(state=initial))
    for seq, batch in recording.batches:
        for event in batch.events:
            yield _event_line(seq, batch.step, batch.phase, batch.time_ns, event)


def pool_rows(recording: AnyRecording) -> Iterator[str]:
    """CSV with a heading; one row for the pool after each batch that fits, times from the engine's start."""
    series = _PoolRows(PoolMeter())
    walk(recording, series.meter, series)
    yield from _csv([POOL_COLUMNS])
    yield from _csv(series.rows)


class _PoolRows(Observer):
    def __init__(self, meter: PoolMeter) -> None:
        self.meter = meter
        self.rows: list[tuple[object, ...]] = []

    def after_batch(self, seq: int, state: EngineState) -> None:
        figures = self.meter.figures
        statuses = [request.status for request in state.requests.values()]
        self.rows.append(
            (
                seq,
                state.step,
                state.phase,
                f"{state.time_ns / 1e6:.3f}",
                figures.free,
                figures.held,
                figures.cached,
                figures.shared,
                figures.unwritten_slots,
                statuses.count("running"),
                statuses.count("waiting") + statuses.count("preempted"),
            )
        )


def _event_line(seq: int | None, step: int, phase: str, time_ns: int, event: Event) -> str:
    header: dict[str, Any] = {"seq": seq, "step": step, "phase": phase, "time_ns": time_ns}
    fields = msgspec.to_builtins(event, builtin_types=(bytes,), enc_hook=column_to_list)
    return msgspec.json.encode(header | fields).decode()


def _csv(rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    for row in rows:
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(row)
        yield text.getvalue()
