"""Continuous batching: order, budgets, admission with its reasons, preemption. Without a model."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.engine.admission import PagedAdmission
from kvscope.engine.block_pool import BlockPool
from kvscope.engine.block_tables import BlockTables
from kvscope.engine.intake import RequestRefusedError
from kvscope.engine.request import Sequence
from kvscope.engine.scheduler import count_written_positions
from kvscope.engine.swapping import Swapper
from kvscope.events import types as ev
from kvscope.events.types import SamplingParams


def params(max_tokens: int = 8, n: int = 1, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True, **changes)


def submit(fixture: Any, name: str, num_prompt_tokens: int, **changes: Any) -> Any:
    return fixture.engine.submit("", params(**changes), name, list(range(1, num_prompt_tokens + 1)))


def events(fixture: Any, kind: type[ev.Event]) -> list[Any]:
    return [event for batch in fixture.sink.batches for event in batch.events if isinstance(event, kind)]


def last_scheduled(fixture: Any) -> dict[str, int]:
    event = events(fixture, ev.StepScheduled)[-1]
    return dict(zip(event.sequence_ids, event.num_scheduled_tokens, strict=True))


def test_a_long_prompt_is_computed_in_chunks_beside_running_requests(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=16, max_num_batched_tokens=5)
    submit(fixture, "a", 3)
    fixture.engine.step()
    submit(fixture, "b", 11)
    seen = []
    for _ in range(4):
        fixture.engine.step()
        seen.append(last_scheduled(fixture))
    assert seen == [{"a.0": 1, "b.0": 4}, {"a.0": 1, "b.0": 4}, {"a.0": 1, "b.0": 3}, {"a.0": 1, "b.0": 1}]
    fixture.run()


def test_a_prompts_blocks_are_reserved_at_admission_and_written_chunk_by_chunk(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=16, max_num_batched_tokens=5)
    submit(fixture, "a", 11)
    written = []
    for _ in range(3):
        fixture.engine.step()
        state = fixture.sink.auditor.state
        written.append((len(state.sequence("a.0").block_table), sum(state.written_slots)))
    assert written == [(3, 5), (3, 10), (3, 11)]


def test_requests_are_admitted_in_the_order_they_came(fake_engine: Any) -> None:
    """A small request behind one that does not fit yet waits: first come, first served."""
    fixture = fake_engine(num_blocks=6)
    submit(fixture, "a", 14, max_tokens=2)
    fixture.engine.step()
    submit(fixture, "big", 16, max_tokens=2)
    submit(fixture, "small", 1, max_tokens=2)
    fixture.engine.step()
    admitted = [event.request_id for event in events(fixture, ev.RequestAdmitted)]
    assert admitted == ["a"]
    waiting = {
        event.request_id: (event.kind, event.needed, event.available) for event in events(fixture, ev.RequestWaiting)
    }
    assert waiting == {"big": ("blocks", 4, 2), "small": ("order", 0, 0)}
    fixture.run()
    assert [event.request_id for event in events(fixture, ev.RequestAdmitted)] == ["a", "big", "small"]


def test_a_reason_is_told_once_until_it_changes(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=6, max_num_seqs=1)
    submit(fixture, "a", 4, max_tokens=6)
    submit(fixture, "b", 4, max_tokens=2)
    fixture.run()
    told = [(event.request_id, event.kind) for event in events(fixture, ev.RequestWaiting)]
    assert told == [("b", "sequence_cap")]


def test_the_token_budget_is_a_reason_too(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=6, max_num_batched_tokens=4)
    submit(fixture, "a", 8)
    submit(fixture, "b", 2)
    fixture.engine.step()
    [reason] = events(fixture, ev.RequestWaiting)
    assert (reason.request_id, reason.kind, reason.needed, reason.available) == ("b", "token_budget", 1, 0)
    fixture.run()


def test_the_most_recently_admitted_request_is_preempted_and_comes_back(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=4)
    first, second = submit(fixture, "a", 7, max_tokens=6), submit(fixture, "b", 7, max_tokens=6)
    alone = fake_engine(num_blocks=4)
    expected = submit(alone, "b", 7, max_tokens=6)
    alone.run()
    fixture.run()
    (preempted,) = events(fixture, ev.RequestPreempted)
    assert preempted == ev.RequestPreempted(
        request_id="b", for_request_id="a", blocks_needed=1, blocks_gained=2, tokens_lost=8, host_blocks_needed=2
    )
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert second.sequences[0].generated == expected.sequences[0].generated


def test_a_preempted_request_comes_back_before_later_arrivals(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=4)
    submit(fixture, "a", 7, max_tokens=6)
    submit(fixture, "b", 7, max_tokens=6)
    while not fixture.engine.counters.preemptions:
        fixture.engine.step()
    submit(fixture, "c", 1, max_tokens=1)
    fixture.run()
    assert [event.request_id for event in events(fixture, ev.RequestAdmitted)] == ["a", "b", "b", "c"]


def test_one_preempted_earlier_waits_in_front_of_one_that_never_ran(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=4, max_num_seqs=2)
    for name in ("a", "b", "c"):  # c waits for a seat from the start
        submit(fixture, name, 7, max_tokens=6)
    fixture.run()
    assert [event.request_id for event in events(fixture, ev.RequestAdmitted)] == ["a", "b", "b", "c"]


def test_all_candidates_of_a_request_are_preempted_together(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=7)
    submit(fixture, "a", 6, max_tokens=14)
    forked = submit(fixture, "b", 6, max_tokens=6, n=3)
    fixture.run()
    assert forked.num_preemptions >= 1
    preempted = events(fixture, ev.RequestPreempted)[0]
    assert preempted.request_id == "b"
    step = next(b.step for b in fixture.sink.batches if preempted in b.events)
    released = [
        e.sequence_id
        for b in fixture.sink.batches
        if b.step == step and b.phase == "plan"
        for e in b.events
        if isinstance(e, ev.BlocksReleased)
    ]
    assert released == ["b.0", "b.1", "b.2"]
    # Positions 0 to 5 once, and what each candidate had of its own.
    assert preempted.tokens_lost >= 6
    # Back again, the prompt is computed once and shared by the candidates that are alive.
    shares = [e for e in events(fixture, ev.BlocksShared) if e.sequence_id.startswith("b.")]
    assert len(shares) == 4
    assert all(len(sequence.generated) == 6 for sequence in forked.sequences)


def test_the_oldest_request_always_advances(fake_engine: Any) -> None:
    """No livelock: in every step the oldest running request computes something."""
    fixture = fake_engine(num_blocks=9, max_num_batched_tokens=7)
    for number in range(12):
        submit(fixture, f"r{number}", 5 + number, max_tokens=9, n=1 + number % 3 % 2)
    while fixture.engine.has_work():
        oldest = fixture.engine.scheduler.running[0].request_id if fixture.engine.scheduler.running else None
        fixture.engine.step()
        fixture.check()
        assert oldest is None or any(name.startswith(f"{oldest}.") for name in last_scheduled(fixture))
    assert fixture.engine.counters.preemptions > 0
    assert len(fixture.engine.finished_order) == 12


def test_the_sequence_cap_counts_candidates(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=16, max_num_seqs=3)
    submit(fixture, "a", 2, n=2)
    submit(fixture, "b", 2, n=2)
    fixture.engine.step()
    (waiting,) = events(fixture, ev.RequestWaiting)
    assert (waiting.kind, waiting.needed, waiting.available) == ("sequence_cap", 2, 1)
    with pytest.raises(RequestRefusedError, match="n=4 needs 4 sequence seats; --max-num-seqs is 3"):
        submit(fixture, "c", 2, n=4)
    fixture.run()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8])
def test_the_worst_case_is_exact(fake_engine: Any, n: int, num_prompt_tokens: int) -> None:
    """A pool of exactly the worst case runs a request without preempting; one block less refuses it."""
    request = params(max_tokens=7, n=n)
    worst = fake_engine(num_blocks=64).engine.scheduler.admission.worst_case_blocks(num_prompt_tokens, request)
    fixture = fake_engine(num_blocks=worst)
    submit(fixture, "a", num_prompt_tokens, max_tokens=7, n=n)
    fixture.run()
    assert fixture.engine.counters.preemptions == 0
    if worst > 1:
        with pytest.raises(RequestRefusedError, match=f"can need {worst} blocks"):
            submit(fake_engine(num_blocks=worst - 1), "a", num_prompt_tokens, max_tokens=7, n=n)


def test_generation_ends_at_the_models_length(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=16, max_model_len=10)
    request = submit(fixture, "a", 8, max_tokens=50)
    fixture.run()
    assert len(request.sequences[0].generated) == 2
    assert request.sequences[0].finish_reason == "length"
    with pytest.raises(RequestRefusedError, match="the prompt has 10 tokens; with --max-model-len 10 at most 9 fit"):
        submit(fixture, "b", 10)


def test_stop_strings_end_the_text_before_them(fake_engine: Any) -> None:
    free = fake_engine(num_blocks=16)
    tokens = submit(free, "a", 3, max_tokens=8).sequences[0]
    free.run()
    stop = f" {tokens.generated[3]}"
    fixture = fake_engine(num_blocks=16)
    sequence = submit(fixture, "a", 3, max_tokens=8, stop=(stop,)).sequences[0]
    fixture.run()
    assert sequence.finish_reason == "stop"
    assert sequence.generated == tokens.generated[: len(sequence.generated)]
    assert stop not in sequence.text
    assert sequence.text == "".join(f" {t}" for t in sequence.generated[:-1])


def test_the_first_of_several_stop_strings_counts(fake_engine: Any) -> None:
    free = fake_engine(num_blocks=16)
    tokens = submit(free, "a", 3, max_tokens=8).sequences[0].generated
    free.run()
    stops = (f" {tokens[4]}", f" {tokens[2]} {tokens[3]}")
    fixture = fake_engine(num_blocks=16)
    sequence = submit(fixture, "a", 3, max_tokens=8, stop=stops).sequences[0]
    fixture.run()
    first = min(text.find(stop) for stop in stops for text in ["".join(f" {t}" for t in tokens)] if stop in text)
    assert len("".join(f" {t}" for t in sequence.generated)) > first
    assert all(stop not in sequence.text for stop in stops)


def test_nobody_is_admitted_in_the_step_of_a_preemption(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=4)
    submit(fixture, "a", 7, max_tokens=6)
    submit(fixture, "b", 7, max_tokens=6)
    while not fixture.engine.counters.preemptions:
        fixture.engine.step()
    step = fixture.engine.step_number
    admitted = [
        e for b in fixture.sink.batches if b.step == step for e in b.events if isinstance(e, ev.RequestAdmitted)
    ]
    assert admitted == []


@pytest.mark.parametrize(("num_blocks", "n", "max_tokens", "victim_of", "lost"), [(5, 2, 4, "a", 7), (8, 3, 6, "b", 8)])
def test_not_even_one_that_would_fit(
    fake_engine: Any, num_blocks: int, n: int, max_tokens: int, victim_of: str, lost: int
) -> None:
    """Candidates that say the same hold a last block each, and need one for all of them when they come back."""
    fixture = fake_engine(num_blocks=num_blocks, prefix_caching=False)
    submit(fixture, "a", 7, max_tokens=6)
    submit(fixture, "b", 6, max_tokens=max_tokens, n=n, temperature=0.0)
    while not fixture.engine.counters.preemptions:
        fixture.engine.step()
    assert [event.for_request_id for event in events(fixture, ev.RequestPreempted)] == [victim_of]
    assert [event.request_id for event in events(fixture, ev.RequestAdmitted)] == ["a", "b"]
    reason = events(fixture, ev.RequestWaiting)[-1]
    assert (reason.request_id, reason.kind, reason.needed, reason.available) == ("b", "order", 0, 0)
    [preempted] = events(fixture, ev.RequestPreempted)
    assert (preempted.blocks_gained, preempted.tokens_lost) == (n + 1, lost)  # what is common counts once
    fixture.engine.step()
    assert [event.request_id for event in events(fixture, ev.RequestAdmitted)] == ["a", "b", "b"]
    fixture.run()


def test_the_text_of_the_end_of_sequence_token_is_not_said(fake_engine: Any) -> None:
    free = fake_engine(num_blocks=16)
    tokens = submit(free, "a", 3, max_tokens=8).sequences[0].generated
    free.run()
    fixture = fake_engine(num_blocks=16, eos=frozenset({tokens[1]}))
    sequence = fixture.engine.submit("", SamplingParams(max_tokens=8), "a", [1, 2, 3]).sequences[0]
    fixture.run()
    assert sequence.text == "".join(f" {token}" for token in sequence.generated[:-1])


def test_the_end_of_sequence_token_ends_it_unless_ignored(fake_engine: Any) -> None:
    free = fake_engine(num_blocks=16)
    tokens = submit(free, "a", 3, max_tokens=8).sequences[0].generated
    free.run()
    fixture = fake_engine(num_blocks=16, eos=frozenset({tokens[2]}))
    ends = fixture.engine.submit("", SamplingParams(max_tokens=8), "a", [1, 2, 3]).sequences[0]
    goes_on = submit(fixture, "b", 3, max_tokens=8).sequences[0]
    fixture.run()
    assert ends.generated == tokens[: tokens.index(tokens[2]) + 1]
    assert ends.finish_reason == "stop"
    assert goes_on.finish_reason == "length"


@pytest.mark.parametrize("when", ["waiting", "prefill", "decoding", "preempted"])
def test_cancel_at_any_moment_gives_every_block_back(fake_engine: Any, when: str) -> None:
    """vLLM #46283, SGLang #11970: an abort in any phase must not leak."""
    fixture = fake_engine(num_blocks=7, max_num_batched_tokens=8)
    if when == "preempted":
        submit(fixture, "a", 6, max_tokens=14)
    victim = submit(fixture, "v", 12 if when == "prefill" else 6, max_tokens=6, n=2)
    wanted = {"waiting": 0, "prefill": 1, "decoding": 4}.get(when)
    while fixture.engine.step_number != wanted and victim.status.value != "preempted":
        fixture.engine.step()
    fixture.engine.cancel("v")
    fixture.check()
    assert victim.status.value == "finished"
    assert all(sequence.finish_reason == "cancelled" for sequence in victim.sequences)
    fixture.run()
    assert fixture.engine.scheduler.pool.num_free_blocks == 7
    fixture.engine.cancel("v")  # again: nothing happens
    fixture.engine.cancel("nobody")


def test_ended_requests_leave_the_state_in_order(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=6)
    for number in range(40):
        submit(fixture, f"r{number}", 2, max_tokens=1)
        fixture.run()
    assert list(fixture.engine.requests) == [f"r{number}" for number in range(8, 40)]
    with pytest.raises(RequestRefusedError, match="exists already"):
        submit(fixture, "r39", 2)


@pytest.mark.parametrize("num_prompt_tokens", range(1, 10))
def test_a_fork_copies_exactly_where_its_last_block_has_room(fake_engine: Any, num_prompt_tokens: int) -> None:
    """vLLM #417: a wrong condition for the copy lets candidates write over each other, or copies what nobody shares."""
    fixture = fake_engine(num_blocks=24)
    block_size, n = fixture.engine.info.block_size, 3
    submit(fixture, "a", num_prompt_tokens, n=n, max_tokens=5)
    fixture.run()
    copied = events(fixture, ev.BlockCopied)
    num_slots = num_prompt_tokens % block_size
    # The last one to write keeps the block; a full last block is shared for good.
    assert [event.num_slots for event in copied] == [num_slots] * (n - 1 if num_slots else 0)
    assert fixture.sink.auditor.findings == []
    assert len({event.target_block for event in copied}) == len(copied)


@pytest.mark.parametrize("budget", [1, 2, 4])
def test_no_step_exceeds_its_budget_and_nothing_is_scheduled_for_nothing(fake_engine: Any, budget: int) -> None:
    fixture = fake_engine(num_blocks=16, max_num_batched_tokens=budget)
    submit(fixture, "a", 3, n=3)
    submit(fixture, "b", 2)
    fixture.run()
    for event in events(fixture, ev.StepScheduled):
        assert sum(event.num_scheduled_tokens) <= budget
        assert 0 not in event.num_scheduled_tokens


def test_what_the_worst_case_leaves_is_told_also_when_it_is_nothing(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=4, admission="worst-case")
    submit(fixture, "a", 8, max_tokens=9)
    submit(fixture, "b", 2, max_tokens=2)
    fixture.engine.step()
    [reason] = events(fixture, ev.RequestWaiting)
    assert (reason.request_id, reason.kind, reason.needed, reason.available) == ("b", "worst_case", 1, 0)
    fixture.run()


def test_written_positions_that_are_common_count_once() -> None:
    def request(*computed: int) -> Any:
        sequences = [
            Sequence(f"r.{i}", i, [1], num_computed=n, block_table=[i] if n else []) for i, n in enumerate(computed)
        ]
        return SimpleNamespace(sequences=sequences)

    assert count_written_positions(request(5, 0), 9) == 5
    assert count_written_positions(request(8, 10), 6) == 6 + 2 + 4
    assert count_written_positions(request(8, 7), 9) == 8
    assert count_written_positions(request(0, 0), 6) == 0


def test_blocks_to_run_count_what_is_common_once_and_a_fork_not_yet_made_not_at_all() -> None:
    tables = BlockTables(BlockPool(64, 4), [])
    admission = PagedAdmission(tables, Swapper(tables, 0, []), None, max_model_len=64, step_tokens=64, policy="now")

    def needed(fork_at: int, *lengths: int) -> int:
        alive = [Sequence(f"r.{index}", index, [1] * length) for index, length in enumerate(lengths)]
        return admission._blocks_to_run(
            SimpleNamespace(swapped_out=False, fork_at=fork_at, alive_sequences=lambda: alive)
        )

    assert needed(9, 9, 9) == 3  # one table, until somebody has chosen
    assert needed(9, 12, 13) == 2 + 1 + 2
    assert needed(9, 12, 12, 17) == 2 + 1 + 1 + 3
    assert needed(8, 13) == 4
