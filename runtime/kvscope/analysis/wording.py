"""Figures and names as text: aligned facts, units, shares. Everything that came from a file is printable already."""

from collections.abc import Iterable, Sequence

from kvscope.analysis.walk import Hole

LABEL_WIDTH = 13


def fact(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}} {text}"


def seconds(value: float | None) -> str:
    """With a unit that fits; `-` where there is nothing to tell."""
    if value is None:
        return "-"
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:,.1f} s"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def beginning(initial_seq: int) -> str:
    """What a recording from mid-life lacks."""
    return f"begins with the state after batch {initial_seq}; what was before is not in it"


def hole_sentences(holes: Iterable[Hole]) -> list[str]:
    return [
        f"batches {hole.first_seq} to {hole.last_seq} are not in it"
        + ("; a full state follows" if hole.is_marked else "")
        for hole in holes
    ]


def table(rows: Sequence[Sequence[str]], *, text_columns: Sequence[int] = (0,)) -> list[str]:
    """Columns as wide as their widest cell; text to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
