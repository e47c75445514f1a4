"""The host pool's arithmetic: what is announced is what is taken."""

from hypothesis import example, given
from hypothesis import strategies as st

from kvscope.engine.block_pool import BlockPool
from kvscope.engine.block_tables import BlockTables, Extent
from kvscope.engine.request import Sequence
from kvscope.engine.swapping import Swapper
from kvscope.events.types import Event

BLOCK_SIZE = 4


def compute(tables: BlockTables, sequence: Sequence, stop: int) -> None:
    tables.prepare(Extent(sequence, sequence.num_computed, stop))
    sequence.num_computed = stop


@given(
    num_common=st.integers(1, 10),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    more=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    window=st.none() | st.integers(1, 8),
)
@example(num_common=BLOCK_SIZE - 1, lengths=[0, 0, 0], more=[1, 0, 0, 0], window=None)  # one writes into a shared block
@example(num_common=10, lengths=[0, 0], more=[1, 5], window=4)  # the same, and the table's beginning is gone
def test_coming_back_takes_the_blocks_that_were_announced(
    num_common: int, lengths: list[int], more: list[int], window: int | None
) -> None:
    """Candidates with a common history, each a bit longer; some compute on when they are back, some do not."""
    events: list[Event] = []
    tables = BlockTables(BlockPool(64, BLOCK_SIZE), events, window=window)
    swapper = Swapper(tables, 64, events)
    family = [Sequence(f"r.{index}", index, [1] * 40) for index in range(len(lengths))]
    compute(tables, family[0], num_common)
    for sequence in family[1:]:
        tables.fork(family[0], sequence)
        sequence.num_computed = num_common
    for sequence, length in zip(family, lengths, strict=True):
        if length:
            compute(tables, sequence, num_common + length)
        tables.release_out_of_window(sequence)
    announced = swapper.host_blocks_needed(family)
    swapper.swap_out(family)
    assert 64 - swapper.host_pool.num_available_blocks == announced
    limits = [(sequence, sequence.num_computed + extra) for sequence, extra in zip(family, more, strict=False)]
    needed, before = swapper.blocks_needed(limits), tables.pool.num_available_blocks
    assert before == 64
    swapper.swap_in(family)
    for sequence, limit in limits:
        if limit > sequence.num_computed:
            compute(tables, sequence, limit)
    assert before - tables.pool.num_available_blocks == needed
    assert swapper.host_pool.num_available_blocks == 64


def test_a_sequence_that_holds_nothing_on_the_host_gives_nothing_back() -> None:
    events: list[Event] = []
    tables = BlockTables(BlockPool(8, BLOCK_SIZE), events)
    sequence = Sequence("r.0", 0, [1] * 8, num_computed=3)
    Swapper(tables, 4, events).release(sequence)
    assert (events, sequence.num_computed) == ([], 3)


def test_only_written_blocks_go_to_the_host_also_behind_a_window() -> None:
    """L0 is out of the window, L1 is written, L2 and L3 are reserved."""
    events: list[Event] = []
    tables = BlockTables(BlockPool(8, BLOCK_SIZE), events, window=4)
    swapper = Swapper(tables, 4, events)
    sequence = Sequence("r.0", 0, [1] * 16)
    compute(tables, sequence, 8)
    tables.release_out_of_window(sequence)
    tables.grow(sequence, 16)
    assert (sequence.num_released, len(sequence.block_table)) == (1, 3)
    assert swapper.host_blocks_needed([sequence]) == 1
    assert len(swapper.swap_out([sequence])) == len(sequence.host_table) == 1
