"""A difference for people: a table of requests, then a table of totals."""

from kvscope.analysis.diff import Diff, RequestFigures, RequestPair, Total
from kvscope.analysis.wording import table
from kvscope.events.text import counted

REQUEST_HEADING = ("request", "prompt", "tokens", "steps", "peak blocks", "copies", "preempted", "waste", "")


def diff_lines(name_a: str, name_b: str, diff: Diff) -> list[str]:
    """The report of `kvscope diff`. A cell with one value means that both have it; `a -> b` that they differ."""
    equal = sum(pair.difference is None for pair in diff.requests)
    in_both = f"{counted(len(diff.requests), 'request')} in both, {equal} with equal tokens"
    lines = [
        f"A  {name_a}",
        f"B  {name_b}",
        *(f"note  {note}" for note in diff.notes),
        "",
        f"{in_both}; {len(diff.only_a)} only in A, {len(diff.only_b)} only in B",
        "",
    ]
    rows = [REQUEST_HEADING, *(_request_row(pair) for pair in diff.requests)]
    rows += [_lone_row(figures, "A") for figures in diff.only_a] + [_lone_row(figures, "B") for figures in diff.only_b]
    totals = [("total", "A", "B", "B/A"), *(_total_row(total) for total in diff.totals)]
    return [*lines, *table(rows, text_columns=(0, len(REQUEST_HEADING) - 1)), "", *table(totals)]


def _request_row(pair: RequestPair) -> tuple[str, ...]:
    a, b = pair.a, pair.b
    return (
        _both(a.request_id, b.request_id),
        str(pair.num_prompt_tokens),
        _both(str(a.generated_tokens), str(b.generated_tokens)),
        _both(str(a.steps), str(b.steps)),
        _both(str(a.peak_blocks), str(b.peak_blocks)),
        _both(str(a.copies), str(b.copies)),
        _both(str(a.preemptions), str(b.preemptions)),
        _both(f"{a.mean_unwritten_slots:.1f}", f"{b.mean_unwritten_slots:.1f}"),
        "; ".join(_remarks(pair)),
    )


def _remarks(pair: RequestPair) -> list[str]:
    remarks = [f"other {', '.join(pair.different_params)}"] if pair.different_params else []
    if pair.a.outcome != pair.b.outcome:
        remarks.append(f"{pair.a.outcome} -> {pair.b.outcome}")
    found = pair.difference
    if found is None:
        return [*remarks, "equal"]
    words = (f"token {side}" if side is not None else "nothing" for side in (found.a, found.b))
    return [*remarks, f"sequence {found.sequence} differs at token {found.position}: {' -> '.join(words)}"]


def _lone_row(figures: RequestFigures, side: str) -> tuple[str, ...]:
    return (
        figures.request_id,
        "",
        str(figures.generated_tokens),
        str(figures.steps),
        str(figures.peak_blocks),
        str(figures.copies),
        str(figures.preemptions),
        f"{figures.mean_unwritten_slots:.1f}",
        f"only in {side}",
    )


def _total_row(total: Total) -> tuple[str, ...]:
    ratio = f"{total.ratio:.2f}" if total.ratio is not None else "-"
    return total.name, _number(total.a), _number(total.b), ratio


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _both(a: str, b: str) -> str:
    return a if a == b else f"{a} -> {b}"
