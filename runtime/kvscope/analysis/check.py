"""`kvscope check`: the auditor over a whole recording, and assertions about its figures."""

from collections.abc import Iterator, Sequence

import msgspec

from kvscope.analysis.assertions import Assertion, Comparison
from kvscope.analysis.pool_meter import PoolMeter
from kvscope.analysis.request_log import RequestLog
from kvscope.analysis.stats import PoolSeries, count, num_steps
from kvscope.analysis.walk import Observer, Walk, walk
from kvscope.analysis.wording import beginning, hole_sentences
from kvscope.events.audit import Auditor, Finding, check_event, check_state
from kvscope.events.state import EngineState
from kvscope.events.text import counted
from kvscope.events.types import Event
from kvscope.transport.recording.stored_series import AnyRecording

FOLD_RULE = 8  # the fold of the events is the engine's state


class RecordedFinding(msgspec.Struct, frozen=True):
    """One broken invariant, by its number; `seq` is the batch it was found in, or the first one that is not there."""

    rule: int
    message: str
    step: int
    seq: int


class AssertionResult(msgspec.Struct, frozen=True):
    text: str
    ok: bool
    detail: str  # the actual figure, or what is wrong


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvscope check` found. `notes` are about what could not be looked at."""

    ok: bool
    batches: int
    events: int
    notes: list[str]
    findings: list[RecordedFinding]
    assertions: list[AssertionResult]


class AuditTrail(Observer):
    """The auditor's findings with the batch they were found in. A state that stays wrong is told once."""

    def __init__(self) -> None:
        self.findings: list[RecordedFinding] = []
        self._of_batch: list[Finding] = []
        self._known: set[tuple[int, str]] = set()  # of the last whole state that was checked
        self._seq = 0

    def on_state(self, state: EngineState) -> None:
        self._take(check_state(state), state)

    def before_event(self, state: EngineState, event: Event) -> None:
        self._of_batch += check_event(state, event)

    def after_batch(self, seq: int, state: EngineState) -> None:
        self._seq = seq
        self.findings += [_recorded(finding, seq) for finding in self._of_batch]
        self._of_batch.clear()
        # The auditor knows how often a large pool is looked at as a whole.
        self._take(Auditor(state).finish_batch(), state)

    def finish(self, state: EngineState) -> None:
        """Check the last state, however large the pool is."""
        self._take(check_state(state), state)

    def _take(self, found: Sequence[Finding], state: EngineState) -> None:
        self.findings += [_recorded(f, self._seq) for f in found if (f.rule, f.message) not in self._known]
        self._known = {(finding.rule, finding.message) for finding in found}


def check(recording: AnyRecording, assertions: Sequence[Assertion] = ()) -> CheckReport:
    """One pass over the recording."""
    meter, audit, log = PoolMeter(), AuditTrail(), RequestLog()
    series = PoolSeries(meter)
    passed = walk(recording, meter, series, log, audit)
    if passed.is_sound:
        audit.finish(passed.state)
    findings = sorted([*audit.findings, *_faults_of_the_stream(recording, passed)], key=lambda finding: finding.seq)
    quantities = _quantities(passed, series, log) | {"findings": len(findings)}
    results = [_assess(assertion, quantities, recording, passed) for assertion in assertions]
    return CheckReport(
        ok=not findings and all(result.ok for result in results),
        batches=passed.num_batches,
        events=passed.num_events,
        notes=list(_notes(recording, passed)),
        findings=findings,
        assertions=results,
    )


def _recorded(finding: Finding, seq: int) -> RecordedFinding:
    return RecordedFinding(finding.rule, finding.message, finding.step, seq)


def _faults_of_the_stream(recording: AnyRecording, passed: Walk) -> list[RecordedFinding]:
    """Batches that are not there, or do not fit: what follows says nothing about the engine until a full state."""
    found = [
        RecordedFinding(FOLD_RULE, f"batch {misfit.seq} does not fit: {misfit.message}", misfit.step, misfit.seq)
        for misfit in passed.misfits
    ]
    unmarked = [hole for hole in passed.holes if not hole.is_marked]
    for hole, sentence in zip(unmarked, hole_sentences(unmarked), strict=True):
        found.append(RecordedFinding(FOLD_RULE, sentence, passed.state.step, hole.first_seq))
    if recording.has_hole and recording.missing is not None:
        next_seq = 0 if recording.last_seq is None else recording.last_seq + 1
        found.append(RecordedFinding(FOLD_RULE, f"the recording {recording.missing}", passed.state.step, next_seq))
    return found


def _notes(recording: AnyRecording, passed: Walk) -> Iterator[str]:
    if recording.initial_seq is not None:
        yield f"it {beginning(recording.initial_seq)}"
    if recording.missing is not None:
        yield recording.missing
    yield from hole_sentences(hole for hole in passed.holes if hole.is_marked)
    if passed.num_skipped_batches:
        yield f"{counted(passed.num_skipped_batches, 'batch')} could not be checked"
    if recording.num_refused_events:
        yield f"{counted(recording.num_refused_events, 'event')} of unknown kinds or shapes could not be read"
    dropped = count(passed).dropped_batches
    if dropped:
        yield f"the engine dropped {counted(dropped, 'batch')} and sent full states instead"


def _quantities(passed: Walk, series: PoolSeries, log: RequestLog) -> dict[str, int]:
    counters = count(passed)
    return {
        "num_blocks": len(passed.state.ref_counts),
        "max_held_blocks": series.peak_held,
        "copies": counters.copies,
        "preemptions": counters.preemptions,
        "refusals": counters.refusals,
        "evictions": counters.evictions,
        "generated_tokens": counters.generated_tokens,
        "computed_tokens": counters.computed_tokens,
        "prefix_hit_tokens": counters.prefix_hit_tokens,
        "dropped_batches": counters.dropped_batches,
        "steps": num_steps(passed),
        "requests": len(log.records),
    }


def _assess(assertion: Assertion, quantities: dict[str, int], recording: AnyRecording, passed: Walk) -> AssertionResult:
    if isinstance(assertion, Comparison):
        actual = quantities[assertion.quantity]
        return AssertionResult(str(assertion), assertion.holds(actual), str(actual))
    if assertion.name == "complete":
        lacks = list(_notes(recording, passed)) + hole_sentences(h for h in passed.holes if not h.is_marked)
        return AssertionResult(str(assertion), not lacks, "; ".join(lacks) or "nothing is missing")
    ok, detail = _find_leak(passed)
    return AssertionResult(str(assertion), ok, detail)


def _find_leak(passed: Walk) -> tuple[bool, str]:
    """A leak is a held block that no unfinished request points at."""
    if not passed.is_sound:
        return False, "the last state is not known"
    state = passed.state
    alive = [request for request in state.requests.values() if request.status != "finished"]
    pointed_at = {b for request in alive for sequence in request.sequences for b in sequence.block_table}
    held = [block_id for block_id, refs in enumerate(state.ref_counts) if refs > 0]
    leaked = [block_id for block_id in held if block_id not in pointed_at]
    in_use = f"{counted(len(pointed_at), 'block')} held by unfinished requests"
    if leaked:
        names = " ".join(f"P{block_id}" for block_id in leaked[:6]) + (" ..." if len(leaked) > 6 else "")
        return False, f"{counted(len(leaked), 'block')} held by nobody's request: {names}"
    return True, in_use if pointed_at else "no block is held"
