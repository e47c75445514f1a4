"""Each planted fault is found, and by its rule; sound recordings, whole or torn, are not accused."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvscope.analysis.assertions import parse_assertion
from kvscope.analysis.check import CheckReport, check
from kvscope.analysis.check_text import MAX_FINDINGS_SHOWN, check_lines
from kvscope.events import types as ev
from kvscope.events.codec import encode_batch, encode_state
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Batch, BatchesDropped, Event
from kvscope.transport.recording import Recorder, Recording, read_recording

from .conftest import Change, edited, recording_of


def replace_first(kind: type[Event], *replacement: Any, where: Any = lambda _: True) -> Change:
    """Put these in the place of the first event of its kind; a function makes one from the event."""
    done = False

    def change(event: Event) -> Iterator[Event]:
        nonlocal done
        if done or not isinstance(event, kind) or not where(event):
            yield event
            return
        done = True
        for new in replacement:
            yield new(event) if callable(new) else new

    return change


def same(event: Event) -> Event:
    return event


def with_fields(**fields: Any) -> Any:
    """A copy of the event, with fields computed from it."""
    return lambda event: msgspec.structs.replace(event, **{name: make(event) for name, make in fields.items()})


FAULTS: dict[str, tuple[int, str, Any]] = {
    "leaked table": (7, "has ended and still holds", lambda: replace_first(ev.BlocksReleased)),
    "leaked block": (
        1,
        "table entries point at it",
        lambda: replace_first(
            ev.BlocksReleased,
            with_fields(
                block_ids=lambda e: e.block_ids[:-1],
                freed_block_ids=lambda e: [b for b in e.freed_block_ids if b != e.block_ids[-1]],
                cached_block_ids=lambda e: [b for b in e.cached_block_ids if b != e.block_ids[-1]],
            ),
        ),
    ),
    "double free": (1, "its table is []", lambda: replace_first(ev.BlocksReleased, same, same)),
    "free of a block that is still held": (
        1,
        "reach ref count 0",
        lambda: replace_first(ev.BlocksReleased, with_fields(freed_block_ids=lambda e: e.block_ids)),
    ),
    "lost copy": (3, "wrote into shared", lambda: replace_first(ev.BlockCopied)),
    "copy that loses a slot": (
        6,
        "written slots",
        lambda: replace_first(ev.BlockCopied, with_fields(num_slots=lambda e: e.num_slots - 1)),
    ),
    "write to a shared block": (
        3,
        "wrote into shared",
        lambda: replace_first(
            ev.BlocksShared, same, lambda e: ev.SlotsWritten(sequence_id=e.sequence_id, start=10, stop=11)
        ),
    ),
    "hit before write": (
        5,
        "has 0 of 4 slots written",
        lambda: replace_first(ev.BlocksReused, with_fields(block_ids=lambda e: [14, 15][: len(e.block_ids)])),
    ),
    "ref count too low: one share is missing": (
        3,
        "KV for 10 positions in 2 blocks",
        lambda: replace_first(ev.BlocksShared, with_fields(block_ids=lambda e: e.block_ids[:-1])),
    ),
    "held block handed out": (
        2,
        "handed out while held",
        lambda: replace_first(
            ev.BlocksAllocated,
            with_fields(block_ids=lambda _: [0]),
            where=lambda e: e.first_logical_block > 0,
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name: str, calm: Recording) -> None:
    rule, words, change = FAULTS[name]
    report = check(edited(calm, change()))
    assert not report.ok
    assert any(finding.rule == rule and words in finding.message for finding in report.findings), report.findings
    assert check_lines(report)[0].startswith("FAIL  audit")


def test_what_is_planted_is_the_first_thing_found(calm: Recording) -> None:
    report = check(edited(calm, replace_first(ev.BlockCopied)))
    seqs = [seq for seq, batch in calm.batches if any(isinstance(event, ev.BlockCopied) for event in batch.events)]
    first = report.findings[0]
    assert first.rule == 3
    assert first.seq == seqs[0] + 1  # planned in one batch, written in the next
    assert first.step == calm.batches[first.seq][1].step


@pytest.mark.parametrize("as_keyframe", [True, False])
@pytest.mark.parametrize("error", [1, -1])
def test_ref_count_off_by_one(as_keyframe: bool, error: int, calm: Recording) -> None:
    """In a full state of the engine's own, or in the one a recording begins with."""
    place = next(i for i, (_, b) in enumerate(calm.batches) if any(isinstance(e, ev.BlocksShared) for e in b.events))
    state = folded(calm, place + 1)
    state.ref_counts[0] += error
    if as_keyframe:
        wrong = Recording(Path("run.mcap"), calm.batches[place + 1 :], state, calm.batches[place][0])
    else:
        before, after = calm.batches[: place + 1], calm.batches[place + 1 :]
        first = after[0][1]
        full = Batch(
            epoch=first.epoch, step=first.step, phase="plan", time_ns=first.time_ns,
            events=(BatchesDropped(num_batches=0), FullState(state=state)),
        )  # fmt: skip
        wrong = recording_of([*(b for _, b in before), full, *(b for _, b in after)])
    report = check(wrong)
    assert report.findings[0].rule == 1
    assert f"P0 has ref count {2 + error}, 2 table entries" in report.findings[0].message


def folded(recording: Recording, num_batches: int) -> EngineState:
    state = EngineState()
    for _, batch in recording.batches[:num_batches]:
        state = apply_batch(state, batch)
    return copy.deepcopy(state)


@pytest.mark.parametrize("num_lost", [1, 3])
def test_lost_batches_at_every_place(num_lost: int, calm: Recording) -> None:
    for place in range(1, len(calm.batches) - num_lost):
        holed = Recording(Path("run.mcap"), calm.batches[:place] + calm.batches[place + num_lost :])
        report = check(holed, [parse_assertion("complete")])
        assert not report.ok
        assert not report.assertions[0].ok
        message = f"batches {place} to {place + num_lost - 1} are not in it"
        assert (8, message) in [(finding.rule, finding.message) for finding in report.findings]


def test_a_hole_in_the_file_is_a_finding(calm: Recording, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "holed.mcap")
    for seq, batch in calm.batches:
        if seq != 7:
            recorder.record(seq, 1, encode_batch(batch))
    recorder.close()
    report = check(read_recording(tmp_path / "holed.mcap"))
    assert [finding.rule for finding in report.findings] == [8]
    assert "batches 7 to 7 are not in it" in report.findings[0].message
    assert report.findings[0].seq == 7


def test_a_hole_with_a_full_state_in_its_place_is_a_note(calm: Recording, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "healed.mcap")
    for seq, batch in calm.batches:
        if seq < 6 or seq > 8:
            recorder.record(seq, 1, encode_batch(batch))
        elif seq == 8:
            recorder.record_keyframe(8, 1, encode_state(folded(calm, 9)))
    recorder.close()
    report = check(read_recording(tmp_path / "healed.mcap"), [parse_assertion("no_leak_at_end")])
    assert report.ok, report
    assert report.notes == ["batches 6 to 8 are not in it; a full state follows"]
    assert not check(read_recording(tmp_path / "healed.mcap"), [parse_assertion("complete")]).ok


def test_a_torn_file_is_checked_to_its_end(calm: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope.transport.recording.recorder.CHUNK_BYTES", 300)
    recorder = Recorder(tmp_path / "run.mcap")
    for seq, batch in calm.batches:
        recorder.record(seq, 1, encode_batch(batch))
    recorder.close()
    whole = (tmp_path / "run.mcap").read_bytes()
    (tmp_path / "torn.mcap").write_bytes(whole[: len(whole) // 3])
    report = check(read_recording(tmp_path / "torn.mcap"), [parse_assertion("no_leak_at_end")])
    assert report.ok, report
    assert 0 < report.batches < len(calm.batches)
    assert report.notes[0].startswith(f"ends abruptly after batch {report.batches - 1}")
    assert check_lines(report)[-1] == f"note  {report.notes[0]}"


@pytest.mark.parametrize("which", ["calm", "crowded"])
def test_sound_recordings(which: str, request: pytest.FixtureRequest) -> None:
    recording = request.getfixturevalue(which)
    report = check(recording, [parse_assertion(text) for text in ("no_leak_at_end", "complete", "findings==0")])
    assert report.ok, report
    assert report.notes == []
    assert check_lines(report)[0] == f"ok    audit                    0 findings in {shape(report)}"


def shape(report: CheckReport) -> str:
    return f"{report.batches} batches, {report.events} events"


def test_every_prefix_of_a_sound_recording_is_sound(crowded: Recording) -> None:
    """Blocks held by requests that go on are no leak."""
    for length in range(1, len(crowded.batches)):
        report = check(recording_of(b for _, b in crowded.batches[:length]), [parse_assertion("no_leak_at_end")])
        assert report.ok, report


def test_every_suffix_of_a_sound_recording_is_sound(crowded: Recording) -> None:
    for length in range(1, len(crowded.batches)):
        suffix = Recording(Path("x"), crowded.batches[length:], folded(crowded, length), length - 1)
        report = check(suffix, [parse_assertion("no_leak_at_end")])
        assert report.ok, report
        assert report.notes == [f"it begins with the state after batch {length - 1}; what was before is not in it"]


def test_assertions_about_figures(crowded: Recording) -> None:
    counters = folded(crowded, len(crowded.batches)).counters
    actual = {
        "num_blocks": 7,
        "max_held_blocks": 7,
        "copies": 0,
        "preemptions": counters.preemptions,
        "refusals": 0,
        "evictions": counters.evictions,
        "generated_tokens": 36,
        "computed_tokens": counters.computed_tokens,
        "prefix_hit_tokens": counters.prefix_hit_tokens,
        "dropped_batches": 0,
        "steps": crowded.batches[-1][1].step,
        "requests": 3,
        "findings": 0,
    }
    assert counters.preemptions > 0
    assert counters.evictions > 0
    holds = [parse_assertion(f"{name} == {value}") for name, value in actual.items()]
    fails = [parse_assertion(f"{name} != {value}") for name, value in actual.items()]
    assert [result.ok for result in check(crowded, holds).assertions] == [True] * len(actual)
    report = check(crowded, fails)
    assert not report.ok
    assert [result.ok for result in report.assertions] == [False] * len(actual)
    assert [int(result.detail) for result in report.assertions] == list(actual.values())


def test_a_leak_fails_its_condition(calm: Recording) -> None:
    report = check(edited(calm, replace_first(ev.BlocksReleased)), [parse_assertion("no_leak_at_end")])
    assert not report.assertions[0].ok
    assert "blocks held by nobody's request: P" in report.assertions[0].detail


def test_a_state_that_stays_wrong_is_told_once(calm: Recording) -> None:
    report = check(edited(calm, replace_first(ev.BlocksReleased)))
    messages = [finding.message for finding in report.findings]
    assert messages.count("r1.0 has ended and still holds 3 blocks") == 1


def test_many_findings_are_cut_in_the_text(calm: Recording) -> None:
    told = ev.AuditFinding(rule=1, message="P0")
    report = check(edited(calm, lambda event: [event, *[told] * 5]))
    lines = check_lines(report)
    assert len(report.findings) > MAX_FINDINGS_SHOWN
    assert lines[-1] == f"      and {len(report.findings) - MAX_FINDINGS_SHOWN} more"


def test_after_a_misfit_nothing_is_claimed(calm: Recording) -> None:
    lost = replace_first(ev.BlocksAllocated, with_fields(sequence_id=lambda _: "nobody.0"))
    report = check(edited(calm, lost), [parse_assertion("no_leak_at_end")])
    assert report.findings[-1].rule == 8
    assert "does not fit: unknown sequence 'nobody.0'" in report.findings[-1].message
    assert not report.assertions[0].ok
    assert any("could not be checked" in note for note in report.notes)
