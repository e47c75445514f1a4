"""`kvscope diff`: two recordings of the same prompts, request by request and in total.

Requests are the same when their prompts have the same token ids and their parameters are equal; the first with the
first, the second with the second. What is left is paired by the prompt alone, and the parameters that differ are told.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import msgspec

from kvscope.analysis.pool_meter import PoolMeter
from kvscope.analysis.request_log import RequestLog, RequestRecord
from kvscope.analysis.request_memory import RequestCost, RequestMemory
from kvscope.analysis.stats import PoolSeries, Stats, summarize
from kvscope.analysis.walk import walk
from kvscope.analysis.wording import beginning
from kvscope.events.types import EngineInfo, SamplingParams
from kvscope.transport.recording.stored_series import AnyRecording


class TokenDifference(msgspec.Struct, frozen=True):
    """The first generated token that differs; None: that side had ended."""

    sequence: int
    position: int  # of the generated tokens, from 0
    a: int | None
    b: int | None


class RequestFigures(msgspec.Struct, frozen=True):
    """One request in one recording."""

    request_id: str
    outcome: str
    generated_tokens: int
    steps: int
    peak_blocks: int
    copies: int
    preemptions: int
    mean_unwritten_slots: float


class RequestPair(msgspec.Struct, frozen=True, kw_only=True):
    """The same request in both."""

    num_prompt_tokens: int
    a: RequestFigures
    b: RequestFigures
    different_params: list[str]
    difference: TokenDifference | None


class Total(msgspec.Struct, frozen=True):
    """One figure of both recordings; the ratio is b / a, and None where a is 0."""

    name: str
    a: float | None
    b: float | None
    ratio: float | None


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """`same`: every request is in both, and every token is equal. `held_by_step`: blocks after each step's commit."""

    same: bool
    notes: list[str]
    requests: list[RequestPair]
    only_a: list[RequestFigures]
    only_b: list[RequestFigures]
    totals: list[Total]
    held_by_step_a: list[int]
    held_by_step_b: list[int]


class _Request(NamedTuple):
    record: RequestRecord
    cost: RequestCost


class _Side(NamedTuple):
    info: EngineInfo | None
    requests: list[_Request]
    stats: Stats
    held_by_step: list[int]


def diff(a: AnyRecording, b: AnyRecording) -> Diff:
    """One pass over each."""
    sides = _read(a), _read(b)
    pairs = list(_pair([*sides[0].requests], [*sides[1].requests]))
    matched = [(one, other) for one, other in pairs if one is not None and other is not None]
    requests = [_compare(one, other) for one, other in matched]
    only_a = [_figures(one) for one, other in pairs if one is not None and other is None]
    only_b = [_figures(other) for one, other in pairs if one is None and other is not None]
    return Diff(
        same=not only_a and not only_b and all(pair.difference is None for pair in requests),
        notes=[*_settings(*sides), *_notes("A", sides[0].stats), *_notes("B", sides[1].stats)],
        requests=requests,
        only_a=only_a,
        only_b=only_b,
        totals=[*_totals(sides[0].stats, sides[1].stats)],
        held_by_step_a=sides[0].held_by_step,
        held_by_step_b=sides[1].held_by_step,
    )


SETTINGS = (
    "model", "device", "dtype", "attention_backend", "cuda_graphs", "allocator", "prefix_caching", "admission",
    "preemption", "num_host_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
)  # fmt: skip
TOTALS: dict[str, Callable[[Stats], float | None]] = {
    "requests": lambda s: s.requests.finished + s.requests.cancelled + s.requests.unfinished,
    "steps": lambda s: s.steps,
    "busy_s": lambda s: s.busy_s,
    "generated_tokens": lambda s: s.generated_tokens,
    "computed_tokens": lambda s: s.computed_tokens,
    "generated_per_s": lambda s: s.generated_per_s,
    "num_blocks": lambda s: s.pool.num_blocks,
    "block_size": lambda s: s.pool.block_size,
    "peak_held": lambda s: s.pool.peak_held,
    "mean_held": lambda s: s.pool.mean_held,
    "peak_unwritten_slots": lambda s: s.pool.peak_unwritten_slots,
    "mean_unwritten_slots": lambda s: s.pool.mean_unwritten_slots,
    "peak_saved": lambda s: s.pool.peak_saved,
    "mean_saved": lambda s: s.pool.mean_saved,
    "copies": lambda s: s.copies,
    "preemptions": lambda s: s.preemptions,
    "tokens_lost": lambda s: s.tokens_lost,
    "evictions": lambda s: s.evictions,
    "prefix_hit_tokens": lambda s: s.prefix_hit_tokens,
    "mean_wait_s": lambda s: s.requests.mean_wait_s,
    "first_token_p50_s": lambda s: s.requests.first_token_p50_s,
    "first_token_p95_s": lambda s: s.requests.first_token_p95_s,
}


def _read(recording: AnyRecording) -> _Side:
    meter, log, memory = PoolMeter(), RequestLog(), RequestMemory()
    series = PoolSeries(meter)
    passed = walk(recording, meter, series, log, memory)
    log.finish(passed.state)
    requests = [_Request(*pair) for pair in zip(log.records, memory.costs, strict=True)]
    return _Side(passed.state.info, requests, summarize(recording, passed, series, log), series.held_by_step)


def _pair(left: list[_Request], right: list[_Request]) -> Iterator[tuple[_Request | None, _Request | None]]:
    """Pairs in the order of the left side, then what is only right."""
    partner: dict[int, _Request] = {}
    for key in (_prompt_and_params, _prompt):
        waiting: dict[Hashable, list[_Request]] = defaultdict(list)
        taken = {id(request) for request in partner.values()}
        for request in right:
            if id(request) not in taken:
                waiting[key(request)].append(request)
        for request in left:
            if id(request) not in partner and waiting[key(request)]:
                partner[id(request)] = waiting[key(request)].pop(0)
    for request in left:
        yield request, partner.get(id(request))
    taken = {id(request) for request in partner.values()}
    for request in right:
        if id(request) not in taken:
            yield None, request


def _prompt(request: _Request) -> Hashable:
    return tuple(request.record.prompt_token_ids)


def _prompt_and_params(request: _Request) -> Hashable:
    return _prompt(request), request.record.params


def _compare(a: _Request, b: _Request) -> RequestPair:
    names = SamplingParams.__struct_fields__
    return RequestPair(
        num_prompt_tokens=len(a.record.prompt_token_ids),
        a=_figures(a),
        b=_figures(b),
        different_params=[n for n in names if getattr(a.record.params, n) != getattr(b.record.params, n)],
        difference=_first_difference(a.record.token_ids, b.record.token_ids),
    )


def _first_difference(a: list[list[int]], b: list[list[int]]) -> TokenDifference | None:
    for sequence in range(max(len(a), len(b))):
        ours = a[sequence] if sequence < len(a) else []
        theirs = b[sequence] if sequence < len(b) else []
        for position in range(max(len(ours), len(theirs))):
            one = ours[position] if position < len(ours) else None
            other = theirs[position] if position < len(theirs) else None
            if one != other:
                return TokenDifference(sequence, position, one, other)
    return None


def _figures(request: _Request) -> RequestFigures:
    record, cost = request
    return RequestFigures(
        record.request_id,
        record.outcome,
        sum(map(len, record.token_ids)),
        cost.num_steps,
        cost.peak_blocks,
        record.num_copies,
        record.num_preemptions,
        cost.mean_unwritten_slots,
    )


def _totals(a: Stats, b: Stats) -> Iterator[Total]:
    """The figures, then the time that requests waited, all together, by reason."""
    for name, get in TOTALS.items():
        yield _total(name, get(a), get(b))
    ours, theirs = a.requests.waited_s, b.requests.waited_s
    for kind in dict.fromkeys(kind for waited in (ours, theirs) for kind in waited if waited[kind]):
        yield _total(f"waited_{kind}_s", ours.get(kind, 0.0), theirs.get(kind, 0.0))


def _total(name: str, a: float | None, b: float | None) -> Total:
    return Total(name, a, b, b / a if a and b is not None else None)


def _settings(a: _Side, b: _Side) -> Iterator[str]:
    """How the engines were started, where not alike; sizes of the pool are among the totals."""
    if a.info is None or b.info is None:
        return
    for name in SETTINGS:
        ours, theirs = getattr(a.info, name), getattr(b.info, name)
        if ours != theirs:
            yield f"{name} is {ours} in A, {theirs} in B"


def _notes(side: str, stats: Stats) -> Iterator[str]:
    if stats.initial_seq is not None:
        yield f"{side} {beginning(stats.initial_seq)}"
    if stats.missing is not None:
        yield f"{side} {stats.missing}"
    for first, last in stats.holes:
        yield f"{side}: batches {first} to {last} are not in it"
    if stats.skipped_batches:
        yield f"{side}: {stats.skipped_batches} batches do not fit; see kvscope check"
