"""The waste ledger and what the prefix cache lost, against counts made in another way."""

import random
from collections import defaultdict
from itertools import pairwise

import msgspec
import pytest

from kvscope.analysis import ledger as ledger_module
from kvscope.analysis.ledger import Bookkeeper, Ledger, Maximum, Saved
from kvscope.analysis.prefix_losses import NearMiss, find_near_misses, find_regrets
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.events.types import BlocksEvicted, PrefixLookup, RequestSubmitted
from kvscope.transport.source import ListSource

from .conftest import MS, PROMPT, run_engine


def random_life(seed: int):
    rng = random.Random(seed)
    requests = [
        (
            [rng.randint(1, 2) for _ in range(rng.randint(1, 14))],
            {
                "n": rng.choice([1, 1, 2, 3]),
                "max_tokens": rng.randint(1, 12),
                "temperature": rng.choice([0.0, 1.0]),
                "cache_salt": rng.choice(["", "other"]),
            },
        )
        for _ in range(rng.randint(2, 6))
    ]
    return run_engine(rng.choice([24, 40]), requests, together=True, steps_between=rng.randint(0, 3))


def counted_by_hand(state: EngineState) -> dict[str, object]:
    """Slot by slot and holder by holder, from the tables and tokens alone."""
    size = state.info.block_size
    holders, filled, content = defaultdict(list), defaultdict(set), {}
    for request in state.requests.values():
        for sequence in request.sequences:
            tokens = [*request.prompt_token_ids, *sequence.token_ids]
            for logical, block_id in enumerate(sequence.block_table):
                holders[block_id].append(request.request_id)
                here = range(logical * size, min((logical + 1) * size, sequence.num_written))
                filled[block_id].update(position % size for position in here)
                if len(here) == size:
                    content[block_id] = (request.params.cache_salt, *tokens[: (logical + 1) * size])
    across = {block_id: len(set(names)) - 1 for block_id, names in holders.items()}
    within = {block_id: len(names) - 1 - across[block_id] for block_id, names in holders.items()}
    last = {s.block_table[-1] for r in state.requests.values() for s in r.sequences if s.block_table}
    return {
        "held": len(holders),
        "unwritten": sum(size - len(filled[block_id]) for block_id in holders),
        "slack": sum(size - len(filled[block_id]) for block_id in last),
        "duplicates": len(content) - len(set(content.values())),
        "sharing": sum(n for block_id, n in within.items() if len(filled[block_id]) == size),
        "copy_on_write": sum(n for block_id, n in within.items() if len(filled[block_id]) < size),
        "prefix_cache": sum(across.values()),
    }


def accounts(batches, bookkeeper: Bookkeeper):
    state = EngineState()
    for batch in batches:
        state = apply_batch(state, batch)
        yield state, bookkeeper.draw_up(state)


@pytest.mark.parametrize("max_idle_keys", [65_536, -1_000])
def test_every_number_equals_one_counted_by_hand(monkeypatch, max_idle_keys):
    monkeypatch.setattr(ledger_module, "MAX_IDLE_KEYS", max_idle_keys)  # the second: forgets after every account
    seen = dict.fromkeys(("unwritten", "slack", "duplicates", "sharing", "copy_on_write", "prefix_cache"), 0)
    for seed in range(60):
        for state, account in accounts(random_life(seed), Bookkeeper()):
            if state.info is None:
                continue
            expected = counted_by_hand(state)
            found = {
                "held": account.held,
                "unwritten": account.unwritten_slots,
                "slack": account.slack_slots,
                "duplicates": account.duplicates,
                **account.saved._asdict(),
            }
            assert found == expected, f"seed {seed} step {state.step}"
            assert account.saved.total == sum(state.ref_counts) - account.held
            for name in seen:
                seen[name] += expected[name]
    assert all(seen.values()), f"a kind of waste or saving never occurred: {seen}"


def test_the_maximum_is_what_the_article_reserves():
    """24 slots; B (6 tokens) may become 20 positions long: C, two blocks, cannot join. By blocks both run."""
    batches = run_engine(
        6, [([11, 12, 13, 14, 15, 16], {"max_tokens": 15}), ([31, 32, 33], {"max_tokens": 4})], together=True
    )
    both = [account for _, account in accounts(batches, Bookkeeper()) if account.num_requests == 2]
    assert both
    assert {account.maximum for account in both} == {Maximum(slots=20 + 8, num_fitting=1)}
    assert both[0].more_requests(both[0].held * 4) == 2


def test_the_maximum_of_a_paged_run_is_what_a_contiguous_one_holds():
    """The same prompts both ways, after every step; and as many come in at once as the ledger says would fit."""
    roomy = {"together": True, "max_num_batched_tokens": 500, "max_num_seqs": 20, "prefix_caching": False}
    compared, refused_entry = 0, 0
    for seed in range(40):
        rng = random.Random(seed)
        requests = [
            (
                [rng.randint(1, 9) for _ in range(rng.randint(1, 14))],
                {"n": rng.choice([1, 2, 3]), "max_tokens": rng.randint(1, 12)},
            )
            for _ in range(rng.randint(1, 4))
        ]
        paged = run_engine(200, requests, **roomy)
        contiguous = run_engine(200, requests, allocator="contiguous", **roomy)
        expected = [(s.step, a.maximum.slots) for s, a in accounts(paged, Bookkeeper()) if s.phase == "commit"]
        held = [(s.step, a.held * a.block_size) for s, a in accounts(contiguous, Bookkeeper()) if s.phase == "commit"]
        assert held == expected
        compared += sum(slots > 0 for _, slots in held)

        num_blocks = rng.randint(21, 42)  # from what the largest of them needs
        small = run_engine(num_blocks, requests, allocator="contiguous", **roomy)
        state = next(s for s, _ in accounts(paged, Bookkeeper()) if s.phase == "plan")
        state.info = msgspec.structs.replace(state.info, num_blocks=num_blocks)
        account = Bookkeeper().draw_up(state)
        admitted = next(s for s, _ in accounts(small, Bookkeeper()) if s.phase == "plan").requests.values()
        assert sum(request.status == "running" for request in admitted) == account.maximum.num_fitting
        refused_entry += account.maximum.num_fitting < len(requests)
    assert compared > 100
    assert 5 < refused_entry < 35


def test_candidates_each_reserve_their_own_maximum():
    batches = run_engine(16, [([1] * 6, {"n": 3, "max_tokens": 11})], together=True)
    assert max(account.maximum.slots for _, account in accounts(batches, Bookkeeper())) == 3 * (6 + 11 - 1)


def test_the_longest_a_model_reads_bounds_the_maximum():
    batches = run_engine(32, [([1] * 6, {"max_tokens": 1_000})], together=True)  # max_model_len is 64
    assert max(account.maximum.slots for _, account in accounts(batches, Bookkeeper())) == 64


def test_bytes_and_requests_are_shares_of_what_is_held():
    account = Ledger(num_blocks=10, block_size=4, bytes_per_block=1024, num_requests=3, held=6, written_slots=20)
    assert account.unwritten_slots == 4
    assert account.num_bytes(4) == 1024
    assert account.more_requests(8) == 1  # two blocks are what one of three requests in six blocks takes
    assert Ledger().more_requests(5) == 0
    assert Saved(1, 2, 3).total == 6


def test_an_engine_that_was_not_announced_has_an_empty_account():
    assert Bookkeeper().draw_up(EngineState()) == Ledger()


def log_of(batches):
    source = ListSource(batches)
    source.start()
    return list(source.view.log)


def test_a_near_miss_tells_the_common_run():
    batches = run_engine(16, [(PROMPT, {"max_tokens": 1}), ([*PROMPT[:7], 40, 41], {"max_tokens": 1})], together=False)
    (miss,) = find_near_misses(log_of(batches))
    prompts = [e.prompt_token_ids for b in batches for e in b.events if isinstance(e, RequestSubmitted)]
    common = next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
    assert (miss.request_id, miss.num_hit + miss.num_common, miss.num_tokens) == ("r2", common, 9)
    assert isinstance(miss, NearMiss)
    assert miss.num_hit == 4


def regretful_batches():
    others = [([n] * 8, {"max_tokens": 2}) for n in range(20, 24)]
    return run_engine(5, [(PROMPT, {"max_tokens": 1}), *others, (PROMPT, {"max_tokens": 1})], together=False)


def test_a_regret_names_the_eviction_and_the_time_between():
    batches = regretful_batches()
    (regret,) = find_regrets(log_of(batches))
    times = {
        type(event): batch.time_ns
        for batch in batches
        for event in batch.events
        if (isinstance(event, BlocksEvicted) and batch.step == regret.evicted_at_step)
        or (isinstance(event, PrefixLookup) and event.miss == "evicted")
    }
    assert regret.request_id == "r6"
    assert regret.elapsed_ns == times[PrefixLookup] - times[BlocksEvicted] > 0
    assert find_regrets(log_of(batches), window_ns=regret.elapsed_ns) == [regret]
    assert find_regrets(log_of(batches), window_ns=regret.elapsed_ns - MS) == []


def test_an_eviction_that_the_log_has_lost_is_not_made_up():
    log = log_of(regretful_batches())
    evicted = max(i for i, entry in enumerate(log) if isinstance(entry.event, BlocksEvicted))
    looked_up = max(i for i, entry in enumerate(log) if isinstance(entry.event, PrefixLookup))
    assert find_regrets(log[:looked_up]) == []
    assert all(earlier.time_ns <= later.time_ns for earlier, later in pairwise(log))
    assert find_regrets([entry for i, entry in enumerate(log) if i > evicted and i < looked_up]) == []
    (regret,) = find_regrets(log)
    without = [e for e in log if not (isinstance(e.event, BlocksEvicted) and e.step == regret.evicted_at_step)]
    assert find_regrets(without) == []
