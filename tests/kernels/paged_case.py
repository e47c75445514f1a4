"""A paged pool filled at random, poisoned everywhere else, with the attention it must give in float64."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvscope.kernels.batch import PagedBatch

POISON = float("nan")
# What a table holds past a sequence's context: nothing that can be dereferenced, and other sequences' blocks.
GARBAGE = (2**31 - 1, -1, 0, -(2**31), 1)


@dataclass(frozen=True)
class PagedCase:
    """One step on one layer. Every slot that is not in `written` holds NaN."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PagedBatch
    written: Tensor
    """bool [num_blocks, block_size], slots of the sequences' contexts."""
    contiguous: list[tuple[Tensor, Tensor]]
    """K and V of each sequence, `[context_length, num_kv_heads, head_size]`, in order of position."""

    @property
    def scale(self) -> float:
        """1 / sqrt(head_size)."""
        return float(self.query.shape[2] ** -0.5)

    def expected(self, sliding_window: int | None = None, soft_cap: float | None = None) -> Tensor:
        """The attention of each token, from the definition, in float64: knows no block."""
        starts = self.batch.query_start.tolist()
        group_size = self.query.shape[1] // self.key_cache.shape[1]
        rows = []
        for sequence, (keys, values) in enumerate(self.contiguous):
            num_queries = starts[sequence + 1] - starts[sequence]
            for j in range(num_queries):
                position = len(keys) - num_queries + j
                first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                k = keys[first : position + 1].double().repeat_interleave(group_size, dim=1)
                v = values[first : position + 1].double().repeat_interleave(group_size, dim=1)
                scores = torch.einsum("hd,khd->hk", self.query[starts[sequence] + j].double(), k) * self.scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
        return torch.stack(rows)

    def without_past(self, sliding_window: int) -> "PagedCase":
        """The same case once the blocks before every query's window are given up: NaN, undefined in the table."""
        key_cache, value_cache = self.key_cache.clone(), self.value_cache.clone()
        tables = self.batch.block_tables.clone()
        lengths = self.batch.query_start.diff().tolist()
        for sequence, context_length in enumerate(self.batch.context_lengths.tolist()):
            first_read = max(context_length - lengths[sequence] - sliding_window + 1, 0)
            gone = tables[sequence, : first_read // self.key_cache.shape[2]]
            key_cache[gone.long()] = value_cache[gone.long()] = POISON
            gone[:] = GARBAGE[0]
        return replace(
            self, key_cache=key_cache, value_cache=value_cache, batch=replace(self.batch, block_tables=tables)
        )

    def with_unwritten(self, fill: float, garbage: int) -> "PagedCase":
        """The same case with another content in every unwritten slot and undefined table entry."""
        key_cache, value_cache = self.key_cache.clone(), self.value_cache.clone()
        for cache in (key_cache, value_cache):
            cache.transpose(1, 2)[~self.written] = fill
        tables = self.batch.block_tables.clone()
        block_size = self.key_cache.shape[2]
        for sequence, context_length in enumerate(self.batch.context_lengths.tolist()):
            tables[sequence, -(-context_length // block_size) :] = garbage
        return replace(
            self, key_cache=key_cache, value_cache=value_cache, batch=replace(self.batch, block_tables=tables)
        )


def build_case(
    query_lengths: list[int],
    context_lengths: list[int],
    *,
    block_size: int = 16,
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_size: int = 32,
    value_head_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> PagedCase:
    """From query and context lengths; the seed is made of the shape, so a rerun draws the same."""
    value_head_size = value_head_size or head_size
    seed = sum(context_lengths) * 31 + block_size * 7 + head_size * 3 + group_size
    random = torch.Generator().manual_seed(seed)
    blocks_needed = [-(-length // block_size) for length in context_lengths]
    num_blocks = 2 * sum(blocks_needed) + 3
    free_ids = torch.randperm(num_blocks, generator=random).int()
    garbage = torch.tensor(GARBAGE, dtype=torch.int32)
    tables = garbage.repeat(len(context_lengths), max(blocks_needed) + 2)[:, : max(blocks_needed) + 2].clone()
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_size), POISON, dtype=dtype)
    value_cache = torch.full((num_blocks, num_kv_heads, block_size, value_head_size), POISON, dtype=dtype)
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    contiguous, slot_mapping = [], []
    for sequence, (num_queries, length) in enumerate(zip(query_lengths, context_lengths, strict=True)):
        first = sum(blocks_needed[:sequence])
        tables[sequence, : blocks_needed[sequence]] = free_ids[first : first + blocks_needed[sequence]]
        position = torch.arange(length)
        block, slot = tables[sequence, position // block_size].long(), position % block_size
        keys = torch.randn(length, num_kv_heads, head_size, generator=random).to(dtype)
        values = torch.randn(length, num_kv_heads, value_head_size, generator=random).to(dtype)
        key_cache[block, :, slot], value_cache[block, :, slot] = keys, values
        written[block, slot] = True
        contiguous.append((keys, values))
        slot_mapping.append((block * block_size + slot)[length - num_queries :])
    num_query_heads = num_kv_heads * group_size
    return PagedCase(
        query=torch.randn(sum(query_lengths), num_query_heads, head_size, generator=random).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        batch=PagedBatch(
            query_start=torch.tensor([0, *query_lengths]).cumsum(0).int(),
            context_lengths=torch.tensor(context_lengths).int(),
            block_tables=tables,
            slot_mapping=torch.cat(slot_mapping),
            max_query_length=max(query_lengths),
            max_context_length=max(context_lengths),
        ),
        written=written,
        contiguous=contiguous,
    )
