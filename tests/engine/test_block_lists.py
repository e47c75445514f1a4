"""The two lists of the pool, against the plainest lists that do the same."""

import random
from collections import deque

from kvscope.engine.block_pool import CACHED, FREE, HOLDER, BlockPool
from kvscope.engine.free_queue import MIN_TAKEN, FreeQueue
from kvscope.engine.lru_list import LruList


def test_a_queue_takes_from_the_head_and_gives_memory_back() -> None:
    rng, queue, plain = random.Random(0), FreeQueue(range(5)), deque(range(5))
    for number in range(5, 20_000, 5):
        added = list(range(number, number + 5))
        queue.extend(added)
        plain.extend(added)
        count = rng.randrange(10)
        assert queue.take(count) == [plain.popleft() for _ in range(min(count, len(plain)))]
        assert len(queue) == len(plain)
        assert len(queue._block_ids) <= MIN_TAKEN + 2 * len(plain) + 10
    assert list(queue) == list(plain)


def test_a_queue_whose_head_is_cut_off_goes_on_where_it_was() -> None:
    queue = FreeQueue(range(MIN_TAKEN + 10))
    assert queue.take(MIN_TAKEN) == list(range(MIN_TAKEN))
    assert len(queue._block_ids) == MIN_TAKEN + 10  # as many as MIN_TAKEN stay
    assert queue.take(1) == [MIN_TAKEN]
    assert queue._block_ids == list(queue) == list(range(MIN_TAKEN + 1, MIN_TAKEN + 10))
    assert queue.take(20) == list(range(MIN_TAKEN + 1, MIN_TAKEN + 10))
    assert len(queue) == 0


def test_ids_leave_a_list_from_anywhere_and_from_its_old_end() -> None:
    rng, capacity = random.Random(0), 12
    recent, plain, states = LruList(capacity), list[int](), [0] * capacity
    for _ in range(3_000):
        inside = rng.sample(plain, rng.randint(0, len(plain)))
        outside = rng.sample(sorted(set(range(capacity)) - set(plain)), rng.randint(0, capacity - len(plain)))
        match rng.randrange(3):
            case 0:
                assert list(recent.append(outside, states, 0, 1)) == []
                plain += outside
            case 1:
                assert list(recent.remove(inside, states, 1, 0)) == []
                plain = [block_id for block_id in plain if block_id not in inside]
            case 2:
                assert recent.take_oldest(len(inside)) == plain[: len(inside)]
                for block_id in plain[: len(inside)]:
                    states[block_id] = 0
                del plain[: len(inside)]
        assert (list(recent), len(recent)) == (plain, len(plain))
        assert states == [int(block_id in plain) for block_id in range(capacity)]


def test_a_call_ends_at_the_first_block_in_another_state() -> None:
    recent, states = LruList(4), [0, 0, 5, 0]
    assert recent.append([0, 1, 2, 3], states, 0, 1) == (2, 3)
    assert (list(recent), len(recent), states) == ([0, 1], 2, [1, 1, 5, 0])
    assert recent.remove([0, 3, 1], states, 1, 7) == (3, 1)
    assert (list(recent), len(recent), states) == ([1], 1, [7, 1, 5, 0])


def test_integrity_finds_a_block_in_the_wrong_list() -> None:
    pool = BlockPool(5, 4)
    held, cached = pool.allocate(1).block_ids, pool.allocate(2).block_ids
    for block_id in cached:
        pool.keep(block_id)
    pool.release(cached)
    assert pool.check_integrity([held]) == []
    pool._states = [FREE, HOLDER, FREE, CACHED, HOLDER + CACHED]
    assert pool.check_integrity([[1, 4]]) == [
        "P0 is free and listed as held",
        "P1 is held and listed as cached",
        "P2 is free and listed as cached",
        "P3 is cached and listed as free",
        "P4 is held and listed as free",
        "2 held + 2 free + 2 cached blocks are not 5",
    ]
