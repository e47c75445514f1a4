"""For a CPU without numba: gathers K and V block by block into a small workspace, then multiplies them batched."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvscope.kernels.batch import PagedBatch
from kvscope.kernels.layout import CacheLayout
from kvscope.kernels.reference import attend_contiguous, visible_positions
from kvscope.kernels.torch_plan import DecodeChunk, PrefillSequence, StepPlan, plan_step

# Queries per call where the whole score matrix is built: bounds it to this many rows per head.
MAX_EAGER_QUERIES = 128


class TorchBackend:
    """Paged attention in vectorised torch. One instance serves one thread: it reuses its workspaces.

    Decodes are gathered a few sequences at a time, so that the copy stays in the CPU's cache (PagedAttention,
    SOSP'23, reads in place instead); the query heads of a KV head are rows of one matrix, so K and V are read once.
    """

    name = "torch"

    def __init__(self) -> None:
        self._batch: PagedBatch | None = None
        self._plans: dict[tuple[CacheLayout, int, int | None], StepPlan] = {}
        self._workspaces: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    @torch.no_grad()
    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Put each token's K and V into its slot. See `AttentionBackend.write_kv`."""
        block_size = key_cache.shape[2]
        block_ids, slots = slot_mapping // block_size, slot_mapping % block_size
        key_cache[block_ids, :, slots] = key.to(key_cache.dtype)
        value_cache[block_ids, :, slots] = value.to(value_cache.dtype)

    @torch.no_grad()
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
        """Causal attention through the block tables. See `AttentionBackend.attention`.

        Raises ValueError where the two caches are laid out differently or not contiguous per block and head.
        """
        layout = CacheLayout.of(key_cache)
        if CacheLayout.of(value_cache) != layout:
            raise ValueError(f"K and V caches differ in layout: {layout} and {CacheLayout.of(value_cache)}")
        plan = self._plan(batch, layout, key_cache.shape[3], sliding_window)
        output = query.new_empty(*query.shape[:2], value_cache.shape[3])
        for chunk in plan.decode_chunks:
            output[chunk.tokens] = self._decode(
                query[chunk.tokens], key_cache, value_cache, chunk, layout=layout, scale=scale, soft_cap=soft_cap
            )
        for sequence in plan.prefill_sequences:
            output[sequence.tokens] = self._prefill(
                query[sequence.tokens],
                key_cache,
                value_cache,
                sequence,
                layout=layout,
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
            )
        return output

    @torch.no_grad()
    def copy_blocks(self, caches: Sequence[Tensor], source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy whole blocks. See `AttentionBackend.copy_blocks`."""
        for cache in caches:
            content = cache.view(torch.uint8) if cache.itemsize == 1 else cache  # torch does not copy fp8 by index
            content.index_copy_(0, target_ids, content.index_select(0, source_ids))

    def _plan(self, batch: PagedBatch, layout: CacheLayout, head_size: int, sliding_window: int | None) -> StepPlan:
        """The plan of this step, shared by all its layers with the same cache layout and window."""
        if batch is not self._batch:
            self._batch = batch
            self._plans.clear()
        key = (layout, head_size, sliding_window)
        if key not in self._plans:
            self._plans[key] = plan_step(batch, layout, head_size, sliding_window)
        return self._plans[key]

    def _decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        chunk: DecodeChunk,
        *,
        layout: CacheLayout,
        scale: float,
        soft_cap: float | None,
    ) -> Tensor:
        """One query per sequence: `[num_seqs, num_query_heads, head_size]` -> `[..., value_head_size]`."""
        num_seqs, num_query_heads, head_size = query.shape
        num_groups = num_seqs * layout.num_kv_heads
        dtype = torch.promote_types(query.dtype, torch.float32)
        keys = self._gather("key", layout.rows(key_cache), chunk.cache_rows, dtype)
        values = self._gather("value", layout.rows(value_cache), chunk.cache_rows, dtype)
        values = values.view(num_groups * chunk.num_slots, value_cache.shape[3])
        if chunk.hidden_value_rows is not None:
            values.index_fill_(0, chunk.hidden_value_rows, 0)  # a weight of 0 times NaN would be NaN

        packed = (query.to(dtype) * scale).view(num_groups, -1, head_size)  # one row per query head of a KV head
        scores = torch.bmm(packed, keys.view(num_groups, chunk.num_slots, head_size).mT)
        if soft_cap is not None:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        if chunk.hidden is not None:
            scores.view(num_seqs, num_query_heads, -1).masked_fill_(chunk.hidden, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        attended = torch.bmm(weights, values.view(num_groups, chunk.num_slots, -1))
        return attended.view(num_seqs, num_query_heads, -1).to(query.dtype)

    def _prefill(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        sequence: PrefillSequence,
        *,
        layout: CacheLayout,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        """All queries of one sequence: `[num_queries, num_query_heads, head_size]` -> `[..., value_head_size]`."""
        num_queries, num_positions = query.shape[0], sequence.num_positions
        dtype = query.dtype if key_cache.itemsize == 1 else torch.promote_types(query.dtype, key_cache.dtype)
        keys, values = (
            self._gather(name, layout.rows(cache), sequence.cache_rows, dtype).view(
                layout.num_kv_heads, -1, cache.shape[3]
            )[:, :num_positions]
            for name, cache in (("key", key_cache), ("value", value_cache))
        )
        if soft_cap is not None or keys.shape[2] != values.shape[2]:
            num_stored = num_positions - num_queries
            rows = [
                attend_contiguous(
                    query[first : first + MAX_EAGER_QUERIES],
                    keys[:, : num_stored + first + MAX_EAGER_QUERIES],
                    values[:, : num_stored + first + MAX_EAGER_QUERIES],
                    scale=scale,
                    sliding_window=sliding_window,
                    soft_cap=soft_cap,
                )
                for first in range(0, num_queries, MAX_EAGER_QUERIES)
            ]
            return torch.cat(rows)

        is_causal = num_queries == num_positions and sliding_window is None
        # KV heads take the batch axis, so that the query heads of a group read one K and V without a copy.
        grouped = query.to(dtype).unflatten(1, (layout.num_kv_heads, -1)).permute(1, 2, 0, 3)
        attended = scaled_dot_product_attention(
            grouped,
            keys[:, None].expand(-1, grouped.shape[1], -1, -1),
            values[:, None].expand(-1, grouped.shape[1], -1, -1),
            attn_mask=None
            if is_causal
            else visible_positions(num_queries, num_positions, sliding_window, query.device),
            is_causal=is_causal,
            scale=scale,
        )
        return attended.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)

    def _gather(self, name: str, cache_rows: Tensor, row_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the cache, converted to dtype, in the workspace of that name: valid until its next use."""
        shape = (len(row_ids), cache_rows.shape[1])
        gathered = self._workspace(name, shape, cache_rows.dtype, cache_rows.device)
        torch.index_select(cache_rows, 0, row_ids, out=gathered)
        if gathered.dtype == dtype:
            return gathered
        return self._workspace(f"{name} converted", shape, dtype, cache_rows.device).copy_(gathered)

    def _workspace(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A reused buffer: a fresh one of this size costs more in page faults than the copy into it."""
        numel = shape[0] * shape[1]
        buffer = self._workspaces.get((name, dtype, device))
        if buffer is None or buffer.numel() < numel:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be reused outside it
                buffer = self._workspaces[name, dtype, device] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel].view(shape)
