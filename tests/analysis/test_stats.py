"""Figures against a recount of the whole pool after every batch, and against what the engine was asked to do."""

from pathlib import Path

import pytest

from kvscope.analysis.pool_meter import PoolFigures, PoolMeter
from kvscope.analysis.request_log import RequestLog
from kvscope.analysis.stats import measure, percentile
from kvscope.analysis.stats_text import stats_lines
from kvscope.analysis.walk import Observer, walk
from kvscope.events import types as ev
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.transport.recording import Recording

from .conftest import MS, recording_of, run_engine
from .test_check import edited, folded, replace_first, same


def recount(state: EngineState) -> PoolFigures:
    """The figures by their definitions."""
    assert state.info is not None
    pairs = list(zip(state.ref_counts, state.written_slots, strict=True))
    return PoolFigures(
        free=sum(refs <= 0 and not written for refs, written in pairs),
        held=sum(refs > 0 for refs, _ in pairs),
        cached=sum(refs <= 0 and written > 0 for refs, written in pairs),
        shared=sum(refs > 1 for refs, _ in pairs),
        saved=sum(refs - 1 for refs, _ in pairs if refs > 1),
        unwritten_slots=sum(state.info.block_size - written for refs, written in pairs if refs > 0),
    )


class Recounter(Observer):
    def __init__(self, meter: PoolMeter) -> None:
        self.meter, self.seen = meter, list[PoolFigures]()

    def after_batch(self, seq: int, state: EngineState) -> None:
        self.seen.append(recount(state))
        assert self.meter.figures == self.seen[-1], f"batch {seq}"


@pytest.mark.parametrize("which", ["calm", "crowded"])
def test_the_meter_agrees_with_a_recount(which: str, request: pytest.FixtureRequest) -> None:
    recording = request.getfixturevalue(which)
    meter = PoolMeter()
    recounter = Recounter(meter)
    walk(recording, meter, recounter)
    assert len(recounter.seen) == len(recording.batches)
    assert max(figures.held for figures in recounter.seen) > 0
    broken = edited(recording, replace_first(ev.BlocksReleased, same, same))
    walk(broken, meter := PoolMeter(), Recounter(meter))  # a ref count below 0


@pytest.mark.parametrize("length", [1, 7, 20])
def test_the_meter_from_a_keyframe(length: int, crowded: Recording) -> None:
    suffix = Recording(Path("x"), crowded.batches[length:], folded(crowded, length), length - 1)
    meter = PoolMeter()
    walk(suffix, meter, Recounter(meter))


@pytest.mark.parametrize("which", ["calm", "crowded"])
def test_pool_figures(which: str, request: pytest.FixtureRequest) -> None:
    recording = request.getfixturevalue(which)
    state, after_batches, after_steps = EngineState(), [], []
    for _, batch in recording.batches:
        state = apply_batch(state, batch)
        after_batches.append(recount(state))
        after_steps += [after_batches[-1]] if batch.phase == "commit" else []
    pool = measure(recording).pool
    steps = len(after_steps)
    assert pool.peak_held == max(figures.held for figures in after_batches)
    assert pool.peak_saved == max(figures.saved for figures in after_batches)
    assert pool.peak_cached == max(figures.cached for figures in after_batches)
    assert pool.mean_held == pytest.approx(sum(figures.held for figures in after_steps) / steps)
    assert pool.mean_saved == pytest.approx(sum(figures.saved for figures in after_steps) / steps)
    assert pool.peak_unwritten_slots == max(figures.unwritten_slots for figures in after_steps)
    assert pool.mean_unwritten_slots == pytest.approx(sum(f.unwritten_slots for f in after_steps) / steps)
    shares = [f.unwritten_slots / (f.held * 4) if f.held else 0 for f in after_steps]
    assert pool.mean_unwritten_share == pytest.approx(sum(shares) / steps)
    assert pool.peak_unwritten_share == pytest.approx(max(shares))


def test_a_run_with_sharing(calm: Recording) -> None:
    stats = measure(calm)
    assert (stats.requests.finished, stats.requests.unfinished, stats.requests.refused) == (2, 0, 0)
    assert stats.generated_tokens == 2 * 3 + 4
    assert (stats.copies, stats.preemptions, stats.evictions) == (1, 0, 0)
    assert (stats.prefix_hit_tokens, stats.prefix_lookup_tokens) == (8, 20)
    assert stats.pool.peak_saved == 3  # three blocks of the prompt, held by both candidates
    assert (stats.pool.num_blocks, stats.pool.block_size) == (16, 4)
    assert stats.steps == 3 + 4
    assert stats.duration_s == pytest.approx((calm.batches[-1][1].time_ns - calm.batches[0][1].time_ns) / 1e9)


def test_times_of_requests(calm: Recording) -> None:
    """Recomputed from the events alone."""
    submitted, first_token, finished = {}, {}, {}
    for _, batch in calm.batches:
        for event in batch.events:
            if isinstance(event, ev.RequestSubmitted):
                submitted[event.request_id] = batch.time_ns
            elif isinstance(event, ev.TokensGenerated):
                first_token.setdefault(event.sequence_id.partition(".")[0], batch.time_ns)
            elif isinstance(event, ev.RequestFinished):
                finished[event.request_id] = batch.time_ns
    waits = sorted((first_token[name] - submitted[name]) / 1e9 for name in submitted)
    stats = measure(calm)
    assert stats.requests.first_token_p50_s == pytest.approx(waits[0])
    assert stats.requests.first_token_p95_s == pytest.approx(waits[1])
    assert stats.busy_s == pytest.approx(sum(finished[name] - submitted[name] for name in finished) / 1e9)
    assert stats.busy_s < stats.duration_s
    assert stats.generated_per_s == pytest.approx(stats.generated_tokens / stats.busy_s)


def test_waiting_and_its_reasons(crowded: Recording) -> None:
    log = RequestLog()
    passed = walk(crowded, log)
    log.finish(passed.state)
    lost = [event.tokens_lost for event in all_events(crowded) if isinstance(event, ev.RequestPreempted)]
    assert log.tokens_lost == sum(lost) > 0
    intervals: dict[str, int] = {}
    since: dict[str, tuple[int, str]] = {}
    for _, batch in crowded.batches:
        for event in batch.events:
            match event:
                case ev.RequestSubmitted():
                    since[event.request_id] = (batch.time_ns, "queued")
                case ev.RequestPreempted():
                    since[event.request_id] = (batch.time_ns, "preempted")
                case ev.RequestWaiting() | ev.RequestAdmitted():
                    began, reason = since.pop(event.request_id)
                    intervals[reason] = intervals.get(reason, 0) + batch.time_ns - began
                    if isinstance(event, ev.RequestWaiting):
                        since[event.request_id] = (batch.time_ns, event.kind)
    requests = measure(crowded).requests
    assert {reason: waited for reason, waited in requests.waited_s.items() if waited} == {
        reason: pytest.approx(ns / 1e9) for reason, ns in intervals.items() if ns
    }
    assert requests.waited_s["blocks"] > 0
    assert requests.longest_wait_s <= sum(requests.waited_s.values())
    assert requests.mean_wait_s == pytest.approx(sum(requests.waited_s.values()) / 3)
    assert sum(record.num_preemptions for record in log.records) == measure(crowded).preemptions


def test_waiting_without_a_reason(crowded: Recording) -> None:
    silent = edited(crowded, lambda event: [] if isinstance(event, ev.RequestWaiting) else [event])
    told, untold = measure(crowded).requests, measure(silent).requests
    assert set(untold.waited_s) == {"queued", "preempted"}
    assert untold.waited_s["preempted"] > 0
    assert sum(untold.waited_s.values()) == pytest.approx(sum(told.waited_s.values()))


def all_events(recording: Recording) -> list[ev.Event]:
    return [event for _, batch in recording.batches for event in batch.events]


def test_more_requests_than_a_state_remembers() -> None:
    recording = recording_of(run_engine(8, [([n, n + 1], {"max_tokens": 2}) for n in range(1, 41)], together=False))
    stats = measure(recording)
    assert stats.requests.finished == 40
    assert stats.generated_tokens == 80


def test_a_recording_of_the_second_half_counts_the_second_half(crowded: Recording) -> None:
    half = len(crowded.batches) // 2
    first = measure(recording_of(batch for _, batch in crowded.batches[:half]))
    second = measure(Recording(Path("x"), crowded.batches[half:], folded(crowded, half), half - 1))
    whole = measure(crowded)
    for name in ("steps", "generated_tokens", "computed_tokens", "preemptions", "evictions", "batches", "events"):
        assert getattr(first, name) + getattr(second, name) == getattr(whole, name), name
    assert first.requests.unfinished > 0
    assert second.requests.finished == first.requests.unfinished


def test_cancelled_requests(calm: Recording) -> None:
    cancelled = edited(
        calm,
        lambda event: [
            ev.SequenceFinished(sequence_id=event.sequence_id, reason="cancelled")
            if isinstance(event, ev.SequenceFinished) and event.sequence_id.startswith("r2")
            else event
        ],
    )
    requests = measure(cancelled).requests
    assert (requests.finished, requests.cancelled) == (1, 1)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([3.0], 95, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        (list(map(float, range(100, 0, -1))), 95, 95.0),
    ],
)
def test_percentiles_are_values_that_occurred(values: list[float], percent: float, expected: float | None) -> None:
    assert percentile(values, percent) == expected


def test_text(calm: Recording) -> None:
    lines = stats_lines("run.mcap", measure(calm))
    assert lines[0].startswith("recording     run.mcap: ")
    for line in (
        "copies        1 on write",
        "requests      2 finished",
        "preemptions   0, 0 written positions to compute again",
    ):
        assert line in lines
    assert "prefix cache  8 of 20 tokens looked up were hit (40%)" in lines


def test_damage_is_told(calm: Recording) -> None:
    torn = recording_of(batch for _, batch in calm.batches[:5])
    torn.missing = "ends abruptly after batch 4 (EOF)"
    assert stats_lines("x", measure(torn))[1] == "incomplete    ends abruptly after batch 4 (EOF)"
    joined = Recording(Path("x"), calm.batches[6:], folded(calm, 6), 5)
    assert "incomplete    begins with the state after batch 5; what was before is not in it" in stats_lines(
        "x", measure(joined)
    )
    holed = Recording(Path("x"), calm.batches[:5] + calm.batches[6:])
    assert "incomplete    batches 5 to 5 are not in it" in stats_lines("x", measure(holed))


def test_nothing_at_all() -> None:
    """Only the engine's start: no division by nothing."""
    started = recording_of(run_engine(4, [], together=True)[:1])
    stats = measure(started)
    assert stats.generated_per_s is None
    assert stats_lines("x", stats)[-1] == "first token   p50 -, p95 - after submission"


@pytest.mark.parametrize(("kv_cache_dtype", "shown"), [("auto", "float32; "), ("fp8_e4m3", "float32, fp8_e4m3 KV; ")])
def test_the_type_of_kv_where_it_is_another(kv_cache_dtype: str, shown: str) -> None:
    stats = measure(recording_of(run_engine(4, [], together=True, kv_cache_dtype=kv_cache_dtype)))
    assert f"engine        fake, cpu {shown}4 blocks of 4 slots, paged" in stats_lines("x", stats)


def test_clock_of_these_tests(calm: Recording) -> None:
    assert all(batch.time_ns % MS == 0 for _, batch in calm.batches)
