"""One broken invariant at a time: the auditor names its rule, and stays silent about sound streams."""

from collections.abc import Callable

import pytest

from kvscope.events import audit
from kvscope.events import types as ev
from kvscope.events.audit import Auditor, Finding, check_state
from kvscope.events.types import Batch, Event

MakeBatch = Callable[..., Batch]

ALLOCATED = ev.BlocksAllocated(sequence_id="r1.0", first_logical_block=0, block_ids=[0, 1])
WRITTEN = ev.SlotsWritten(sequence_id="r1.0", start=0, stop=6)
SHARED = ev.BlocksShared(sequence_id="r1.1", from_sequence_id="r1.0", block_ids=[0, 1])
COPIED = ev.BlockCopied(sequence_id="r1.0", logical_block=1, source_block=1, target_block=2, num_slots=2)
RELEASED = ev.BlocksReleased(sequence_id="r1.0", block_ids=[0, 2], freed_block_ids=[2])
STORY = (ALLOCATED, WRITTEN, SHARED, COPIED, RELEASED)


def changed(event: Event, **fields: object) -> Event:
    return type(event)(**{name: fields.get(name, getattr(event, name)) for name in event.__struct_fields__})


def observe(pool: Auditor, batch_of: MakeBatch, *events: Event) -> list[Finding]:
    return [finding for event in events for finding in pool.observe(batch_of(event))]


def test_a_sound_stream_has_no_findings(pool: Auditor, batch_of: MakeBatch) -> None:
    write_in_place = ev.SlotsWritten(sequence_id="r1.1", start=6, stop=7)
    write_private = ev.SlotsWritten(sequence_id="r1.0", start=6, stop=7)
    assert observe(pool, batch_of, *STORY[:4], write_private, write_in_place, RELEASED) == []


CACHED = (
    ALLOCATED,
    WRITTEN,
    ev.BlocksReleased(sequence_id="r1.0", block_ids=[0, 1], freed_block_ids=[0, 1], cached_block_ids=[0]),
)

BROKEN: dict[str, tuple[int, str, tuple[Event, ...]]] = {
    "held block handed out": (
        2,
        "handed out while held",
        (ALLOCATED, ev.BlocksAllocated(sequence_id="r2.0", first_logical_block=0, block_ids=[1])),
    ),
    "block handed out twice": (2, "handed out twice", (changed(ALLOCATED, block_ids=[4, 4]),)),
    "held block as a copy's target": (
        2,
        "handed out as a copy",
        (
            *STORY[:3],
            ev.BlocksAllocated(sequence_id="r2.0", first_logical_block=0, block_ids=[2]),
            COPIED,
        ),
    ),
    "write to a shared block": (
        3,
        "wrote into shared P1",
        (*STORY[:3], ev.SlotsWritten(sequence_id="r1.0", start=6, stop=7)),
    ),
    "hole in the written positions": (3, "wrote from 1", (ALLOCATED, changed(WRITTEN, start=1))),
    "copy by the last holder": (3, "last holder", (ALLOCATED, WRITTEN, COPIED)),
    "copy of a full block": (
        3,
        "although it is full",
        (*STORY[:3], changed(COPIED, logical_block=0, source_block=0, num_slots=4)),
    ),
    "copy loses a slot": (6, "2 written slots, 1 were copied", (*STORY[:3], changed(COPIED, num_slots=1))),
    "copy of another logical block": (6, "was not P1", (*STORY[:3], changed(COPIED, logical_block=0))),
    "share of what is not held": (1, "does not hold", (*STORY[:2], changed(SHARED, block_ids=[0, 5]))),
    "release of another table": (1, "its table is", (*STORY[:4], changed(RELEASED, block_ids=[0, 1]))),
    "release frees what is still held": (
        1,
        "reach ref count 0",
        (*STORY[:4], changed(RELEASED, freed_block_ids=[0, 2])),
    ),
    "release keeps what is free": (1, "reach ref count 0", (*STORY[:4], changed(RELEASED, freed_block_ids=[]))),
    "share of too few blocks": (3, "KV for 6 positions in 1 blocks", (*STORY[:2], changed(SHARED, block_ids=[0]))),
    "a sequence that has ended keeps blocks": (
        7,
        "r1.0 has ended and still holds 2 blocks",
        (*STORY[:4], ev.SequenceFinished(sequence_id="r1.0", reason="length")),
    ),
    "reuse of a block that is not full": (
        5,
        "has 2 of 4 slots written",
        (*STORY[:2], ev.BlocksReused(sequence_id="r2.0", block_ids=[0, 1], num_tokens=8)),
    ),
    "reuse of more tokens than blocks hold": (
        5,
        "reuses 3 tokens in 1 blocks",
        (*STORY[:2], ev.BlocksReused(sequence_id="r2.0", block_ids=[0], num_tokens=3)),
    ),
    "reuse that leaves nothing to compute": (
        5,
        "nothing is left to compute",
        (*STORY[:2], ev.BlocksReused(sequence_id="r2.0", block_ids=[0], num_tokens=4)),
    ),
    "eviction of what is not cached": (
        2,
        "evicted, but it is not cached",
        (*STORY[:2], ev.BlocksEvicted(block_ids=[0], for_sequence_id="r2.0")),
    ),
    "cached block handed out": (
        2,
        "P0 handed out while cached",
        (*CACHED, ev.BlocksAllocated(sequence_id="r2.0", first_logical_block=0, block_ids=[0])),
    ),
    "release caches a block that is not full": (
        5,
        "which are not free and full",
        (*CACHED[:-1], changed(CACHED[-1], cached_block_ids=[0, 1])),
    ),
    "a finding of the engine": (7, "from the engine", (ev.AuditFinding(rule=7, message="from the engine"),)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_streams(name: str, pool: Auditor, batch_of: MakeBatch) -> None:
    rule, words, events = BROKEN[name]
    assert observe(pool, batch_of, *events[:-1]) == [], "the events before the last are sound"
    findings = observe(pool, batch_of, events[-1])
    assert any(finding.rule == rule and words in finding.message for finding in findings), findings
    assert pool.findings == findings
    assert {finding.step for finding in findings} == {7}


def test_ref_count_of_a_state(pool: Auditor) -> None:
    pool.state.ref_counts[3] = 1
    [finding] = check_state(pool.state)
    assert (finding.rule, finding.message) == (1, "P3 has ref count 1, 0 table entries point at it")


def test_only_full_blocks_are_cached(pool: Auditor) -> None:
    pool.state.written_slots[3] = 1
    [finding] = check_state(pool.state)
    assert finding.rule == 5
    assert "P3 is cached with 1 written slots" in finding.message


def test_idle_engine_holds_nothing(pool: Auditor, batch_of: MakeBatch) -> None:
    finished = (ev.RequestFinished(request_id="r1"), ev.RequestFinished(request_id="r2"))
    findings = pool.observe(batch_of(ALLOCATED, *finished))
    assert [finding.rule for finding in findings] == [7]


def test_a_stream_of_faults_does_not_fill_the_memory(pool: Auditor, batch_of: MakeBatch, monkeypatch) -> None:
    monkeypatch.setattr(audit, "MAX_FINDINGS", 3)
    for number in range(5):
        pool.observe(batch_of(ev.AuditFinding(rule=1, message=f"fault {number}")))
    assert [finding.message for finding in pool.findings] == ["fault 0", "fault 1", "fault 2"]
