"""What a simulation came to: figures for scripts, and the same as text. Times are virtual unless they say real."""

import msgspec

from kvscope.engine.simulation.simulation import Simulation
from kvscope.events.text import make_printable

NS_PER_S = 1e9
_REASONS = {  # the scheduler's words
    "queued": "until the next step",
    "order": "behind earlier requests",
    "sequence_cap": "for a seat (--max-num-seqs)",
    "token_budget": "for tokens of a step (--max-num-batched-tokens)",
    "blocks": "for free blocks",
    "watermark": "for free blocks above the watermark",
    "worst_case": "for blocks not promised to others",
    "reservation": "for blocks to reserve",
    "fragmentation": "for a long enough run of blocks",
    "preempted": "after being preempted",
}


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Names that `stats` has too mean the same. Waiting counts from the arrival in the trace."""

    trace: str
    requests: int
    finished: int
    refused: int
    first_refusal: str | None
    without_output: int  # of the trace; one token is generated all the same
    duration_s: float
    steps: int
    sequence_steps: int
    events: int
    generated_tokens: int
    computed_tokens: int
    generated_per_s: float
    computed_per_s: float
    requests_per_s: float
    mean_wait_s: float
    wait_p95_s: float
    longest_wait_s: float
    waited_s: dict[str, float]  # all requests together, by reason
    first_token_p50_s: float
    first_token_p95_s: float
    preemptions: int
    tokens_lost: int
    blocks_swapped_out: int
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    evictions: int
    num_blocks: int
    block_size: int
    peak_held: int
    mean_held: float
    peak_cached: int
    peak_unwritten_slots: int
    mean_unwritten_slots: float
    mean_unwritten_share: float  # of the slots held at the time
    peak_unwritten_share: float
    real_s: float
    cpu_s: float  # of this process, real as well
    findings: list[str]


def summarize(simulation: Simulation, *, real_s: float, cpu_s: float) -> Summary:
    """Call it once the engine has stopped."""
    engine, meter, trace = simulation.engine, simulation.meter, simulation.trace
    counters, steps = engine.counters, engine.step_number or 1
    duration_s = simulation.elapsed_ns / NS_PER_S
    waits, first_tokens = sorted(meter.wait_ns), sorted(meter.first_token_ns)
    return Summary(
        trace=trace.label,
        requests=len(trace),
        finished=meter.num_finished,
        refused=meter.num_refused,
        first_refusal=meter.first_refusal,
        without_output=trace.num_without_output,
        duration_s=duration_s,
        steps=engine.step_number,
        sequence_steps=meter.num_sequence_steps,
        events=meter.num_events,
        generated_tokens=counters.generated_tokens,
        computed_tokens=counters.computed_tokens,
        generated_per_s=_rate(counters.generated_tokens, duration_s),
        computed_per_s=_rate(counters.computed_tokens, duration_s),
        requests_per_s=_rate(meter.num_finished, duration_s),
        mean_wait_s=sum(waits) / NS_PER_S / (len(waits) or 1),
        wait_p95_s=_percentile_s(waits, 95),
        longest_wait_s=_percentile_s(waits, 100),
        waited_s={reason: ns / NS_PER_S for reason, ns in meter.waited_ns.most_common()},
        first_token_p50_s=_percentile_s(first_tokens, 50),
        first_token_p95_s=_percentile_s(first_tokens, 95),
        preemptions=counters.preemptions,
        tokens_lost=meter.tokens_lost,
        blocks_swapped_out=counters.blocks_swapped_out,
        prefix_lookup_tokens=counters.prefix_lookup_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        evictions=counters.evictions,
        num_blocks=engine.info.num_blocks,
        block_size=engine.info.block_size,
        peak_held=meter.peak_held,
        mean_held=meter.sum_held / steps,
        peak_cached=meter.peak_cached,
        peak_unwritten_slots=meter.peak_unwritten,
        mean_unwritten_slots=meter.sum_unwritten / steps,
        mean_unwritten_share=meter.sum_unwritten_share / steps,
        peak_unwritten_share=meter.peak_unwritten_share,
        real_s=real_s,
        cpu_s=cpu_s,
        findings=engine.check_integrity(),
    )


def summary_lines(summary: Summary) -> list[str]:
    """For people."""
    s = summary
    lines = [
        f"trace       {make_printable(s.trace)}: {s.requests:,} requests",
        (
            f"simulated   {s.steps:,} steps, {s.sequence_steps:,} sequence steps, {s.events:,} events in "
            f"{s.real_s:.1f} s ({_rate(s.sequence_steps, s.real_s):,.0f} sequence steps/s, "
            f"{_rate(s.sequence_steps, s.cpu_s):,.0f} per second of CPU time)"
        ),
        (
            f"time        {s.duration_s:,.1f} s virtual: {s.requests_per_s:.2f} requests/s, "
            f"{s.generated_per_s:,.0f} tokens/s generated, {s.computed_per_s:,.0f} computed"
        ),
        f"requests    {s.finished:,} finished, {s.refused:,} refused",
        f"waiting     mean {s.mean_wait_s:.2f} s, p95 {s.wait_p95_s:.2f} s, longest {s.longest_wait_s:.2f} s{_why(s)}",
        f"first token p50 {s.first_token_p50_s:.2f} s, p95 {s.first_token_p95_s:.2f} s after arrival",
        (
            f"pool        {s.num_blocks:,} blocks of {s.block_size} slots: peak {s.peak_held:,} held "
            f"({_share(s.peak_held, s.num_blocks)}), mean {s.mean_held:,.0f}; peak {s.peak_cached:,} cached"
        ),
        (
            f"waste       {100 * s.mean_unwritten_share:.1f}% of held slots unwritten on average, "
            f"{100 * s.peak_unwritten_share:.1f}% at worst; peak {s.peak_unwritten_slots:,} slots"
        ),
        (
            f"prefixes    {_share(s.prefix_hit_tokens, s.prefix_lookup_tokens)} of {s.prefix_lookup_tokens:,} tokens "
            f"hit, {s.evictions:,} blocks evicted"
        ),
        f"preempted   {s.preemptions:,} times, {s.tokens_lost:,} tokens lost{_swapped(s)}",
        f"audit       {'ok' if not s.findings else f'{len(s.findings)} findings'}",
        *(f"  {finding}" for finding in s.findings),
    ]
    if s.first_refusal is not None:
        lines.insert(4, f"            the first: {make_printable(s.first_refusal)}")
    if s.without_output:
        lines.insert(4, f"            {s.without_output:,} ask for no output; they generate one token")
    return lines


def _swapped(s: Summary) -> str:
    return f", {s.blocks_swapped_out:,} blocks swapped to the host" if s.blocks_swapped_out else ""


def _why(s: Summary) -> str:
    total = sum(s.waited_s.values())
    if not total:
        return ""
    return "; of all waiting, " + ", ".join(
        f"{_share(waited, total)} {_REASONS.get(reason, reason)}" for reason, waited in s.waited_s.items()
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0%"


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _percentile_s(ordered_ns: list[int], percent: int) -> float:
    """The nearest rank, in seconds; 0 without values."""
    return ordered_ns[max(-(-len(ordered_ns) * percent // 100), 1) - 1] / NS_PER_S if ordered_ns else 0.0
