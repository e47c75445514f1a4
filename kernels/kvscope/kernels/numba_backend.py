"""The default on a CPU: a compiled kernel that reads K and V in place, shared out over the cores by this module."""

import sys
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numba.core import event
from numpy.typing import NDArray
from torch import Tensor

from kvscope.kernels.batch import PagedBatch
from kvscope.kernels.cpu_layers import DTYPES, functions_for
from kvscope.kernels.layout import CacheLayout
from kvscope.kernels.numba_attention import attention_kernel
from kvscope.kernels.threads import STRETCHES_PER_THREAD, even_stretches, share_out
from kvscope.kernels.torch_backend import TorchBackend

# The integer type that a cache's elements are handed over as: numba knows no bfloat16 or fp8, and float16 only in part.
_HANDED_OVER_AS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
}
# Query tokens per tile: each block is read once for all of them, and their scores stay in the core's cache.
MAX_TILE_QUERIES = 8
# Positions times heads below which waking another core costs more than it brings; and tokens to be written.
MIN_WORK_PER_THREAD = 2048
MIN_WORK_PER_STRETCH = 4 * MIN_WORK_PER_THREAD  # where each thread may have several
MIN_WRITES_PER_THREAD = 64

Scratch = list[NDArray[np.float32]]  # see `attention_kernel`


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
    """[num_tiles, 5], see `attention_kernel`."""
    stretches: Sequence[tuple[int, int]]
    """Tiles `first:last`, of about equal work."""
    num_threads: int
    max_queries: int


class NumbaBackend(TorchBackend):
    """Paged attention in place. One instance serves one thread, which it shares the work with others for."""

    name = "numba"

    def __init__(self) -> None:
        super().__init__()
        self._planned_batch: PagedBatch | None = None
        self._known_caches: dict[int, tuple[weakref.ref[Tensor], NDArray[Any], CacheLayout]] = {}
        self._tile_plans: dict[int, Plan] = {}
        self._scratch: dict[int, Scratch] = {}

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Put each token's K and V into its slot. See `AttentionBackend.write_kv`."""
        if key.dtype != key_cache.dtype or value.dtype != value_cache.dtype or key.dtype not in DTYPES:
            super().write_kv(key, value, key_cache, value_cache, slot_mapping)
            return
        write_slots = functions_for(key.dtype).write_slots
        writes = []
        for new, cache in ((key, key_cache), (value, value_cache)):
            source = new.data_ptr(), new.stride(0), new.stride(1)
            target = cache.data_ptr(), cache.stride(0), cache.stride(1), slot_mapping.data_ptr()
            writes.append((*source, *target, cache.shape[2], *new.shape[1:]))

        def write(_: int, first: int, last: int) -> None:
            for arguments in writes:
                write_slots(first, last, *arguments)

        share_out(write, even_stretches(len(key), MIN_WRITES_PER_THREAD))

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
        (keys, layout), (values, value_layout) = self._rows(key_cache), self._rows(value_cache)
        if value_layout != layout:
            raise ValueError(f"K and V caches differ in layout: {layout} and {value_layout}")
        plan = self._tiles(batch, layout.num_kv_heads)
        (num_tokens, num_query_heads, head_size), value_size = query.shape, value_cache.shape[3]
        group_size = num_query_heads // layout.num_kv_heads
        kernel = attention_kernel(head_size, value_size, group_size)
        inside = query.dtype if query.dtype in DTYPES else torch.float32
        output = torch.empty(num_tokens, num_query_heads, value_size, dtype=inside)
        outputs = as_array(output)
        window = sliding_window or 0
        arguments = (
            as_array(query.to(inside).contiguous()),
            keys,
            values,
            batch.block_tables.numpy(),
            plan.tiles,
        )
        strides = (layout.block_size, layout.rows_per_block, layout.rows_per_head)
        numbers = (strides, np.float32(scale), window, np.float32(soft_cap or 0))
        num_rows = plan.max_queries * group_size
        scratch_shape = num_rows, batch.max_context_length, head_size + value_size
        block_elements = layout.block_size * max(head_size, value_size)

        def work_off(worker: int, first: int, last: int) -> None:
            scratch = self._worker_scratch(worker, scratch_shape, block_elements)
            kernel(*arguments, first, last, *numbers, *scratch, outputs)

        share_out(work_off, plan.stretches, plan.num_threads)
        return output.to(query.dtype)

    def _rows(self, cache: Tensor) -> tuple[NDArray[Any], CacheLayout]:
        """See `cache_rows`; remembered as long as the tensor is there."""
        key = id(cache)
        if key not in self._known_caches:
            forget = weakref.ref(cache, lambda _: self._known_caches.pop(key, None))
            self._known_caches[key] = (forget, *cache_rows(cache))
        return self._known_caches[key][1:]

    def _tiles(self, batch: PagedBatch, num_kv_heads: int) -> Plan:
        """The tiles of this step, shared by all its layers with as many heads."""
        if batch is not self._planned_batch:
            self._planned_batch = batch
            self._tile_plans.clear()
        if num_kv_heads not in self._tile_plans:
            self._tile_plans[num_kv_heads] = plan_tiles(batch, num_kv_heads)
        return self._tile_plans[num_kv_heads]

    def _worker_scratch(
        self, worker: int, shape: tuple[int, int, int], block_elements: int
    ) -> list[NDArray[np.float32]]:
        """Buffers for scores, for queries and outputs, and for a widened block, kept and grown when needed."""
        num_rows, num_scores, num_elements = shape
        sizes = num_rows * num_scores, num_rows * num_elements, block_elements
        kept = self._scratch.setdefault(worker, [np.empty(0, np.float32)] * len(sizes))
        for i, size in enumerate(sizes):
            if kept[i].size < size:
                kept[i] = np.empty(2 * size, np.float32)
        scores, rows, buffer = kept
        return [
            scores[: sizes[0]].reshape(num_rows, num_scores),
            rows[: sizes[1]].reshape(num_rows, num_elements),
            buffer,
        ]


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory in the type that it is handed over as."""
    return tensor.view(_HANDED_OVER_AS[tensor.dtype]).numpy()


def cache_rows(cache: Tensor) -> tuple[NDArray[Any], CacheLayout]:
    """The cache as `[num_rows, block_size * head_size]`, one row per block and head, and its layout."""
    layout = CacheLayout.of(cache)
    return as_array(layout.rows(cache)), layout


def plan_tiles(batch: PagedBatch, num_kv_heads: int) -> Plan:
    """Cut the step into tiles: up to `MAX_TILE_QUERIES` tokens of one sequence, for one KV head."""
    starts = batch.query_start.tolist()
    rows: list[tuple[int, int, int, int]] = []
    for sequence, context_length in enumerate(batch.context_lengths.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        rows += [
            (token, min(MAX_TILE_QUERIES, last - token), context_length - (last - token), sequence)
            for token in range(first, last, MAX_TILE_QUERIES)
        ]
    tiles = np.array(rows, np.int64).reshape(-1, 4)
    heads = np.tile(np.arange(num_kv_heads), len(tiles))
    repeated = np.repeat(tiles, num_kv_heads, axis=0)
    work = np.cumsum(repeated[:, 1] * (repeated[:, 2] + repeated[:, 1]))
    max_queries = int(tiles[:, 1].max(initial=1))
    total = int(work[-1]) if len(work) else 0
    num_threads = max(min(torch.get_num_threads(), total // MIN_WORK_PER_THREAD, len(work)), 1)
    count = max(num_threads, min(STRETCHES_PER_THREAD * num_threads, total // MIN_WORK_PER_STRETCH))
    stretches = _stretches(work, count if num_threads > 1 else 1)
    return Plan(np.column_stack([repeated, heads]), stretches, num_threads, max_queries)


def _stretches(work: NDArray[np.int64], count: int) -> list[tuple[int, int]]:
    """Tiles cut into at most `count` stretches of about equal work; `work [num_tiles]` is cumulative."""
    total = int(work[-1]) if len(work) else 0
    targets = total * np.arange(1, count) / count
    bounds = [0, *(np.searchsorted(work, targets) + 1).tolist(), len(work)]
    return [(first, last) for first, last in pairwise(bounds) if first < last] or [(0, 0)]
