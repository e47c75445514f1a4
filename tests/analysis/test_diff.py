"""Two runs side by side: who is compared with whom, where tokens part, and what each request cost."""

from pathlib import Path

import msgspec
import pytest

from kvscope.analysis.diff import TokenDifference, diff
from kvscope.analysis.diff_text import diff_lines
from kvscope.events import types as ev
from kvscope.events.types import Event
from kvscope.transport.recording import Recording

from .conftest import PROMPT, edited, recording_of, run_engine
from .test_check import folded


def test_a_recording_and_itself(crowded: Recording) -> None:
    found = diff(crowded, crowded)
    assert found.same
    assert [pair.difference for pair in found.requests] == [None] * 3
    assert found.only_a == found.only_b == []
    assert all(total.a == total.b and total.ratio in (None, 1) for total in found.totals)


def test_a_larger_pool_gives_the_same_tokens_at_another_cost(crowded: Recording) -> None:
    prompts = [list(range(start, start + 6)) for start in (5, 15, 25)]
    roomy = recording_of(run_engine(30, [(prompt, {"max_tokens": 12}) for prompt in prompts], together=True))
    found = diff(crowded, roomy)
    assert found.same
    assert sum(pair.a.preemptions for pair in found.requests) > 0
    assert [pair.b.preemptions for pair in found.requests] == [0, 0, 0]
    assert [pair.b.peak_blocks for pair in found.requests] == [5, 5, 5]  # 6 + 11 positions are written
    assert [pair.b.steps for pair in found.requests] == [12, 12, 12]
    totals = {total.name: total for total in found.totals}
    assert totals["steps"].a > totals["steps"].b == 12
    assert totals["steps"].ratio == pytest.approx(12 / totals["steps"].a)
    assert totals["preemptions"].b == 0
    assert found.held_by_step_b == [6, *[6] * 2, *[9] * 4, *[12] * 4, 0]
    assert len(found.held_by_step_a) == totals["steps"].a
    assert max(found.held_by_step_a) <= 7


def test_settings_that_are_not_alike_are_noted_and_reasons_to_wait_are_totals(crowded: Recording) -> None:
    prompts = [list(range(start, start + 6)) for start in (5, 15, 25)]
    requests = [(prompt, {"max_tokens": 12}) for prompt in prompts]
    reserved = recording_of(run_engine(7, requests, together=True, allocator="contiguous", prefix_caching=False))
    found = diff(crowded, reserved)
    assert found.same
    assert found.notes == ["allocator is paged in A, contiguous in B", "prefix_caching is True in A, False in B"]
    totals = {total.name: total for total in found.totals}
    assert totals["waited_reservation_s"].a == 0 < totals["waited_reservation_s"].b
    assert totals["waited_blocks_s"].a > 0 == totals["waited_blocks_s"].b
    assert diff(crowded, crowded).notes == []


def test_what_sharing_saves(calm: Recording) -> None:
    pair = diff(calm, calm).requests[0]
    # Three blocks of the prompt; one candidate copies the third. Positions 10 and 11 are written, 12 never is.
    assert (pair.a.peak_blocks, pair.a.copies, pair.a.generated_tokens) == (4, 1, 6)


def change_token(position: int) -> object:
    count = 0

    def change(event: Event) -> list[Event]:
        nonlocal count
        if isinstance(event, ev.TokensGenerated) and event.sequence_id == "r1.1":
            count += 1
            if count == position + 1:
                return [msgspec.structs.replace(event, token_ids=[999])]
        return [event]

    return change


@pytest.mark.parametrize("position", [0, 2])
def test_first_difference(position: int, calm: Recording) -> None:
    other = edited(calm, change_token(position))
    found = diff(calm, other)
    assert not found.same
    difference = found.requests[0].difference
    assert difference is not None
    assert (difference.sequence, difference.position, difference.b) == (1, position, 999)
    assert difference.a not in (None, 999)
    assert found.requests[1].difference is None
    row = next(line for line in diff_lines("a", "b", found) if line.startswith("r1"))
    assert f"sequence 1 differs at token {position}: token {difference.a} -> token 999" in row


def test_a_recording_from_mid_life_says_so(calm: Recording) -> None:
    later = Recording(Path("x"), calm.batches[6:], folded(calm, 6), 5)
    assert diff(calm, later).notes == ["B begins with the state after batch 5; what was before is not in it"]


def test_a_run_that_ends_earlier_is_a_difference(calm: Recording) -> None:
    torn = recording_of(batch for _, batch in calm.batches[:6])
    torn.missing = "ends abruptly"
    found = diff(calm, torn)
    assert not found.same
    assert found.notes == ["B ends abruptly"]
    difference = found.requests[0].difference
    assert difference is not None
    assert difference.b is None
    assert [figures.request_id for figures in found.only_a] == ["r2"]


def test_requests_are_aligned_by_what_they_are_not_by_name_or_place() -> None:
    first, second = ([1, 2, 3], {"max_tokens": 3}), ([4, 5, 6], {"max_tokens": 3})
    again, other = ([1, 2, 3], {"max_tokens": 3}), ([1, 2, 3], {"max_tokens": 5})
    a = recording_of(run_engine(20, [first, second, again, other], together=True))
    b = recording_of(run_engine(20, [other, second, first], together=True))
    found = diff(a, b)
    assert [(pair.a.request_id, pair.b.request_id) for pair in found.requests] == [
        ("r1", "r3"),
        ("r2", "r2"),
        ("r4", "r1"),
    ]
    assert [figures.request_id for figures in found.only_a] == ["r3"]
    assert not found.same


def test_the_same_prompt_with_other_options_is_still_compared() -> None:
    a = recording_of(run_engine(20, [(PROMPT, {"max_tokens": 3})], together=True))
    b = recording_of(run_engine(20, [(PROMPT, {"max_tokens": 5, "n": 2})], together=True))
    [pair] = diff(a, b).requests
    assert pair.different_params == ["n", "max_tokens"]
    assert pair.difference is not None
    assert pair.difference == TokenDifference(0, 3, None, pair.difference.b)
    assert "other n, max_tokens" in "\n".join(diff_lines("a", "b", diff(a, b)))


def test_text_puts_both_values_where_they_differ(crowded: Recording, calm: Recording) -> None:
    lines = diff_lines("a.mcap", "b.mcap", diff(crowded, calm))
    assert lines[:2] == ["A  a.mcap", "B  b.mcap"]
    assert "0 requests in both, 0 with equal tokens; 3 only in A, 2 only in B" in lines
    assert any(line.startswith("num_blocks") and line.split() == ["num_blocks", "7", "16", "2.29"] for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_recordings_that_begin_late(crowded: Recording) -> None:
    from .test_check import folded

    late = Recording(Path("x"), crowded.batches[8:], folded(crowded, 8), 7)
    found = diff(crowded, late)
    assert found.same, "the state knows the tokens that were chosen before"
