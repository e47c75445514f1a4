"""The prefix cache: what is reused, what is not and why, what gives way, and that tokens never change."""

from typing import Any

import pytest

from kvscope.engine import prefix_cache
from kvscope.engine.model_loader import LoadedModel
from kvscope.engine.prefix_cache import BlockKey, Eviction, PrefixCache, next_key, root_key
from kvscope.events import types as ev
from kvscope.events.types import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # two full blocks of four, and two tokens


def submit(fixture: Any, name: str, tokens: list[int], **params: Any) -> Any:
    defaults = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    return fixture.engine.submit("", SamplingParams(**{**defaults, **params}), name, list(tokens))


def run(fixture: Any, name: str, tokens: list[int], **params: Any) -> Any:
    request = submit(fixture, name, tokens, **params)
    fixture.run()
    return request


def lookups(fixture: Any) -> list[ev.PrefixLookup]:
    return [e for batch in fixture.sink.batches for e in batch.events if isinstance(e, ev.PrefixLookup)]


def computed(fixture: Any, name: str) -> list[tuple[int, int]]:
    """Which positions of a sequence were computed, in order."""
    return [
        (e.start, e.stop)
        for batch in fixture.sink.batches
        for e in batch.events
        if isinstance(e, ev.SlotsWritten) and e.sequence_id == name
    ]


@pytest.fixture
def cached(fake_engine: Any) -> Any:
    return fake_engine(num_blocks=16, prefix_caching=True)


def test_a_second_request_computes_only_what_is_new(cached: Any) -> None:
    first, second = run(cached, "a", PROMPT), run(cached, "b", PROMPT)
    assert computed(cached, "a.0")[0] == (0, 10)
    assert computed(cached, "b.0")[0] == (8, 10)
    assert second.sequences[0].generated == first.sequences[0].generated
    assert lookups(cached)[1].num_hit_tokens == 8


def test_ended_requests_leave_cached_blocks_not_held_ones(cached: Any) -> None:
    run(cached, "a", PROMPT)
    state = cached.sink.auditor.state
    assert (state.num_free_blocks(), state.num_cached_blocks()) == (13, 3)  # 12 positions written: three full blocks
    assert state.ref_counts == [0] * 16


def test_generated_tokens_are_reused_too(cached: Any) -> None:
    """A conversation goes on: prompt and answer of the first turn are the second turn's beginning."""
    first = run(cached, "a", PROMPT, max_tokens=7)
    answer = first.sequences[0].generated
    run(cached, "b", [*PROMPT, *answer, 3])
    assert computed(cached, "b.0")[0] == (16, 18)


def test_blocks_of_a_running_request_are_shared_with_a_new_one(cached: Any) -> None:
    submit(cached, "a", PROMPT, max_tokens=6)
    cached.engine.step()
    submit(cached, "b", PROMPT, max_tokens=6)
    cached.engine.step()
    state = cached.sink.auditor.state
    assert state.sequence("a.0").block_table[:2] == state.sequence("b.0").block_table[:2]
    assert [state.ref_counts[block] for block in state.sequence("b.0").block_table] == [2, 2, 1]
    cached.run()
    assert cached.engine.counters.copies == 0


def test_no_hit_before_the_kv_is_written(fake_engine: Any) -> None:
    """nano-vllm #208: two equal prompts admitted in one step; the first one's KV does not exist yet."""
    fixture = fake_engine(num_blocks=16, prefix_caching=True)
    first, second = submit(fixture, "a", PROMPT), submit(fixture, "b", PROMPT)
    fixture.engine.step()
    assert [event.num_hit_tokens for event in lookups(fixture)] == [0, 0]
    fixture.run()
    assert first.sequences[0].generated == second.sequences[0].generated


def test_half_a_prompt_is_hit_while_the_other_half_is_computed(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=16, prefix_caching=True, max_num_batched_tokens=6)
    submit(fixture, "a", PROMPT)
    fixture.engine.step()  # positions 0 to 5 of a
    submit(fixture, "b", PROMPT)
    while len(lookups(fixture)) < 2:
        fixture.engine.step()
    assert lookups(fixture)[1].num_hit_tokens == 4  # admitted beside a's last positions, before they are written
    fixture.run()


@pytest.mark.parametrize("num_tokens", [4, 8])
def test_one_prompt_token_is_always_computed(cached: Any, num_tokens: int) -> None:
    """nano-vllm #144: a fully cached prompt whose length is a multiple of the block size."""
    first, second = run(cached, "a", PROMPT[:num_tokens]), run(cached, "b", PROMPT[:num_tokens])
    assert computed(cached, "b.0")[0] == (num_tokens - 4, num_tokens)
    assert second.sequences[0].generated == first.sequences[0].generated


def test_a_preempted_request_hits_what_it_wrote_itself(fake_engine: Any) -> None:
    """nano-vllm #211: preempt, then hit; the tokens stay those of an undisturbed run."""
    fixture = fake_engine(num_blocks=4, prefix_caching=True)
    submit(fixture, "a", [1, 2, 3, 4, 5, 6, 7], max_tokens=6)
    victim = submit(fixture, "b", [9, 9, 9, 9, 9, 9, 9], max_tokens=6)
    fixture.run()
    assert victim.num_preemptions == 1
    assert [event.num_hit_tokens for event in lookups(fixture)] == [0, 0, 4]
    alone = run(fake_engine(num_blocks=4), "b", [9, 9, 9, 9, 9, 9, 9], max_tokens=6)
    assert victim.sequences[0].generated == alone.sequences[0].generated


def test_salts_do_not_mix(cached: Any) -> None:
    run(cached, "a", PROMPT, cache_salt="mine")
    run(cached, "b", PROMPT, cache_salt="yours")
    run(cached, "c", PROMPT, cache_salt="mine")
    assert [event.num_hit_tokens for event in lookups(cached)] == [0, 0, 8]


def test_the_reason_of_a_miss(cached: Any) -> None:
    run(cached, "a", PROMPT)
    run(cached, "new", [20, 21, 22, 23, 24])
    run(cached, "near", [*PROMPT[:7], 40, 41, 42])
    run(cached, "all", PROMPT)
    told = [(event.num_hit_tokens, event.miss, event.num_common_tokens) for event in lookups(cached)[1:]]
    assert told == [(0, "nothing_shared", 0), (4, "shorter_than_block", 3), (8, None, 2)]


def test_eviction_takes_the_least_recently_used_and_no_more_than_needed(fake_engine: Any) -> None:
    fixture = fake_engine(num_blocks=6, prefix_caching=True)
    run(fixture, "old", [1, 1, 1, 1, 1], max_tokens=1)
    run(fixture, "mid", [2, 2, 2, 2, 2], max_tokens=1)
    run(fixture, "new", [3, 3, 3, 3, 3], max_tokens=1)
    run(fixture, "old2", [1, 1, 1, 1, 1], max_tokens=1)  # now the most recently used
    run(fixture, "big", [7] * 15, max_tokens=1)  # four blocks, three are free
    evicted = [e for b in fixture.sink.batches for e in b.events if isinstance(e, ev.BlocksEvicted)]
    assert [(len(event.block_ids), event.for_sequence_id) for event in evicted] == [(1, "big.0")]
    run(fixture, "mid2", [2, 2, 2, 2, 2], max_tokens=1)
    last = lookups(fixture)[-1]
    assert (last.miss, last.evicted_for, last.num_hit_tokens) == ("evicted", "big.0", 0)
    assert last.evicted_at_step is not None
    run(fixture, "old3", [1, 1, 1, 1, 1], max_tokens=1)
    assert lookups(fixture)[-1].num_hit_tokens == 4


def test_a_stale_key_never_comes_back(fake_engine: Any) -> None:
    """vLLM #49125: once evicted, a block's old key must not lead to its new content."""
    fixture = fake_engine(num_blocks=3, prefix_caching=True)
    for round_number in range(6):
        for word in (1, 2, 3):
            request = run(fixture, f"r{round_number}{word}", [word] * 5, max_tokens=2)
            alone = run(fake_engine(num_blocks=3), "x", [word] * 5, max_tokens=2)
            assert request.sequences[0].generated == alone.sequences[0].generated
    assert fixture.engine.counters.evictions > 6


def test_tokens_are_compared_when_keys_collide(fake_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM #12621: with a hash of two bits everything collides; no wrong KV is ever used."""
    monkeypatch.setattr(
        "kvscope.engine.prefixes.next_key", lambda parent, tokens: BlockKey(bytes([next_key(parent, tokens)[0] & 3]))
    )
    fixture = fake_engine(num_blocks=24, prefix_caching=True)
    for number in range(60):
        run(fixture, f"r{number}", [number % 7 + 1] * 9)
    assert fixture.engine.counters.prefix_lookup_tokens > 0


def test_keys_are_pinned() -> None:
    """A chain over the salt, the block before, and the tokens: the same in every version that reads recordings."""
    root = root_key("")
    first = next_key(root, [1, 2, 3, 4])
    assert root.hex().startswith("9ca426be3be94ad0")
    assert first.hex().startswith("1a85185a6d8d21ee")
    assert next_key(first, [1, 2, 3, 4]) != first
    assert next_key(root_key("salt"), [1, 2, 3, 4]) != first
    assert next_key(root, [1, 2, 3, 5]) != first


def test_the_index_forgets_completely() -> None:
    cache, root = PrefixCache(8), root_key("")
    key = next_key(root, [1, 2])
    assert cache.insert(7, key, root, (1, 2))
    assert not cache.insert(8, key, root, (1, 2))  # the same content again stays where it is
    assert (7 in cache, 8 in cache, len(cache)) == (True, False, 1)
    cache.evict(7, Eviction(3, "x.0"))
    assert (7 in cache, len(cache), cache._children, cache._blocks) == (False, 0, {}, {})
    match = cache.match(root, [key], [1, 2], 2)
    assert (match.block_ids, match.eviction) == ([], Eviction(3, "x.0"))


@pytest.mark.parametrize(("num_blocks", "most", "remembered"), [(2, 100, 6), (1_000, 4, 4)])
def test_remembered_evictions_are_bounded(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, most: int, remembered: int
) -> None:
    """By the pool's size, and for a large pool by a number."""
    monkeypatch.setattr(prefix_cache, "REMEMBERED_EVICTIONS_PER_BLOCK", 3)
    monkeypatch.setattr(prefix_cache, "MAX_REMEMBERED_EVICTIONS", most)
    cache, root = PrefixCache(num_blocks), root_key("")
    for word in range(20):
        cache.insert(word, next_key(root, [word]), root, (word,))
        cache.evict(word, Eviction(word, "x.0"))
    assert len(cache._evictions) == remembered
    assert cache.match(root, [next_key(root, [19])], [19], 1).eviction == Eviction(19, "x.0")
    assert cache.match(root, [next_key(root, [1])], [1], 1).eviction is None


@pytest.mark.parametrize("n", [1, 3])
def test_real_tokens_are_the_same_with_and_without(real_engine: Any, tiny: LoadedModel, n: int) -> None:
    prompts = ["ROMEO:\nMy lord, my lord, my lord", "ROMEO:\nMy lord, my lord, what say you?", "ROMEO:\nMy lord, my"]
    outputs = []
    for enabled in (False, True):
        fixture = real_engine(tiny, block_size=4, num_gpu_blocks_override=64, enable_prefix_caching=enabled)
        for round_number in range(2):
            requests = [
                fixture.engine.submit(p, SamplingParams(n=n, max_tokens=12, temperature=0.0), f"r{round_number}{i}")
                for i, p in enumerate(prompts)
            ]
            fixture.run()
        outputs.append([sequence.generated for request in requests for sequence in request.sequences])
    assert fixture.engine.counters.prefix_hit_tokens > 0
    assert outputs[0] == outputs[1]


def test_a_fully_known_prompt_is_no_miss(cached: Any) -> None:
    run(cached, "a", PROMPT[:8])
    run(cached, "b", PROMPT[:8])
    run(cached, "c", PROMPT[:9])  # one token to compute, behind two full blocks
    found = [(lookup.request_id, lookup.num_hit_tokens, lookup.miss) for lookup in lookups(cached)]
    assert found == [("a", 0, "nothing_shared"), ("b", 4, None), ("c", 8, None)]


def test_blocks_held_by_others_do_not_count_as_needed(fake_engine: Any) -> None:
    """Six blocks, four held: a prompt of five blocks fits, because four of them are those."""
    fixture = fake_engine(num_blocks=6, prefix_caching=True)
    submit(fixture, "a", [7] * 16, max_tokens=2)
    fixture.engine.step()
    submit(fixture, "b", [7] * 17, max_tokens=1)
    fixture.engine.step()
    state = fixture.sink.auditor.state
    assert state.requests["b"].status == "finished"
    assert lookups(fixture)[1].num_hit_tokens == 16
    fixture.run()


def test_a_released_sequence_is_indexed_again(fake_engine: Any) -> None:
    """After preemption and eviction of everything, recomputed blocks are cached once more."""
    fixture = fake_engine(num_blocks=4, prefix_caching=True)
    submit(fixture, "a", [1] * 7, max_tokens=6)
    victim = submit(fixture, "b", [9] * 7, max_tokens=6)
    fixture.run()
    assert victim.num_preemptions == 1
    run(fixture, "c", [9] * 7 + victim.sequences[0].generated, max_tokens=1)
    assert lookups(fixture)[-1].num_hit_tokens == 12  # all that b wrote after it came back


def test_a_key_covers_its_own_blocks_tokens_and_a_block_that_is_back_is_not_remembered_as_lost(cached: Any) -> None:
    request = run(cached, "a", PROMPT)
    events = [event for batch in cached.sink.batches for event in batch.events]
    assert not any(isinstance(event, ev.BlocksReused) for event in events)  # no hit, no event
    first = next_key(root_key(""), PROMPT[:4])
    assert request.sequences[0].block_keys[:2] == [first, next_key(first, PROMPT[4:8])]
    cache = cached.engine._prefixes._cache
    cache.evict(0, Eviction(1, "b.0"))
    assert list(cache._evictions) == [first]
    assert cache.insert(0, first, root_key(""), tuple(PROMPT[:4]))
    assert list(cache._evictions) == []
