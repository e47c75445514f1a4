"""The insight screen: the pool over time, rates, the waste ledger, what the prefix cache lost, the audit. Pure."""

from collections.abc import Sequence

from textual.strip import Strip

from kvscope.analysis.prefix_losses import REGRET_WINDOW_NS, find_near_misses, find_regrets
from kvscope.dashboard import theme
from kvscope.dashboard.accounts import TABLE_WIDTH, draw_ledger
from kvscope.dashboard.charts import AXIS_WIDTH, draw_bars, draw_stack, layer_looks
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.series import Sample, fold_samples
from kvscope.dashboard.strips import Part, fit_whole, make_strip, measure, wrap_parts

WIDE = TABLE_WIDTH + 44  # from here on the ledger and the prefix cache stand side by side
MIN_CHART_HEIGHT = 4
MIN_SCALE = 64  # slots: nearer than that a chart says nothing more
MAX_LISTED = 8  # near misses, regrets and findings, the latest ones
_LAYERS = ("shared", "written", "reserved", "cached", "free")


def draw_insight(frame: Frame, samples: Sequence[Sample], glyphs: Glyphs, width: int, height: int) -> list[Strip]:
    """As many lines as there is to tell; the chart takes what room is left."""
    if frame.info is None:
        return [make_strip([(" no engine has been announced yet", theme.SOFT)], width)]
    below = _draw_below(frame, glyphs, width)
    chart_height = max(height - len(below) - 6, MIN_CHART_HEIGHT)
    return [*draw_history(samples, glyphs, width, chart_height), make_strip([], width), *below]


def _draw_below(frame: Frame, glyphs: Glyphs, width: int) -> list[Strip]:
    ledger = draw_ledger(frame.ledger, glyphs, min(width, TABLE_WIDTH)) if frame.ledger else []
    if width < WIDE:
        return [*draw_findings(frame, glyphs, width), *ledger, make_strip([]), *draw_prefixes(frame, glyphs, width)]
    beside_width = width - TABLE_WIDTH - 3
    beside = [*draw_prefixes(frame, glyphs, beside_width), make_strip([]), *draw_audit(frame, glyphs, beside_width)]
    empty = make_strip([])
    return [
        Strip.join([_at(ledger, y, empty).adjust_cell_length(TABLE_WIDTH + 3), _at(beside, y, empty)])
        for y in range(max(len(ledger), len(beside)))
    ]


def _at(lines: Sequence[Strip], y: int, otherwise: Strip) -> Strip:
    return lines[y] if y < len(lines) else otherwise


# --- over time ------------------------------------------------------------------------------------------------------


def draw_history(samples: Sequence[Sample], glyphs: Glyphs, width: int, height: int) -> list[Strip]:
    """The chart of the pool, and the two rates under it on the same scale of time."""
    columns = fold_samples(samples, max(width - AXIS_WIDTH - 1, 1))
    if len(samples) < 2:
        return [make_strip([(" the pool over time: nothing has moved yet while this was watched", theme.SOFT)], width)]
    shown = [column.sample for column in columns]
    scale = chart_scale([sample for sample in shown if sample])
    labels = ["" for _ in range(height)]
    labels[0], labels[-1] = f"{scale:,}", "0 slots"
    stack = draw_stack([_up_to(scale, sample) if sample else None for sample in shown], labels, glyphs, height)
    return [
        _draw_legend(samples, scale, glyphs, width),
        *stack,
        _rate_line("tok/s", [c.tokens_per_s for c in columns], glyphs, width),
        _rate_line("step ms", [c.step_ns / 1e6 if c.step_ns else None for c in columns], glyphs, width),
        _time_line(samples, width, has_gaps=None in shown),
    ]


def chart_scale(samples: Sequence[Sample]) -> int:
    """Slots at the chart's upper edge: the pool, halved for as long as all that is not free still fits."""
    pool, most = sum(samples[-1].layers), max(sum(sample.layers) - sample.free for sample in samples)
    scale = pool
    while scale // 2 >= max(most, MIN_SCALE):
        scale //= 2
    return scale


def _up_to(scale: int, sample: Sample) -> list[int]:
    """The layers of the slots below the chart's upper edge: the free ones are on top."""
    *used, _ = sample.layers
    return [*used, scale - sum(used)]


def _draw_legend(samples: Sequence[Sample], scale: int, glyphs: Glyphs, width: int) -> Strip:
    pool = sum(samples[-1].layers)
    part = f", the lowest {scale:,} of {pool:,}" if scale < pool and width >= 120 else ""
    items: list[list[Part]] = [[(" Pool over time", theme.BRAND), (f" in slots{part} ", theme.SOFT)]]
    for (sign, style), name, count in zip(layer_looks(glyphs), _LAYERS, samples[-1].layers, strict=True):
        items.append([("  ", theme.PLAIN), (sign, style), (f" {name} ", theme.SOFT), (f"{count:,}", theme.STRONG)])
    return make_strip(fit_whole(items, width), width)


def _rate_line(name: str, values: Sequence[float | None], glyphs: Glyphs, width: int) -> Strip:
    """Bars under the chart; the number at the axis is the height of the highest."""
    peak = max((value for value in values if value is not None), default=0.0)
    label: Part = (f"{name} {peak:,.{1 if peak < 100 else 0}f}".rjust(AXIS_WIDTH - 1) + " ", theme.SOFT)
    bars = draw_bars(values, peak, theme.GOOD, glyphs)
    return make_strip([label, *bars], width)


def _time_line(samples: Sequence[Sample], width: int, *, has_gaps: bool) -> Strip:
    first, last = samples[0], samples[-1]
    blank = "blank: not looked at   " if has_gaps and width >= 100 else ""
    left = f"{first.time_ns / 1e9:,.1f} s, step {first.step}"
    right = f"{blank}{last.time_ns / 1e9:,.1f} s, step {last.step}"
    room = max(width - AXIS_WIDTH - 1 - len(left), len(right))
    return make_strip([(" " * AXIS_WIDTH + left + right.rjust(room), theme.FAINT)], width)


# --- prefix cache and audit -------------------------------------------------------------------------------------------


def draw_prefixes(frame: Frame, glyphs: Glyphs, width: int) -> list[Strip]:
    """What was hit over the engine's life; near misses and regretted evictions as far as the log reaches."""
    counters, info = frame.counters, frame.info
    title: Part = (" Prefix cache", theme.BRAND)
    if info is not None and not info.prefix_caching:
        return [make_strip([title, ("  off: every prompt is computed", theme.SOFT)], width)]
    share = 100 * counters.prefix_hit_tokens / counters.prefix_lookup_tokens if counters.prefix_lookup_tokens else 0
    hits = f"  {counters.prefix_hit_tokens:,} of {counters.prefix_lookup_tokens:,} tokens hit, {share:.0f}%"
    near, regrets = find_near_misses(frame.log), find_regrets(frame.log)
    lines = [make_strip([title, (hits, theme.TEXT), (f"; {counters.evictions:,} evicted", theme.SOFT)], width)]
    lines.append(_subtitle("near misses", len(near), width))
    block_size = frame.pool.block_size
    for miss in near[: -MAX_LISTED - 1 : -1]:
        words = f"{miss.num_common} tokens in common, {miss.num_hit} hit: block is {block_size}"
        lines += _entry(miss.step, miss.request_id, words, width)
    lines.append(_subtitle(f"evictions regretted within {REGRET_WINDOW_NS // 10**9} s", len(regrets), width))
    for regret in regrets[: -MAX_LISTED - 1 : -1]:
        words = f"wanted it {regret.elapsed_ns / 1e9:.1f} s after step {regret.evicted_at_step} evicted it for "
        lines += _entry(regret.step, regret.request_id, words + regret.evicted_for, width)
    return lines


def _subtitle(name: str, count: int, width: int) -> Strip:
    return make_strip([(f"   {name} ", theme.SOFT), (f"{count}", theme.NOTICE if count else theme.SOFT)], width)


def _entry(step: int, request_id: str, words: str, width: int) -> list[Strip]:
    head: Part = (f"     {step:>5} ", theme.FAINT)
    name: Part = (f"{request_id} ", theme.STRONG)
    body = wrap_parts([(words, theme.TEXT)], max(width - measure([head, name]), 8))
    indent = make_strip([(" " * measure([head, name]), theme.PLAIN)])
    return [Strip.join([make_strip([head, name]), body[0]]), *(Strip.join([indent, line]) for line in body[1:])]


def draw_audit(frame: Frame, glyphs: Glyphs, width: int) -> list[Strip]:
    """What the auditor found in the stream; all well is said too."""
    if not frame.findings:
        return [make_strip([(" Audit ", theme.BRAND), (f" {glyphs.tick} no invariant broken", theme.GOOD)], width)]
    return draw_findings(frame, glyphs, width)


def draw_findings(frame: Frame, glyphs: Glyphs, width: int) -> list[Strip]:
    """A red line, and the findings one by one; nothing when there are none."""
    if not frame.findings:
        return []
    banner = f" {glyphs.cross} AUDIT: {len(frame.findings)} findings ".ljust(width)
    lines = [make_strip([(banner, theme.BANNER_BAD)], width)]
    for finding in frame.findings[:MAX_LISTED]:
        words: list[Part] = [(f"step {finding.step}, invariant {finding.rule}: {finding.message}", theme.BAD)]
        lines += [Strip.join([make_strip([("   ", theme.PLAIN)]), line]) for line in wrap_parts(words, width - 3)]
    return [*lines, make_strip([], width)]
