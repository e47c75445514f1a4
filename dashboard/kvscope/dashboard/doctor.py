"""`kvscope doctor`: what this terminal and this machine offer the dashboard, and how to mend what is missing."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kvscope.events.text import make_printable


class Level(Enum):
    """FAIL: the dashboard or the engine cannot do its work. WARN: it can, but less well."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the report; `fix` says what to do, where there is something."""

    name: str
    level: Level
    found: str
    fix: str = ""


Section = Callable[[], Iterable[Check]]


def ok(name: str, found: str) -> Check:
    return Check(name, Level.OK, found)


def warn(name: str, found: str, fix: str) -> Check:
    return Check(name, Level.WARN, found, fix)


def fail(name: str, found: str, fix: str) -> Check:
    return Check(name, Level.FAIL, found, fix)


def examine() -> list[Check]:
    """Everything, in the order of the report. A check that breaks is itself a line: the doctor never stops."""
    from kvscope.dashboard import doctor_machine, doctor_terminal

    return [check for section in (*doctor_terminal.SECTIONS, *doctor_machine.SECTIONS) for check in _guarded(section)]


def _guarded(section: Section) -> Iterator[Check]:
    try:
        yield from section()
    except Exception as error:
        yield warn(section.__name__, f"could not be checked: {type(error).__name__}: {error}", "please report this")


def report_lines(checks: Sequence[Check]) -> list[str]:
    """Aligned, printable, the fix under what it mends."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.level.value:<5} {check.name:<{width}}  {make_printable(check.found)}")
        if check.fix:
            lines.append(f"{'':<5} {'':<{width}}  -> {make_printable(check.fix)}")
    counts = {level: sum(check.level is level for check in checks) for level in Level}
    return [*lines, "", f"{counts[Level.OK]} ok, {counts[Level.WARN]} warnings, {counts[Level.FAIL]} failures"]


def report_json(checks: Sequence[Check]) -> str:
    return json.dumps([{**dataclasses.asdict(check), "level": check.level.value} for check in checks])


def is_healthy(checks: Sequence[Check]) -> bool:
    return all(check.level is not Level.FAIL for check in checks)


def find_program(name: str) -> str | None:
    return shutil.which(name)
