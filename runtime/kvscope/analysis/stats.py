"""Figures of a whole recording. Means are over steps, after each commit; peaks over all batches, except of waste.

Slots are reserved before they are written in every step, so waste is looked at when the step has written them.
"""

from collections import Counter

import msgspec

from kvscope.analysis.pool_meter import PoolMeter, block_size_of
from kvscope.analysis.request_log import RequestLog, RequestRecord
from kvscope.analysis.walk import Observer, Walk, walk
from kvscope.events.state import Counters, EngineState
from kvscope.transport.recording.stored_series import AnyRecording

NS_PER_S = 1e9


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks held, kept by sharing, and reserved slots without KV. Shares are of the pool, or of the held slots."""

    num_blocks: int
    block_size: int
    peak_held: int
    mean_held: float
    peak_cached: int
    peak_unwritten_slots: int
    mean_unwritten_slots: float
    mean_unwritten_share: float  # of the slots held at the time
    peak_unwritten_share: float
    peak_saved: int
    mean_saved: float


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by outcome; times in seconds."""

    finished: int
    cancelled: int
    refused: int
    unfinished: int
    waited_s: dict[str, float]  # all requests together, by reason
    mean_wait_s: float
    longest_wait_s: float
    first_token_p50_s: float | None
    first_token_p95_s: float | None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvscope stats` prints. Counts are of the recorded time, not of the engine's whole life."""

    batches: int
    events: int
    initial_seq: int | None  # not None: the batch whose state it begins with
    missing: str | None
    holes: list[tuple[int, int]]
    skipped_batches: int
    model: str
    device: str
    dtype: str
    kv_dtype: str
    allocator: str
    duration_s: float
    busy_s: float  # some request was not finished
    steps: int
    requests: RequestStats
    generated_tokens: int
    computed_tokens: int
    generated_per_s: float | None  # while busy
    computed_per_s: float | None
    pool: PoolStats
    copies: int
    preemptions: int
    tokens_lost: int
    evictions: int
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    dropped_batches: int


class PoolSeries(Observer):
    """Peaks and sums of the pool's figures. Its meter must be shown each event before this is shown the batch."""

    def __init__(self, meter: PoolMeter) -> None:
        self._meter = meter
        self.held_by_step: list[int] = []  # blocks, after each commit
        self.peak_held = self.peak_cached = self.peak_saved = self.peak_unwritten = 0
        self.sum_saved = self.sum_unwritten = 0
        self.sum_unwritten_share = self.peak_unwritten_share = 0.0

    def on_state(self, state: EngineState) -> None:
        self._take_peaks()

    def after_batch(self, seq: int, state: EngineState) -> None:
        self._take_peaks()
        if state.phase != "commit":
            return
        figures = self._meter.figures
        self.held_by_step.append(figures.held)
        self.sum_saved += figures.saved
        self.sum_unwritten += figures.unwritten_slots
        self.peak_unwritten = max(self.peak_unwritten, figures.unwritten_slots)
        share = figures.unwritten_slots / (figures.held * block_size_of(state)) if figures.held else 0.0
        self.sum_unwritten_share += share
        self.peak_unwritten_share = max(self.peak_unwritten_share, share)

    def _take_peaks(self) -> None:
        figures = self._meter.figures
        self.peak_held = max(self.peak_held, figures.held)
        self.peak_cached = max(self.peak_cached, figures.cached)
        self.peak_saved = max(self.peak_saved, figures.saved)

    def figures(self, state: EngineState) -> PoolStats:
        steps = len(self.held_by_step) or 1
        return PoolStats(
            num_blocks=len(state.ref_counts),
            block_size=block_size_of(state),
            peak_held=self.peak_held,
            mean_held=sum(self.held_by_step) / steps,
            peak_cached=self.peak_cached,
            peak_unwritten_slots=self.peak_unwritten,
            mean_unwritten_slots=self.sum_unwritten / steps,
            mean_unwritten_share=self.sum_unwritten_share / steps,
            peak_unwritten_share=self.peak_unwritten_share,
            peak_saved=self.peak_saved,
            mean_saved=self.sum_saved / steps,
        )


def measure(recording: AnyRecording) -> Stats:
    """One pass over the recording."""
    meter = PoolMeter()
    series, log = PoolSeries(meter), RequestLog()
    passed = walk(recording, meter, series, log)
    log.finish(passed.state)
    return summarize(recording, passed, series, log)


def summarize(recording: AnyRecording, passed: Walk, series: PoolSeries, log: RequestLog) -> Stats:
    """The figures of a pass that these two have observed."""
    state, counters = passed.state, count(passed)
    busy_s = log.busy_ns / NS_PER_S
    return Stats(
        batches=passed.num_batches,
        events=passed.num_events,
        initial_seq=recording.initial_seq,
        missing=recording.missing,
        holes=[(hole.first_seq, hole.last_seq) for hole in passed.holes],
        skipped_batches=passed.num_skipped_batches,
        model=state.info.model if state.info is not None else "",
        device=state.info.device if state.info is not None else "",
        dtype=state.info.dtype if state.info is not None else "",
        kv_dtype=state.info.kv_dtype if state.info is not None else "",
        allocator=state.info.allocator if state.info is not None else "",
        duration_s=max(state.time_ns - _first_ns(recording), 0) / NS_PER_S,
        busy_s=busy_s,
        steps=num_steps(passed),
        requests=_request_stats(log),
        generated_tokens=counters.generated_tokens,
        computed_tokens=counters.computed_tokens,
        generated_per_s=counters.generated_tokens / busy_s if busy_s else None,
        computed_per_s=counters.computed_tokens / busy_s if busy_s else None,
        pool=series.figures(state),
        copies=counters.copies,
        preemptions=counters.preemptions,
        tokens_lost=log.tokens_lost,
        evictions=counters.evictions,
        prefix_lookup_tokens=counters.prefix_lookup_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        dropped_batches=counters.dropped_batches,
    )


def count(passed: Walk) -> Counters:
    """The engine's counters over the recorded time."""
    last = msgspec.structs.asdict(passed.state.counters)
    if passed.first_state is None:
        return Counters(**last)
    first = msgspec.structs.asdict(passed.first_state.counters)
    return Counters(**{name: value - first[name] for name, value in last.items()})


def num_steps(passed: Walk) -> int:
    first_step = passed.first_state.step if passed.first_state is not None else 0
    return max(passed.state.step - first_step, 0)


def percentile(values: list[float], percent: float) -> float | None:
    """The nearest rank: a value that occurred. None without values."""
    if not values:
        return None
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(int(rank) - 1, 0)]


def _first_ns(recording: AnyRecording) -> int:
    if recording.initial_state is not None:
        return recording.initial_state.time_ns
    return next((batch.time_ns for _, batch in recording.batches), 0)


def _request_stats(log: RequestLog) -> RequestStats:
    outcomes = Counter(record.outcome for record in log.records)
    waits = [record.waited_ns.total() / NS_PER_S for record in log.records]
    first_tokens = [wait for record in log.records if (wait := _first_token_s(record)) is not None]
    return RequestStats(
        finished=outcomes["finished"],
        cancelled=outcomes["cancelled"],
        refused=log.num_refused,
        unfinished=outcomes["unfinished"],
        waited_s={reason: ns / NS_PER_S for reason, ns in waited_by_reason(log.records).items()},
        mean_wait_s=sum(waits) / len(waits) if waits else 0.0,
        longest_wait_s=max(waits, default=0.0),
        first_token_p50_s=percentile(first_tokens, 50),
        first_token_p95_s=percentile(first_tokens, 95),
    )


def waited_by_reason(records: list[RequestRecord]) -> dict[str, int]:
    """Nanoseconds, the longest first."""
    waited: Counter[str] = Counter()
    for record in records:
        waited.update(record.waited_ns)
    return dict(waited.most_common())


def _first_token_s(record: RequestRecord) -> float | None:
    if record.first_token_ns is None:
        return None
    return max(record.first_token_ns - record.submitted_ns, 0) / NS_PER_S
