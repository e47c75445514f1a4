"""Whatever a recording holds, every analysis ends with a report. The seed is in the test's name."""

import random
from pathlib import Path

import msgspec
import pytest

from kvscope.analysis.assertions import CONDITIONS, parse_assertion
from kvscope.analysis.check import check
from kvscope.analysis.check_text import check_lines
from kvscope.analysis.diff import diff
from kvscope.analysis.diff_text import diff_lines
from kvscope.analysis.export import event_lines, pool_rows
from kvscope.analysis.stats import measure
from kvscope.analysis.stats_text import stats_lines
from kvscope.events.types import Event
from kvscope.transport.recording import Recording

from .conftest import edited

ASSERTIONS = [parse_assertion(name) for name in CONDITIONS]


def shuffled_fields(event: Event, generator: random.Random) -> Event:
    """The event with one of its values replaced by another that its type allows."""
    names = [name for name in event.__struct_fields__ if type(getattr(event, name)) in (int, str, list)]
    if not names:
        return event
    name = generator.choice(names)
    value = getattr(event, name)
    if isinstance(value, int):
        changed: object = generator.choice([0, 1, value + 1, 1 << 40])
    elif isinstance(value, str):
        changed = generator.choice(["", "r1", "r2.0", "r1.9", "r1.-1", "nobody.0", "r1.1"])
    else:
        changed = generator.choice([[], value[:-1], value * 2, [*value, *(value and [value[0]])]])
    try:
        return msgspec.convert({**msgspec.to_builtins(event), name: changed}, type(event))
    except msgspec.ValidationError:
        return event


def broken(recording: Recording, generator: random.Random) -> Recording:
    """Some events changed, doubled or lost; some batches lost."""

    def change(event: Event) -> list[Event]:
        match generator.randrange(40):
            case 0:
                return []
            case 1:
                return [event, event]
            case 2 | 3:
                return [shuffled_fields(event, generator)]
        return [event]

    result = edited(recording, change)
    kept = [pair for pair in result.batches if generator.randrange(60)]
    return Recording(Path("x"), kept or result.batches)


@pytest.mark.parametrize("seed", range(150))
def test_nothing_but_a_report(seed: int, calm: Recording, crowded: Recording) -> None:
    generator = random.Random(seed)
    story = generator.choice([calm, crowded])
    recording = broken(story, generator)
    report = check(recording, ASSERTIONS)
    assert check_lines(report)
    assert report.batches == len(recording.batches)
    assert stats_lines("x", measure(recording))
    assert diff_lines("a", "b", diff(recording, story))
    assert len(list(event_lines(recording))) == sum(len(batch.events) for _, batch in recording.batches)
    assert len(list(pool_rows(recording))) <= len(recording.batches) + 1
