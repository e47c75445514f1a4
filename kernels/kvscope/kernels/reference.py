"""The specification: what every other backend must compute, in eager torch, one sequence at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvscope.kernels.batch import PagedBatch


class ReferenceBackend:
    """Paged attention as its definition reads. Computes in float32, or in float64 when given float64."""

    name = "reference"

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Put each token's K and V into its slot. See `AttentionBackend.write_kv`."""
        block_size = key_cache.shape[2]
        for token, slot in enumerate(slot_mapping.tolist()):
            key_cache[slot // block_size, :, slot % block_size] = key[token].to(key_cache.dtype)
            value_cache[slot // block_size, :, slot % block_size] = value[token].to(value_cache.dtype)

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Causal attention through the block tables. See `AttentionBackend.attention`."""
        output = query.new_empty(*query.shape[:2], value_cache.shape[3])
        starts = batch.query_start.tolist()
        for sequence, context_length in enumerate(batch.context_lengths.tolist()):
            tokens = slice(starts[sequence], starts[sequence + 1])
            first = first_visible(tokens.stop - tokens.start, context_length, sliding_window)
            table = batch.block_tables[sequence]
            output[tokens] = attend_contiguous(
                query[tokens],
                gather_context(key_cache, table, first, context_length),
                gather_context(value_cache, table, first, context_length),
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
            )
        return output

    def copy_blocks(self, caches: Sequence[Tensor], source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy whole blocks. See `AttentionBackend.copy_blocks`."""
        for source, target in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
            for cache in caches:
                cache[target].copy_(cache[source])


def gather_context(cache: Tensor, table: Tensor, start: int, stop: int) -> Tensor:
    """K or V of positions `start:stop`, `[num_kv_heads, stop - start, head_size]`: a copy, in order of position."""
    block_size = cache.shape[2]
    first = start // block_size
    blocks = cache[table[first : -(-stop // block_size)].long()]  # [num_blocks, num_kv_heads, block_size, head_size]
    return blocks.transpose(0, 1).flatten(1, 2)[:, start - first * block_size : stop - first * block_size]


def first_visible(num_queries: int, context_length: int, sliding_window: int | None) -> int:
    """The first position that any of the queries sees: what lies before may be gone."""
    return 0 if sliding_window is None else max(context_length - num_queries - sliding_window + 1, 0)


def attend_contiguous(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, sliding_window: int | None, soft_cap: float | None
) -> Tensor:
    """Causal attention of one sequence whose queries are the last positions of its context, or of a last part of it.

    query is `[num_queries, num_query_heads, head_size]`, keys and values are `[num_kv_heads, context_length, ...]`;
    returns `[num_queries, num_query_heads, value_head_size]` in query's dtype.
    """
    num_queries, num_query_heads, _ = query.shape
    num_kv_heads, context_length, _ = keys.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(dtype).unflatten(1, (num_kv_heads, num_query_heads // num_kv_heads))

    scores = torch.einsum("qhgd,hkd->hgqk", grouped, keys.to(dtype)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    visible = visible_positions(num_queries, context_length, sliding_window, query.device)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    return torch.einsum("hgqk,hkd->qhgd", weights, values.to(dtype)).flatten(1, 2).to(query.dtype)


def visible_positions(
    num_queries: int, context_length: int, sliding_window: int | None, device: torch.device
) -> Tensor:
    """Which positions each query sees, as bool `[num_queries, context_length]`."""
    key_position = torch.arange(context_length, device=device)
    query_position = key_position[context_length - num_queries :, None]
    visible = key_position <= query_position
    if sliding_window is not None:
        visible &= key_position > query_position - sliding_window
    return visible
