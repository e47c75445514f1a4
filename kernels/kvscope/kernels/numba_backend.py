"""The default on a CPU: a compiled kernel that reads K and V in place, shared out over the cores by this module."""

import sys
import weakref
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numba.core import event
from numpy.typing import NDArray
from torch import Tensor

from kvscope.kernels.batch import PagedBatch
from kvscope.kernels.cpu_layers import DTYPES, by_rows, functions_for
from kvscope.kernels.layout import CacheLayout
from kvscope.kernels.numba_attention import AttentionArguments, attention_function, scratch_elements
from kvscope.kernels.numba_layers import as_word
from kvscope.kernels.threads import share_out
from kvscope.kernels.torch_backend import TorchBackend

# The type that a tensor's elements are handed over as: numba knows no bfloat16 or fp8, and float16 only in part.
_HANDED_OVER_AS = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
    torch.float8_e4m3fn: np.uint8,
}
# Query tokens per tile: each block is read once for all of them, and their scores stay in the core's cache.
MAX_TILE_QUERIES = 8
# Positions times heads below which another core costs more than it brings.
MIN_WORK_PER_THREAD = 1024


class CompilationNotice(event.Listener):  # type: ignore[misc]  # numba has no types
    """Says, once, that something is compiled, so that nobody wonders about the pause. Kernels kept on disk are not."""

    def __init__(self) -> None:
        self._said = False

    def on_start(self, event: Any) -> None:
        if not self._said:
            sys.stderr.write("kvscope: compiling attention for this machine, once; this takes some seconds\n")
        self._said = True

    def on_end(self, event: Any) -> None:
        """Nothing to say."""


event.register("numba:compile", CompilationNotice())


class Plan(NamedTuple):
    """What a step's layers have in common."""

    tiles: NDArray[np.int64]
    """See `AttentionArguments`."""
    num_threads: int
    max_queries: int


class NumbaBackend(TorchBackend):
    """Paged attention in place. One instance serves one thread, which it shares the work with others for."""

    name = "numba"

    def __init__(self) -> None:
        super().__init__()
        self._planned_batch: PagedBatch | None = None
        self._known_layouts: dict[int, tuple[weakref.ref[Tensor], CacheLayout]] = {}
        self._tile_plans: dict[int, Plan] = {}
        self._scratch = torch.empty(0)

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Put each token's K and V into its slot. See `AttentionBackend.write_kv`."""
        if key.dtype != key_cache.dtype or value.dtype != value_cache.dtype or key.dtype not in DTYPES:
            super().write_kv(key, value, key_cache, value_cache, slot_mapping)
            return
        key, value = (new if new.stride(2) == 1 else new.contiguous() for new in (key, value))
        arguments: list[int] = []
        for new, cache in ((key, key_cache), (value, value_cache)):
            arguments += new.data_ptr(), new.stride(0), new.stride(1)
            arguments += cache.data_ptr(), cache.stride(0), cache.stride(1), new.shape[2]
        num_tokens, num_kv_heads, size = key.shape
        arguments += slot_mapping.data_ptr(), key_cache.shape[2], num_kv_heads
        by_rows(functions_for(key.dtype).write_slots, arguments, num_tokens, num_kv_heads * (size + value.shape[2]))

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

        float64, which nothing but a test asks for, is left to torch. Raises ValueError where the two caches are laid
        out differently or not contiguous per block and head.
        """
        if key_cache.dtype not in _HANDED_OVER_AS or query.dtype == torch.float64:
            return super().attention(
                query, key_cache, value_cache, batch, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
            )
        layout, value_layout = self._layout(key_cache), self._layout(value_cache)
        if value_layout != layout:
            raise ValueError(f"K and V caches differ in layout: {layout} and {value_layout}")
        plan = self._tiles(batch, layout.num_kv_heads)
        (num_tokens, num_query_heads, head_size), value_size = query.shape, value_cache.shape[3]
        group_size = num_query_heads // layout.num_kv_heads
        inside = query.dtype if query.dtype in DTYPES else torch.float32
        given = query.to(inside).contiguous()
        output = torch.empty(num_tokens, num_query_heads, value_size, dtype=inside)
        num_rows, most = plan.max_queries * group_size, batch.max_context_length
        block_elements = layout.block_size * max(head_size, value_size)
        arguments = AttentionArguments(
            query=given.data_ptr(),
            keys=key_cache.data_ptr(),
            values=value_cache.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            context_lengths=batch.context_lengths.data_ptr(),
            tiles=plan.tiles.ctypes.data,
            output=output.data_ptr(),
            num_query_heads=num_query_heads,
            table_size=batch.block_tables.shape[1],
            block_size=layout.block_size,
            rows_per_block=layout.rows_per_block,
            rows_per_head=layout.rows_per_head,
            scale=as_word(scale),
            window=sliding_window or 0,
            soft_cap=as_word(soft_cap or 0.0),
            scratch=self._scratch_for(
                plan.num_threads * scratch_elements(block_elements, num_rows, head_size + value_size, most)
            ),
            num_rows=num_rows,
            max_context_length=most,
        )
        stored, computed = _HANDED_OVER_AS[key_cache.dtype], _HANDED_OVER_AS[inside]
        function = attention_function(head_size, value_size, group_size, stored, computed)
        keep = plan, self._scratch
        share_out(function, arguments, len(plan.tiles), 1, plan.num_threads, keep)
        return output.to(query.dtype)

    def _layout(self, cache: Tensor) -> CacheLayout:
        """See `CacheLayout.of`; remembered as long as the tensor is there."""
        key = id(cache)
        if key not in self._known_layouts:
            forget = weakref.ref(cache, lambda _: self._known_layouts.pop(key, None))
            self._known_layouts[key] = forget, CacheLayout.of(cache)
        return self._known_layouts[key][1]

    def _tiles(self, batch: PagedBatch, num_kv_heads: int) -> Plan:
        """The tiles of this step, shared by all its layers with as many heads."""
        if batch is not self._planned_batch:
            self._planned_batch = batch
            self._tile_plans.clear()
        if num_kv_heads not in self._tile_plans:
            self._tile_plans[num_kv_heads] = plan_tiles(batch, num_kv_heads)
        return self._tile_plans[num_kv_heads]

    def _scratch_for(self, num_elements: int) -> int:
        """The address of so many float32, kept and grown when needed."""
        if len(self._scratch) < num_elements:
            self._scratch = torch.empty(2 * num_elements, dtype=torch.float32)
        return self._scratch.data_ptr()


def plan_tiles(batch: PagedBatch, num_kv_heads: int) -> Plan:
    """Cut the step into tiles: up to `MAX_TILE_QUERIES` tokens of one sequence, for one KV head."""
    starts = batch.query_start.tolist()
    rows: list[tuple[int, int, int, int]] = []
    work = starts[-1] * batch.max_context_length  # what it may become, where the same plan serves later steps
    for sequence, (first, last) in enumerate(pairwise(starts)):
        rows += [
            (token, min(MAX_TILE_QUERIES, last - token), last - token, sequence)
            for token in range(first, last, MAX_TILE_QUERIES)
        ]
    tiles = np.array(rows, np.int64).reshape(-1, 4)
    heads = np.tile(np.arange(num_kv_heads), len(tiles))
    num_threads = max(min(torch.get_num_threads(), work * num_kv_heads // MIN_WORK_PER_THREAD), 1)
    tiles = np.column_stack([np.repeat(tiles, num_kv_heads, axis=0), heads])
    return Plan(tiles, num_threads, int(tiles[:, 1].max(initial=1)))
