"""Reserve the maximum: what serving engines did before paged KV, on the same blocks, tables and events.

Every sequence gets, before it starts, one run of consecutive blocks for the longest that it may become, and keeps it
to its end. Nothing is shared: each candidate of a request computes the prompt into its own run, as a batch with the
prompt in n rows does. Nothing grows, so nobody is preempted. What is lost is visible: slots reserved and never
written, and free blocks in runs too short to be used.
"""

from collections.abc import Iterable, Sequence

from kvscope.engine.block_pool import Allocation, BlockPool, OutOfBlocksError
from kvscope.engine.block_tables import BlockCopy, BlockTables
from kvscope.engine.free_runs import FreeRuns
from kvscope.engine.request import Request
from kvscope.events.state import WaitingReason
from kvscope.events.types import SamplingParams


class ContiguousPool(BlockPool):
    """A pool that hands out runs of consecutive blocks, at the lowest ids where one fits. Nothing is ever cached."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._free = self._runs = FreeRuns(num_blocks)

    @property
    def free_runs(self) -> list[int]:
        """How many blocks each free run has, lowest ids first."""
        return self._runs.lengths()

    def allocate(self, count: int) -> Allocation:
        """Take one run of `count` blocks.

        Raises:
            OutOfBlocksError: no free run is that long, however many blocks are free; nothing is taken then.
        """
        longest = max(self.free_runs, default=0)
        if count > longest:
            raise OutOfBlocksError(f"{count} blocks asked for in one run, the longest free run has {longest}")
        return super().allocate(count)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """As for any pool; and every table is one run, every block in one table at most."""
        tables = list(tables)
        problems = super().check_integrity(tables)
        problems += [f"{table} is not one run of blocks" for table in tables if not is_run(table)]
        problems += [f"P{block_id} is shared" for block_id, count in enumerate(self.ref_counts) if count > 1]
        return problems


class ContiguousAdmission:
    """Room for the longest a request may become, or it waits."""

    def __init__(self, tables: BlockTables, pool: ContiguousPool, *, max_model_len: int) -> None:
        self._tables, self._pool = tables, pool
        self._max_model_len = max_model_len

    def worst_case_blocks(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """What it holds from its first step on."""
        return params.num_sequences * self._pool.blocks_for(self._max_positions(num_prompt_tokens, params))

    def obstacle(self, request: Request, running: Sequence[Request]) -> WaitingReason | None:
        """Too few free blocks, or enough of them in runs too short.

        `fragmentation` has one candidate's run as the number needed, and the longest run that those before it leave.
        """
        number = len(request.alive_sequences())
        length = self._pool.blocks_for(self._max_positions(len(request.prompt_token_ids), request.params))
        if number * length > self._pool.num_free_blocks:
            return WaitingReason("reservation", number * length, self._pool.num_free_blocks)
        runs = self._pool.free_runs
        if number > sum(run // length for run in runs):
            return WaitingReason("fragmentation", length, max(run % length for run in runs))
        return None

    def reserve(self, request: Request) -> list[BlockCopy]:
        request.forked = True  # each sequence for itself, from the first position on
        num_positions = self._max_positions(len(request.prompt_token_ids), request.params)
        for sequence in request.alive_sequences():
            self._tables.grow(sequence, num_positions)
        return []

    def _max_positions(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """The last token never gets KV."""
        return min(num_prompt_tokens + params.max_tokens, self._max_model_len) - 1


def is_run(block_ids: Sequence[int]) -> bool:
    """Consecutive ids, ascending."""
    return not block_ids or list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids)))
