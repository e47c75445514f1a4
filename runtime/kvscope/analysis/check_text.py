"""The report of a check for people: one line per check."""

from kvscope.analysis.check import CheckReport
from kvscope.events.text import counted

MAX_FINDINGS_SHOWN = 20


def check_lines(report: CheckReport) -> list[str]:
    """`ok` or `FAIL` first; findings are told below the audit's line."""
    looked_at = f"{counted(report.batches, 'batch')}, {counted(report.events, 'event')}"
    lines = [_line(not report.findings, "audit", f"{counted(len(report.findings), 'finding')} in {looked_at}")]
    lines += [
        f"      invariant {finding.rule}, step {finding.step}, batch {finding.seq}: {finding.message}"
        for finding in report.findings[:MAX_FINDINGS_SHOWN]
    ]
    if len(report.findings) > MAX_FINDINGS_SHOWN:
        lines.append(f"      and {len(report.findings) - MAX_FINDINGS_SHOWN:,} more")
    lines += [_line(result.ok, result.text, result.detail) for result in report.assertions]
    return lines + [f"note  {note}" for note in report.notes]


def _line(ok: bool, what: str, detail: str) -> str:
    return f"{'ok' if ok else 'FAIL':<4}  {what:<24} {detail}"
