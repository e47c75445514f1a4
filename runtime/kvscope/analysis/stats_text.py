"""Statistics for people."""

from kvscope.analysis.stats import RequestStats, Stats
from kvscope.analysis.wording import beginning, fact, seconds, share
from kvscope.events.text import counted


def stats_lines(name: str, stats: Stats) -> list[str]:
    """The report of `kvscope stats`; `name` is the recording's, printable."""
    pool = stats.pool
    return [
        fact("recording", f"{name}: {counted(stats.batches, 'batch')}, {counted(stats.events, 'event')}"),
        *_damage(stats),
        fact(
            "engine",
            f"{stats.model}, {stats.device} {stats.dtype}"
            f"{f', {stats.kv_dtype} KV' if stats.kv_dtype != stats.dtype else ''}; "
            f"{counted(pool.num_blocks, 'block')} of {counted(pool.block_size, 'slot')}, {stats.allocator}",
        ),
        fact(
            "duration",
            f"{seconds(stats.duration_s)}, {seconds(stats.busy_s)} of it with work; {counted(stats.steps, 'step')}",
        ),
        fact("requests", _outcomes(stats.requests)),
        fact(
            "tokens",
            f"{stats.generated_tokens:,} generated{_rate(stats.generated_per_s)}, "
            f"{stats.computed_tokens:,} computed{_rate(stats.computed_per_s)}",
        ),
        *_pool_lines(stats),
        fact("copies", f"{stats.copies:,} on write"),
        fact(
            "preemptions", f"{stats.preemptions:,}, {counted(stats.tokens_lost, 'written position')} to compute again"
        ),
        fact("evictions", counted(stats.evictions, "cached block")),
        fact(
            "prefix cache",
            f"{stats.prefix_hit_tokens:,} of {counted(stats.prefix_lookup_tokens, 'token')} looked up were hit "
            f"({share(stats.prefix_hit_tokens, stats.prefix_lookup_tokens)})",
        ),
        *_time_lines(stats.requests),
    ]


def _damage(stats: Stats) -> list[str]:
    lines = [fact("incomplete", beginning(stats.initial_seq))] if stats.initial_seq is not None else []
    lines += [fact("incomplete", stats.missing)] if stats.missing is not None else []
    lines += [fact("incomplete", f"batches {first} to {last} are not in it") for first, last in stats.holes]
    if stats.skipped_batches:
        lines.append(fact("incomplete", f"{counted(stats.skipped_batches, 'batch')} do not fit; see kvscope check"))
    if stats.dropped_batches:
        lines.append(fact("incomplete", f"the engine dropped {counted(stats.dropped_batches, 'batch')}"))
    return lines


def _outcomes(requests: RequestStats) -> str:
    words = [f"{requests.finished:,} finished"]
    words += [
        f"{number:,} {outcome}"
        for number, outcome in (
            (requests.cancelled, "cancelled"),
            (requests.refused, "refused"),
            (requests.unfinished, "unfinished"),
        )
        if number
    ]
    return ", ".join(words)


def _pool_lines(stats: Stats) -> list[str]:
    pool = stats.pool
    return [
        fact(
            "held",
            f"peak {counted(pool.peak_held, 'block')} ({share(pool.peak_held, pool.num_blocks)} of the pool), "
            f"mean {pool.mean_held:.1f} ({share(pool.mean_held, pool.num_blocks)})",
        ),
        fact(
            "waste",
            f"unwritten after a step: {pool.mean_unwritten_slots:.1f} slots on average, {pool.peak_unwritten_slots:,} "
            f"at most; of those held {share(pool.mean_unwritten_share, 1)} on average, "
            f"{share(pool.peak_unwritten_share, 1)} at most",
        ),
        fact("sharing", f"saved {counted(pool.peak_saved, 'block')} at the peak, mean {pool.mean_saved:.1f}"),
    ]


def _time_lines(requests: RequestStats) -> list[str]:
    reasons = ", ".join(f"{reason} {seconds(waited)}" for reason, waited in requests.waited_s.items() if waited)
    return [
        fact(
            "waiting",
            f"mean {seconds(requests.mean_wait_s)}, longest {seconds(requests.longest_wait_s)}"
            + (f"; in all: {reasons}" if reasons else ""),
        ),
        fact(
            "first token",
            f"p50 {seconds(requests.first_token_p50_s)}, p95 {seconds(requests.first_token_p95_s)} after submission",
        ),
    ]


def _rate(per_second: float | None) -> str:
    return f" ({per_second:,.1f}/s)" if per_second is not None else ""
