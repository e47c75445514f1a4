"""The contiguous allocator: one run of blocks per sequence, reserved for its maximum; and what that costs."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.analysis.ledger import Bookkeeper
from kvscope.engine.block_pool import OutOfBlocksError
from kvscope.engine.block_tables import BlockTables
from kvscope.engine.config import ConfigError, EngineConfig, use_prefix_caching
from kvscope.engine.contiguous import ContiguousAdmission, ContiguousPool
from kvscope.engine.free_runs import FreeRuns
from kvscope.engine.intake import RequestRefusedError
from kvscope.engine.model_loader import LoadedModel
from kvscope.engine.request import RequestStatus
from kvscope.events import types as ev
from kvscope.events.audit import check_event
from kvscope.events.state import WaitingReason
from kvscope.events.types import SamplingParams

from .test_random_operations import run_operations
from .test_scheduler import events, submit

# --- free runs, pool ------------------------------------------------------------------------------------------------


def runs_of(free: set[int]) -> list[list[int]]:
    """The plainest way to find them."""
    runs: list[list[int]] = []
    for block_id in sorted(free):
        if runs and runs[-1][-1] == block_id - 1:
            runs[-1].append(block_id)
        else:
            runs.append([block_id])
    return runs


def test_runs_against_a_set_of_ids() -> None:
    rng = random.Random(0)
    for num_blocks in (0, 1, 2, 9, 16):
        runs, free = FreeRuns(num_blocks), set(range(num_blocks))
        for _ in range(600):
            if rng.random() < 0.5:
                count = rng.randint(1, 5)
                expected = next((run[:count] for run in runs_of(free) if len(run) >= count), [])
                assert runs.take(count) == expected
                free -= set(expected)
            else:
                held = sorted(set(range(num_blocks)) - free)
                back = rng.sample(held, rng.randint(0, min(len(held), 4)))
                runs.extend(back)
                free |= set(back)
            assert list(runs) == sorted(free)
            assert len(runs) == len(free)
            assert runs.lengths() == [len(run) for run in runs_of(free)]


def test_a_run_that_is_nowhere_long_enough_is_not_taken_in_pieces() -> None:
    pool = ContiguousPool(6, 4)
    first, second = pool.allocate(2).block_ids, pool.allocate(2).block_ids
    pool.release(first)
    assert (first, second, pool.free_runs, pool.num_free_blocks) == ([0, 1], [2, 3], [2, 2], 4)
    with pytest.raises(OutOfBlocksError, match="3 blocks asked for in one run, the longest free run has 2"):
        pool.allocate(3)
    assert pool.free_runs == [2, 2]
    pool.release(second)
    assert pool.allocate(6).block_ids == [0, 1, 2, 3, 4, 5]
    with pytest.raises(OutOfBlocksError, match="the longest free run has 0"):
        pool.allocate(1)
    pool.release([0])
    with pytest.raises(ValueError, match="P0 is free already"):
        pool.release([0])


def test_integrity_tells_tables_that_are_no_runs_and_blocks_that_are_shared() -> None:
    pool = ContiguousPool(6, 4)
    (a, b), (c,) = pool.allocate(2).block_ids, pool.allocate(1).block_ids
    assert pool.check_integrity([[a, b], [c], []]) == []
    assert pool.check_integrity([[b, a], [c]]) == ["[1, 0] is not one run of blocks"]
    assert pool.check_integrity([[a, c], [b]]) == ["[0, 2] is not one run of blocks"]
    pool.share([c])
    assert pool.check_integrity([[a, b], [c], [c]]) == ["P2 is shared"]
    assert pool.check_integrity([[a, b], [c]])  # ref counts are looked at too


# --- admission ------------------------------------------------------------------------------------------------------


def admission(free: Sequence[int], num_blocks: int) -> tuple[ContiguousPool, ContiguousAdmission]:
    """Over a pool of blocks of one slot in which just these are free."""
    pool = ContiguousPool(num_blocks, 1)
    pool.allocate(num_blocks)
    pool.release(list(free))
    return pool, ContiguousAdmission(BlockTables(pool, []), pool, max_model_len=1_000)


def test_the_obstacle_is_what_trying_finds() -> None:
    """Every pool of up to eight blocks, every number of candidates and length of run: is there room, one by one?"""
    kinds = set()
    for bits in range(256):
        free = [block_id for block_id in range(8) if bits >> block_id & 1]
        for number in (1, 2, 3):
            for length in range(1, 6):
                pool, door = admission(free, 8)
                params = SamplingParams(n=number, max_tokens=length)
                request: Any = SimpleNamespace(
                    alive_sequences=lambda number=number: [None] * number, prompt_token_ids=[1], params=params
                )
                reason, num_placed = door.obstacle(request, []), 0
                while num_placed < number and length <= max(pool.free_runs, default=0):
                    pool.allocate(length)
                    num_placed += 1
                kinds.add(reason and reason.kind)
                if num_placed == number:
                    assert reason is None
                elif number * length > len(free):
                    assert reason == WaitingReason("reservation", number * length, len(free))
                else:
                    assert reason == WaitingReason("fragmentation", length, max(pool.free_runs))
    assert kinds == {None, "reservation", "fragmentation"}


def test_enough_free_blocks_in_runs_too_short_are_a_reason_of_their_own(fake_engine: Any) -> None:
    """Eight blocks: A ends and leaves two, two more are free at the end; C needs three in a row, until B ends."""
    fixture = fake_engine(num_blocks=8, allocator="contiguous")
    submit(fixture, "a", 4, max_tokens=3)  # 6 positions, 2 blocks
    submit(fixture, "b", 4, max_tokens=12)  # 15 positions, 4 blocks
    c = submit(fixture, "c", 9, max_tokens=3)  # 11 positions, 3 blocks
    fixture.run()
    reasons = [(e.kind, e.needed, e.available) for e in events(fixture, ev.RequestWaiting) if e.request_id == "c"]
    assert reasons == [("reservation", 3, 2), ("fragmentation", 3, 2)]
    taken = {e.sequence_id: e.block_ids for e in events(fixture, ev.BlocksAllocated)}
    assert taken == {"a.0": [0, 1], "b.0": [2, 3, 4, 5], "c.0": [0, 1, 2]}
    assert c.status is RequestStatus.FINISHED


def test_every_candidate_has_a_run_and_computes_the_prompt_into_it(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=12, allocator="contiguous")
    submit(fixture, "r", 6, n=3, temperature=1.0, max_tokens=9)  # 14 positions, 4 blocks
    fixture.engine.step()
    state = fixture.sink.auditor.state
    assert [s.block_table for s in state.requests["r"].sequences] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert state.written_slots == [4, 2, 0, 0] * 3
    assert list(state.ref_counts) == [1] * 12
    fixture.run()
    assert fixture.engine.counters.computed_tokens == 3 * (6 + 8)
    assert not events(fixture, ev.BlocksShared) + events(fixture, ev.BlockCopied)


# --- the same outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [5, 512])
def test_the_embedded_model_says_the_same_with_either_allocator(
    real_engine: Any, tiny: LoadedModel, budget: int
) -> None:
    said = []
    for allocator in ("paged", "contiguous"):
        fixture = real_engine(
            tiny, block_size=4, num_gpu_blocks_override=40, max_num_batched_tokens=budget, allocator=allocator
        )
        requests = [
            fixture.engine.submit(prompt, SamplingParams(**{"max_tokens": 20, "seed": 3, **options}), f"r{number}")
            for number, (prompt, options) in enumerate(
                [("O Romeo, Romeo", {"n": 3}), ("KING RICHARD:", {"temperature": 0.0}), ("To be", {"n": 2})]
            )
        ]
        fixture.run()
        said.append([sequence.generated for request in requests for sequence in request.sequences])
    assert said[0] == said[1]
    assert fixture.engine.counters.copies == fixture.engine.counters.preemptions == 0


def test_any_operations_keep_every_invariant_and_the_ledger_counts_what_is_held(fake_engine: Any) -> None:
    """And nobody is preempted, nothing is copied."""
    seen: dict[str, int] = {}
    for seed in range(150):
        fixture = run_operations(fake_engine, seed, allocator="contiguous")
        engine, bookkeeper = fixture.engine, Bookkeeper()
        assert engine.counters.preemptions == engine.counters.copies == engine.counters.prefix_lookup_tokens == 0
        for event in events(fixture, ev.RequestWaiting):
            seen[event.kind] = seen.get(event.kind, 0) + 1
        for state in fixture.states():
            account = bookkeeper.draw_up(state)
            assert account.held * account.block_size == account.maximum.slots
    assert {"reservation", "fragmentation", "sequence_cap", "order"} <= seen.keys()
    assert "blocks" not in seen


# --- what cannot go with it -----------------------------------------------------------------------------------------


def test_beams_share_and_so_are_refused(fake_engine: Any) -> None:
    fixture = fake_engine(allocator="contiguous")
    with pytest.raises(RequestRefusedError, match="beam_width=2 needs --allocator paged: beams share the blocks"):
        submit(fixture, "r", 3, beam_width=2)


def test_what_can_never_fit_is_refused_with_the_maximum_of_every_candidate(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=6, allocator="contiguous")
    with pytest.raises(RequestRefusedError, match="can need 8 blocks; the pool has 6 of 4 slots"):
        submit(fixture, "r", 9, n=2, max_tokens=5)  # paged, 6: two blocks of the prompt are common
    submit(fixture, "r", 9, n=2, max_tokens=4)
    fixture.run()


@pytest.mark.parametrize("flags", [{"swap_space": 1.0}, {"admission": "watermark"}, {"admission": "worst-case"}])
def test_what_is_about_growing_and_preempting_is_refused(flags: dict[str, Any]) -> None:
    assert EngineConfig(**flags).allocator == "paged"
    (name,) = flags
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} .* is for --allocator paged"):
        EngineConfig(allocator="contiguous", **flags)


def test_a_prefix_cache_is_off_and_that_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert use_prefix_caching(True, "paged")
    assert not use_prefix_caching(False, "contiguous")
    assert capsys.readouterr().err == ""
    assert not use_prefix_caching(True, "contiguous")
    assert capsys.readouterr().err == "kvscope: no prefix cache: --allocator contiguous shares no blocks\n"


def test_the_auditor_finds_a_table_in_two_pieces(fake_engine: Any) -> None:
    fixture = fake_engine(allocator="contiguous")
    submit(fixture, "r", 3, max_tokens=2)
    fixture.engine.step()
    state = fixture.sink.auditor.state
    fine = ev.BlocksAllocated(sequence_id="r.0", first_logical_block=1, block_ids=[1, 2])
    assert check_event(state, fine) == []
    for block_ids in ([2], [2, 3], [1, 3]):
        event = ev.BlocksAllocated(sequence_id="r.0", first_logical_block=1, block_ids=block_ids)
        (finding,) = check_event(state, event)
        assert finding.message == f"r.0 does not lie in one run of blocks: {[0, *block_ids]}"
    fixture = fake_engine()
    submit(fixture, "r", 3, max_tokens=2)
    fixture.engine.step()
    assert check_event(fixture.sink.auditor.state, event) == []
