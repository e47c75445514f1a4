"""Who must give way, what becomes of its KV, and that the oldest request always advances."""

import random
from typing import Any

import pytest
import torch

from kvscope.engine.block_tables import BlockCopy
from kvscope.engine.host_blocks import HostBlocks
from kvscope.engine.model_loader import LoadedModel
from kvscope.engine.preemption import choose_mode
from kvscope.engine.request import RequestStatus
from kvscope.events import types as ev
from kvscope.events.types import SamplingParams


def submit(fixture: Any, name: str, num_prompt: int, **params: Any) -> Any:
    return fixture.engine.submit(
        "", SamplingParams(**{"ignore_eos": True, **params}), name, [1 + i % 9 for i in range(num_prompt)]
    )


def events(fixture: Any, kind: type) -> list[Any]:
    return [event for batch in fixture.sink.batches for event in batch.events if isinstance(event, kind)]


def test_swapped_out_and_in_again_without_computing_anything_twice(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=4, num_host_blocks=4, preemption="swap")
    submit(fixture, "a", 7, max_tokens=6)
    second = submit(fixture, "b", 7, max_tokens=6)
    while second.status is not RequestStatus.PREEMPTED:
        fixture.engine.step()
        fixture.check()
    assert fixture.sink.auditor.state.host_ref_counts == [1, 1, 0, 0]
    fixture.run()
    (preempted,) = events(fixture, ev.RequestPreempted)
    assert (preempted.mode, preempted.reason, preempted.tokens_lost) == ("swap", "asked", 0)
    assert (preempted.blocks_gained, preempted.host_blocks_needed, preempted.host_blocks_available) == (2, 2, 4)
    assert [event.stop for event in events(fixture, ev.SlotsWritten) if event.sequence_id == "b.0"] == list(
        range(7, 13)
    )
    assert fixture.engine.counters.blocks_swapped_out == fixture.engine.counters.blocks_swapped_in == 2
    assert fixture.sink.auditor.state.host_ref_counts == [0] * 4


def test_what_candidates_share_is_moved_once_and_shared_again(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=10, num_host_blocks=20, preemption="swap")
    submit(fixture, "a", 15, max_tokens=14)
    many = submit(fixture, "b", 8, max_tokens=6, n=3, temperature=1.0)
    while many.status is not RequestStatus.PREEMPTED:
        tables = [list(sequence.block_table) for sequence in many.sequences]
        fixture.engine.step()
        fixture.check()
    distinct = len({block_id for table in tables for block_id in table})
    assert sum(map(len, tables)) > distinct
    assert fixture.engine.counters.blocks_swapped_out == distinct
    host_tables = [sequence.host_table for sequence in many.sequences]
    assert host_tables[0][:2] == host_tables[1][:2] == host_tables[2][:2]
    while many.status is RequestStatus.PREEMPTED:
        fixture.engine.step()
        fixture.check()
    assert len({tuple(sequence.block_table[:2]) for sequence in many.sequences}) == 1
    fixture.run()


def test_what_a_swapped_out_request_waits_for_is_what_it_takes_when_it_comes_back(fake_engine: Any) -> None:
    """Also of beams, which share more than their prompt, and where others hold the same prompt's blocks."""
    compared = set()
    for seed in range(30):
        rng = random.Random(seed)
        fixture = fake_engine(
            num_blocks=16, num_host_blocks=60, preemption="swap", prefix_caching=True, max_num_seqs=20
        )
        wishes = [{"n": 1}, {"n": 3, "temperature": 1.0}, {"beam_width": 3}]
        for number in range(5):
            submit(fixture, f"r{number}", rng.randint(4, 10), max_tokens=rng.randint(4, 10), **rng.choice(wishes))
        fixture.run(checked=False)
        needed: dict[str, int] = {}
        for batch in fixture.sink.batches:
            came_back = {e.sequence_id.rpartition(".")[0] for e in batch.events if isinstance(e, ev.BlocksSwappedIn)}
            for request_id in came_back & needed.keys():
                assert needed[request_id] == len(blocks_taken(batch, request_id)), f"seed {seed}, {request_id}"
                compared.add((seed, request_id))
            needed.update({e.request_id: e.needed for e in batch.events if isinstance(e, ev.RequestWaiting)})
            for event in batch.events:
                if isinstance(event, ev.RequestAdmitted) or getattr(event, "kind", "blocks") != "blocks":
                    needed.pop(event.request_id, None)
    assert len(compared) > 20


def blocks_taken(batch: Any, request_id: str) -> set[int]:
    """Distinct blocks that a plan gave to one request's sequences."""
    taken: set[int] = set()
    for event in batch.events:
        if getattr(event, "sequence_id", "").startswith(f"{request_id}."):
            if isinstance(event, ev.BlocksSwappedIn | ev.BlocksAllocated):
                taken.update(event.block_ids)
            elif isinstance(event, ev.BlockCopied):
                taken.add(event.target_block)
    return taken


def test_what_came_back_from_the_host_is_indexed_from_its_first_block_on(fake_engine: Any) -> None:
    """While it was away, all that it left in the prefix cache was evicted."""
    fixture = fake_engine(num_blocks=6, num_host_blocks=6, preemption="swap", prefix_caching=True)
    fixture.engine.submit("", SamplingParams(max_tokens=16, ignore_eos=True), "a", [1] * 8)
    victim = fixture.engine.submit("", SamplingParams(max_tokens=8, ignore_eos=True), "b", [9] * 8)
    fixture.run()
    assert victim.num_preemptions == 1
    assert [event.host_block_ids for event in events(fixture, ev.BlocksSwappedIn)] == [[0, 1, 2]]
    evicted = {block_id for event in events(fixture, ev.BlocksEvicted) for block_id in event.block_ids}
    left_behind = {block_id for event in events(fixture, ev.BlocksSwappedOut) for block_id in event.cached_block_ids}
    assert left_behind
    assert left_behind <= evicted
    fixture.engine.submit("", SamplingParams(max_tokens=1), "c", [9] * 9)
    fixture.run()
    assert events(fixture, ev.PrefixLookup)[-1].num_hit_tokens == 8


def test_a_full_host_pool_leaves_recomputation_and_says_so(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=4, num_host_blocks=1, preemption="swap")
    submit(fixture, "a", 7, max_tokens=6)
    submit(fixture, "b", 7, max_tokens=6)
    fixture.run()
    (preempted,) = events(fixture, ev.RequestPreempted)
    assert (preempted.mode, preempted.reason) == ("recompute", "no_host_room")
    assert (preempted.host_blocks_needed, preempted.host_blocks_available, preempted.tokens_lost) == (2, 1, 8)


def test_cancelled_while_swapped_out(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=4, num_host_blocks=4, preemption="swap")
    submit(fixture, "a", 7, max_tokens=6)
    second = submit(fixture, "b", 7, max_tokens=6)
    while second.status is not RequestStatus.PREEMPTED:
        fixture.engine.step()
    fixture.engine.cancel("b")
    fixture.check()
    assert fixture.sink.auditor.state.host_ref_counts == [0] * 4
    fixture.run()


@pytest.mark.parametrize(
    ("policy", "needed", "available", "lost", "expected"),
    [
        ("recompute", 1, 9, 500, ("recompute", "asked")),
        ("swap", 3, 3, 1, ("swap", "asked")),
        ("swap", 1, 1, 1, ("swap", "asked")),
        ("swap", 4, 3, 1, ("recompute", "no_host_room")),
        ("swap", 0, 3, 0, ("recompute", "no_host_room")),
        ("auto", 4, 3, 500, ("recompute", "no_host_room")),
        ("auto", 3, 3, 100, ("recompute", "one_step")),
        ("auto", 3, 3, 101, ("swap", "many_steps")),
    ],
)
def test_choice_of_mode(policy: str, needed: int, available: int, lost: int, expected: tuple[str, str]) -> None:
    chosen = choose_mode(
        policy, host_blocks_needed=needed, host_blocks_available=available, tokens_lost=lost, tokens_per_step=100
    )
    assert chosen == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    """NaNs with every payload included."""
    bits = torch.randint(-(2**15), 2**15, (6, 2, 4, 8 * dtype.itemsize // 2), dtype=torch.int16)
    cache = bits.view(dtype).clone()
    host = HostBlocks([cache], 3)
    host.swap_out([BlockCopy(4, 0), BlockCopy(1, 2)])
    cache.zero_()
    host.swap_in([BlockCopy(2, 0), BlockCopy(0, 5)])
    assert torch.equal(cache[0].view(torch.int16), bits[1])
    assert torch.equal(cache[5].view(torch.int16), bits[4])


@pytest.mark.parametrize(("n", "num_blocks", "max_tokens"), [(1, 25, 60), (3, 36, 40)])
def test_kv_of_a_model_comes_back_bit_for_bit(
    real_engine: Any, tiny: LoadedModel, n: int, num_blocks: int, max_tokens: int
) -> None:
    """Every layer's K and V of every position, in the blocks before the move and in those after it."""
    fixture = real_engine(
        tiny,
        block_size=4,
        num_gpu_blocks_override=num_blocks,
        swap_space=0.01,
        preemption="swap",
        enable_prefix_caching=False,
    )
    engine, runner = fixture.engine, fixture.engine._runner
    engine.submit("To be, or not to be", SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True), "old")
    young = engine.submit("ROMEO:", SamplingParams(max_tokens=max_tokens, n=n, seed=1, ignore_eos=True), "young")
    num_moved, before = 0, snapshot(runner, young)
    while engine.has_work():
        before = snapshot(runner, young) if young.status is RequestStatus.RUNNING else before
        engine.step()
        fixture.check()
        if young.status is RequestStatus.PREEMPTED:
            while young.status is RequestStatus.PREEMPTED:
                engine.step()
            after = snapshot(runner, young)
            for old, new in zip(before, after, strict=True):
                assert torch.equal(old.view(torch.int32), new[: len(old)].view(torch.int32))
                num_moved += len(old)
    assert num_moved > 0


def snapshot(runner: Any, request: Any) -> list[torch.Tensor]:
    """K and V of all layers at each sequence's written positions, `[num_positions, num_layers * 2 * heads * size]`."""
    rows = []
    for sequence in request.sequences:
        places = [(sequence.block_table[p // 4], p % 4) for p in range(sequence.num_computed)]
        tensors = [tensor for cache in runner.caches.values() for tensor in cache]
        rows.append(
            torch.stack([torch.cat([t[block, :, slot].flatten() for t in tensors]) for block, slot in places])
            if places
            else torch.empty(0, 1)
        )
    return rows


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_the_oldest_request_always_advances(fake_engine: Any, preemption: str) -> None:
    """Whatever the load: the request that was submitted first is computed in every step until it ends."""
    preemptions = 0
    for seed in range(80):
        rng = random.Random(seed)
        fixture = fake_engine(
            num_blocks=16,
            max_num_batched_tokens=rng.randint(1, 20),
            num_host_blocks=rng.choice([3, 40]),
            preemption=preemption,
            prefix_caching=rng.random() < 0.5,
            admission=rng.choice(["now", "now", "watermark"]),
        )
        engine, runner = fixture.engine, fixture.engine._runner
        for number in range(12):
            wish = rng.choice([{"n": 1}, {"n": 3, "temperature": 1.0}, {"beam_width": 3}])
            submit(fixture, f"r{number}", rng.randint(1, 12), max_tokens=rng.randint(1, 10), **wish)
        while engine.has_work():
            oldest = next(r for r in engine.requests.values() if r.status is not RequestStatus.FINISHED)
            engine.step()
            fixture.check()
            computed = {name.rpartition(".")[0] for name, _, _ in runner.steps[-1][0]}
            assert oldest.request_id in computed, (seed, oldest.request_id)
        preemptions += engine.counters.preemptions
    assert preemptions > 50


@pytest.mark.parametrize("prompt_blocks", [1, 3])
def test_worst_case_admission_never_preempts(fake_engine: Any, prompt_blocks: int) -> None:
    fixture = fake_engine(num_blocks=12, admission="worst-case")
    for number in range(9):
        submit(fixture, f"r{number}", 4 * prompt_blocks, max_tokens=9, n=1 + number % 2)
    fixture.run()
    assert fixture.engine.counters.preemptions == 0
    reasons = {event.kind for event in events(fixture, ev.RequestWaiting)}
    assert reasons == {"worst_case", "order"}


def test_watermark_leaves_room_to_grow(fake_engine: Any) -> None:
    """A hundred blocks, one in reserve: what would fill the pool to the last block waits, and says why."""
    fixture = fake_engine(num_blocks=100, max_model_len=400, max_num_batched_tokens=500, admission="watermark")
    submit(fixture, "a", 200, max_tokens=2)
    submit(fixture, "b", 199, max_tokens=2)
    fixture.engine.step()
    (waiting,) = events(fixture, ev.RequestWaiting)
    assert (waiting.request_id, waiting.kind, waiting.needed, waiting.available) == ("b", "watermark", 50, 49)
    fixture.run()


def test_where_less_than_the_watermark_is_free_nothing_is(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=4, admission="watermark")
    submit(fixture, "a", 15, max_tokens=2)
    submit(fixture, "b", 1, max_tokens=1)
    fixture.engine.step()
    (waiting,) = events(fixture, ev.RequestWaiting)
    assert (waiting.request_id, waiting.kind, waiting.needed, waiting.available) == ("b", "watermark", 1, 0)
    fixture.run()


def test_a_lone_request_may_take_the_watermark_too(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=4, admission="watermark")
    submit(fixture, "a", 14, max_tokens=3)
    fixture.run()
    assert events(fixture, ev.RequestWaiting) == []
