"""The default on a CPU: a compiled kernel that reads K and V in place, shared out over the cores by this module."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numba.core import event
from numpy.typing import NDArray
from torch import Tensor

from kvscope.kernels.batch import PagedBatch
from kvscope.kernels.layout import CacheLayout
from kvscope.kernels.numba_attention import attention_kernel
from kvscope.kernels.torch_backend import TorchBackend

# The integer type that a cache's elements are handed over as: numba knows no bfloat16, and float16 only in part.
_HANDED_OVER_AS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
# Query tokens per tile: each block is read once for all of them, and their scores stay in the core's cache.
MAX_TILE_QUERIES = 8
# Positions times heads below which waking another core costs more than it brings.
MIN_WORK_PER_THREAD = 2048


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
    work: NDArray[np.int64]
    """[num_tiles], positions read up to and including each tile, times its queries; cumulative."""
    max_queries: int


class NumbaBackend(TorchBackend):
    """Paged attention in place. One instance serves one thread, which it shares the work with others for.

    Threads are this backend's own and sleep between calls. numba's would be a second OpenMP beside torch's, compile
    three times as long, and share out evenly by number instead of by length.
    """

    name = "numba"

    def __init__(self) -> None:
        super().__init__()
        self._planned_batch: PagedBatch | None = None
        self._tile_plans: dict[int, Plan] = {}
        self._scratch: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}

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

        float64, which nothing but a test asks for, is left to torch. Raises ValueError where the two caches are laid
        out differently or not contiguous per block and head.
        """
        if key_cache.dtype not in _HANDED_OVER_AS or query.dtype == torch.float64:
            return super().attention(
                query, key_cache, value_cache, batch, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
            )
        layout = CacheLayout.of(key_cache)
        if CacheLayout.of(value_cache) != layout:
            raise ValueError(f"K and V caches differ in layout: {layout} and {CacheLayout.of(value_cache)}")
        plan = self._tiles(batch, layout.num_kv_heads)
        (num_tokens, num_query_heads, head_size), value_size = query.shape, value_cache.shape[3]
        group_size = num_query_heads // layout.num_kv_heads
        kernel = attention_kernel(head_size, value_size, group_size)
        output = torch.empty(num_tokens, num_query_heads, value_size)
        window = sliding_window or 0
        arguments = (
            query.to(torch.float32).contiguous().numpy(),
            *(layout.rows(cache).view(_HANDED_OVER_AS[cache.dtype]).numpy() for cache in (key_cache, value_cache)),
            batch.block_tables.numpy(),
            plan.tiles,
        )
        strides = (layout.block_size, layout.rows_per_block, layout.rows_per_head)
        numbers = (strides, np.float32(scale), window, np.float32(soft_cap or 0))
        scores_shape = (plan.max_queries * group_size, batch.max_context_length)
        block_elements = layout.block_size * max(head_size, value_size)

        def work_off(worker: int, first: int, last: int) -> None:
            scratch = self._worker_scratch(worker, scores_shape, block_elements)
            kernel(*arguments, first, last, *numbers, *scratch, output.numpy())

        _share_out(work_off, plan.work)
        return output.to(query.dtype)

    def _tiles(self, batch: PagedBatch, num_kv_heads: int) -> Plan:
        """The tiles of this step, shared by all its layers with as many heads."""
        if batch is not self._planned_batch:
            self._planned_batch = batch
            self._tile_plans.clear()
        if num_kv_heads not in self._tile_plans:
            self._tile_plans[num_kv_heads] = plan_tiles(batch, num_kv_heads)
        return self._tile_plans[num_kv_heads]

    def _worker_scratch(
        self, worker: int, shape: tuple[int, int], block_elements: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Buffers for scores and for a widened block, kept from call to call and grown when needed."""
        scores, buffer = self._scratch.get(worker, (np.empty(0, np.float32), np.empty(0, np.float32)))
        if scores.size < shape[0] * shape[1] or buffer.size < block_elements:
            scores = np.empty(max(2 * shape[0] * shape[1], scores.size), np.float32)
            buffer = np.empty(max(block_elements, buffer.size), np.float32)
            self._scratch[worker] = scores, buffer
        return scores[: shape[0] * shape[1]].reshape(shape), buffer


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
    return Plan(np.column_stack([repeated, heads]), work, max_queries)


_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _share_out(work_off, work: NDArray[np.int64]) -> None:  # type: ignore[no-untyped-def]
    """Call `work_off(worker, first, last)` for stretches of equal work, one of them in this thread."""
    if len(work) == 0:
        return
    num_threads = max(min(torch.get_num_threads(), int(work[-1]) // MIN_WORK_PER_THREAD, len(work)), 1)
    targets = work[-1] * np.arange(1, num_threads) / num_threads
    bounds = [0, *(np.searchsorted(work, targets) + 1).tolist(), len(work)]
    stretches = [(first, last) for first, last in pairwise(bounds) if first < last]
    futures = [
        _workers().submit(work_off, worker, first, last) for worker, (first, last) in enumerate(stretches[1:], start=1)
    ]
    work_off(0, *stretches[0])
    wait(futures)
    for future in futures:
        future.result()


def _workers() -> ThreadPoolExecutor:
    global _pool  # noqa: PLW0603 (one set of threads for the process, started when first needed)
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(os.cpu_count() or 1, 1), thread_name_prefix="kvscope-attention")
        return _pool
