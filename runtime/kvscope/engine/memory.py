"""The parts that manage an engine's KV memory, put together as its configuration says. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from kvscope.engine.admission import Admission, PagedAdmission
from kvscope.engine.block_pool import BlockPool
from kvscope.engine.block_tables import BlockTables
from kvscope.engine.contiguous import ContiguousAdmission, ContiguousPool
from kvscope.engine.prefixes import Prefixes
from kvscope.engine.swapping import Swapper
from kvscope.events.types import EngineInfo, Event


class Memory(NamedTuple):
    """One pool and who works on it; all of them record into the same list of events."""

    pool: BlockPool
    tables: BlockTables
    prefixes: Prefixes | None
    swapper: Swapper
    admission: Admission


def build_memory(info: EngineInfo, events: list[Event], free_order: Sequence[int] | None = None) -> Memory:
    """Paged, unless the configuration says contiguous; `free_order` seeds the free list of a paged pool."""
    if info.allocator == "contiguous":
        return _contiguous(info, events)
    pool = BlockPool(info.num_blocks, info.block_size, free_order)
    prefixes = Prefixes(pool, events) if info.prefix_caching else None
    tables = BlockTables(pool, events, prefixes, info.sliding_window)
    swapper = Swapper(tables, info.num_host_blocks, events)
    admission = PagedAdmission(
        tables,
        swapper,
        prefixes,
        max_model_len=info.max_model_len,
        step_tokens=info.max_num_batched_tokens,
        policy=info.admission,
    )
    return Memory(pool, tables, prefixes, swapper, admission)


def _contiguous(info: EngineInfo, events: list[Event]) -> Memory:
    """Nothing is shared, so there is no prefix cache; nobody is preempted, so host blocks would stay empty.

    What falls out of a window stays too: a maximum, once reserved, is kept to the end.
    """
    pool = ContiguousPool(info.num_blocks, info.block_size)
    tables = BlockTables(pool, events)
    swapper = Swapper(tables, info.num_host_blocks, events)
    return Memory(pool, tables, None, swapper, ContiguousAdmission(tables, pool, max_model_len=info.max_model_len))
