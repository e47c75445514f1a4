"""The pool and the tables over it: every reachable state of a small world, and faults known from other allocators."""

from collections import deque
from typing import NamedTuple

import pytest

from kvscope.engine.block_pool import FREE, HOLDER, BlockPool, OutOfBlocksError
from kvscope.engine.block_tables import BlockCopy, BlockTables, Extent
from kvscope.engine.free_queue import FreeQueue
from kvscope.engine.request import Sequence
from kvscope.events.types import BlocksReleased, Event

NUM_BLOCKS, BLOCK_SIZE, NUM_SEQUENCES, MAX_POSITIONS = 6, 2, 3, 8


def test_blocks_come_from_the_head_and_return_to_the_tail() -> None:
    pool = BlockPool(4, 4, free_order=[3, 0, 1, 2])
    assert pool.allocate(2) == ([3, 0], [])
    assert pool.release([3, 0]) == ([3, 0], [])
    assert pool.allocate(4).block_ids == [1, 2, 0, 3]  # last logical block first, so the first one rests longest
    assert pool.num_free_blocks == 0


def test_asking_for_too_many_takes_nothing() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="3 blocks asked for, 2 available"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2
    assert pool.allocate(0) == ([], [])


def test_a_shared_block_returns_with_its_last_holder() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1).block_ids
    pool.share([block, block])
    assert [pool.release([block]).freed for _ in range(3)] == [[], [], [block]]


def test_a_double_free_is_refused() -> None:
    """vLLM #1556 and #42571: a block freed twice would be handed out twice."""
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1).block_ids
    pool.release([block])
    with pytest.raises(ValueError, match="P0 is free already"):
        pool.release([block])
    assert pool.num_free_blocks == 2
    assert sorted(pool.allocate(2).block_ids) == [0, 1]


def test_the_same_block_twice_in_one_release() -> None:
    """vLLM #42571: naming a block twice in one call must not inflate the count of free blocks."""
    pool = BlockPool(3, 4)
    (block,) = pool.allocate(1).block_ids
    with pytest.raises(ValueError, match="is free already"):
        pool.release([block, block])
    assert pool.num_free_blocks == 3
    assert sorted(pool.allocate(3).block_ids) == [0, 1, 2]


def test_decrement_all_then_filter_queues_once() -> None:
    """dynamo 13398: two holders letting go in one call queue the block once."""
    pool = BlockPool(3, 4)
    (block,) = pool.allocate(1).block_ids
    pool.share([block])
    assert pool.release([block, block]) == ([block], [])
    assert sorted(pool.allocate(3).block_ids) == [0, 1, 2]


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="P1 is free and cannot be shared"):
        BlockPool(2, 4).share([1])


def test_integrity_names_what_is_wrong() -> None:
    pool = BlockPool(3, 4)
    table = pool.allocate(2).block_ids
    assert pool.check_integrity([table]) == []
    assert pool.check_integrity([table, table[:1]]) == ["P0 has ref count 1, 2 table entries point at it"]
    pool._states[1] = FREE
    assert "1 held + 1 free + 0 cached blocks are not 3" in pool.check_integrity([table[:1]])


def test_free_order_must_name_every_block() -> None:
    with pytest.raises(ValueError, match="every block exactly once"):
        BlockPool(3, 4, free_order=[0, 1, 1])


def test_cached_blocks_are_handed_out_last_and_oldest_first() -> None:
    pool = BlockPool(4, 4)
    pool.allocate(3)
    pool.keep(0)
    pool.keep(1)
    assert pool.release([0, 1]) == ([0, 1], [0, 1])
    pool.release([2])
    assert (pool.num_free_blocks, pool.num_cached_blocks, pool.num_available_blocks) == (2, 2, 4)
    assert pool.allocate(3) == ([3, 2, 1], [1])  # P1, the later logical block, came back first
    assert pool.allocate(1) == ([0], [0])


def test_reuse_takes_a_block_out_of_the_cache() -> None:
    """vLLM #37076: a block that was hit must not be evicted under the hand that holds it."""
    pool = BlockPool(3, 4)
    pool.allocate(2)
    pool.keep(0)
    pool.keep(1)
    pool.release([0, 1])
    pool.reuse([0, 0])
    assert pool.ref_counts == [2, 0, 0]
    assert pool.allocate(2) == ([2, 1], [1])
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    assert pool.release([0, 0]) == ([0], [0])  # still worth keeping
    assert pool.release([2, 1]) == ([2, 1], [])  # P1 gave up its content when it was handed out
    with pytest.raises(ValueError, match="P1 is free: its content is gone"):
        pool.reuse([0, 1])


def test_a_hit_on_held_and_cached_blocks() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(2)
    pool.keep(0)
    pool.keep(1)
    pool.release([1])
    pool.reuse([0, 1])
    assert (pool.ref_counts, pool.num_cached_blocks) == ([2, 1, 0], 0)
    assert pool.release([0, 1]) == ([1], [1])
    assert pool.release([0]) == ([0], [0])


def test_room_that_is_there_already_is_no_event() -> None:
    events: list[Event] = []
    tables, sequence = BlockTables(BlockPool(3, 4), events), Sequence("r.0", 0, [])
    for num_positions in (5, 5, 8, 3):
        tables.grow(sequence, num_positions)
    assert (sequence.block_table, len(events)) == ([0, 1], 1)
    assert tables.release(Sequence("r.1", 1, [])) == []
    assert len(events) == 1


def test_a_copy_leaves_what_is_reserved_behind_it() -> None:
    tables, parent, child = BlockTables(BlockPool(8, 4), []), Sequence("r.0", 0, []), Sequence("r.1", 1, [])
    tables.grow(parent, 12)
    parent.num_computed = 6
    tables.fork(parent, child)
    assert tables.prepare(Extent(child, 6, 7)) == [BlockCopy(1, 3)]
    assert (parent.block_table, child.block_table) == ([0, 1, 2], [0, 3, 2])


@pytest.mark.parametrize("num_sharing", [2, 3, 5])
def test_all_that_write_into_what_they_share_need_a_copy_but_the_last(num_sharing: int) -> None:
    tables = BlockTables(BlockPool(16, 4), [])
    family = [Sequence(f"r.{index}", index, [1] * 9) for index in range(num_sharing)]
    tables.grow(family[0], 6)
    family[0].num_computed = 6
    for sequence in family[1:]:
        tables.fork(family[0], sequence)
    extents = [Extent(sequence, 6, 7) for sequence in family]
    assert tables.blocks_needed(extents) == num_sharing - 1
    assert len([copy for extent in extents for copy in tables.prepare(extent)]) == num_sharing - 1
    assert tables.blocks_needed(extents) == 0


class World(NamedTuple):
    """Everything that decides what can happen next, in a form that can be compared."""

    free: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    computed: tuple[int, ...]


def build(world: World) -> tuple[BlockTables, list[Sequence], list[Event]]:
    pool, events = BlockPool(NUM_BLOCKS, BLOCK_SIZE), list[Event]()
    pool._free = FreeQueue(world.free)
    pool._states = [HOLDER * sum(table.count(block) for table in world.tables) for block in range(NUM_BLOCKS)]
    sequences = [Sequence(f"s.{i}", i, [0] * MAX_POSITIONS) for i in range(NUM_SEQUENCES)]
    for sequence, table, computed in zip(sequences, world.tables, world.computed, strict=True):
        sequence.block_table, sequence.num_computed = list(table), computed
    return BlockTables(pool, events), sequences, events


def capture(tables: BlockTables, sequences: list[Sequence]) -> World:
    return World(
        tuple(tables.pool._free),
        tuple(tuple(s.block_table) for s in sequences),
        tuple(s.num_computed for s in sequences),
    )


def write(tables: BlockTables, sequence: Sequence, count: int) -> list[BlockCopy] | None:
    """What a step does for one sequence; None when the scheduler would say no."""
    extent = Extent(sequence, sequence.num_computed, sequence.num_computed + count)
    needed = tables.blocks_needed([extent])
    free_before = tables.pool.num_free_blocks
    if extent.stop > MAX_POSITIONS or needed > free_before:
        return None
    copies = tables.prepare(extent)
    assert free_before - tables.pool.num_free_blocks == needed  # the forecast is exact
    for position in range(extent.start, extent.stop):  # invariant 3: nobody else holds what is written
        assert tables.pool.ref_count(sequence.block_table[position // BLOCK_SIZE]) == 1
    sequence.num_computed = extent.stop
    return copies


def successors(world: World) -> list[World]:
    """Every operation that is allowed, applied to a fresh copy of the world."""
    found = []
    for index in range(NUM_SEQUENCES):
        for count in (1, 2, 3):
            tables, sequences, _ = build(world)
            if write(tables, sequences[index], count) is not None:
                found.append(check(tables, sequences))
        tables, sequences, events = build(world)
        if sequences[index].block_table:
            tables.release(sequences[index])
            (event,) = events
            assert isinstance(event, BlocksReleased)
            assert set(event.freed_block_ids) <= set(event.block_ids)
            found.append(check(tables, sequences))
        for other in range(NUM_SEQUENCES):
            tables, sequences, _ = build(world)
            # A fork happens when everything reserved is written, as at the end of a prompt.
            parent, child = sequences[index], sequences[other]
            whole = tables.pool.blocks_for(parent.num_computed) == len(parent.block_table) > 0
            if whole and not child.block_table:
                free_before = tables.pool.num_free_blocks
                tables.fork(parent, child)
                assert tables.pool.num_free_blocks == free_before
                found.append(check(tables, sequences))
    return found


def check(tables: BlockTables, sequences: list[Sequence]) -> World:
    assert tables.check_integrity(sequences) == []
    return capture(tables, sequences)


def test_every_state_of_a_small_world() -> None:
    """Six blocks of two slots, three sequences: all states reachable by write, fork and release."""
    start = World(tuple(range(NUM_BLOCKS)), ((),) * NUM_SEQUENCES, (0,) * NUM_SEQUENCES)
    seen, frontier = {canonical(start)}, deque([start])
    transitions = 0
    while frontier:
        for world in successors(frontier.popleft()):
            transitions += 1
            if (key := canonical(world)) not in seen:
                seen.add(key)
                frontier.append(world)
    assert len(seen) == 2_485  # fewer: an operation went missing; more: one does what it should not
    assert transitions > len(seen)


def canonical(world: World) -> World:
    """Block ids do not matter, only who shares what: renumber them in order of appearance."""
    names: dict[int, int] = {}
    tables = tuple(tuple(names.setdefault(b, len(names)) for b in table) for table in world.tables)
    return World((), tables, world.computed)
