"""Launches the Triton kernels: on a GPU, or in Triton's interpreter on a machine without one."""

import math
from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from kvscope.kernels.batch import PagedBatch
from kvscope.kernels.layout import CacheLayout
from kvscope.kernels.triton_runtime import load_kernels
from kvscope.kernels.triton_tiles import (
    NO_SPLITS,
    Splits,
    Tiles,
    compiled_splits,
    compiled_tiles,
    interpreted_tiles,
    next_power_of_two,
)

LOG2_E = math.log2(math.e)
# (token, head) or (copy, head) rows per program, and elements of a block copied per program.
COMPILED_ROWS, INTERPRETED_ROWS = 16, 1024
COMPILED_COLUMNS, INTERPRETED_COLUMNS = 1024, 4096
INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Phase(Enum):
    """Which sequences of a step a launch computes: those with one query, those with more, or all."""

    DECODE = auto()
    PREFILL = auto()
    ALL = auto()


class TritonBackend:
    """Paged attention that reads the pool in place. Block sizes: see `kvscope.kernels.backend.check_block_size`.

    Interpreted, a launch costs about 5 ms per program and copies the storage of each argument onto itself: for
    looking at what the kernels do on small pools, not for speed. `tiles`, `splits` and `by_phase` override what is
    chosen by shape and device.

    A decode may be padded, so that one launch serves several batch sizes: a token whose slot is negative is written
    nowhere, and the output of a sequence whose context has no positions is zeros. The launches of a decode depend on
    the shapes of its tensors alone, and nothing waits for the device: a CUDA graph may hold them.
    """

    name = "triton"

    def __init__(self, tiles: Tiles | None = None, splits: Splits | None = None, by_phase: bool | None = None) -> None:
        self.interpreted = load_kernels()
        self._tiles, self._splits = tiles, splits
        self._by_phase = not self.interpreted if by_phase is None else by_phase
        if self._splits is None and self.interpreted:
            self._splits = NO_SPLITS
        elif self._splits is None:
            self._num_multiprocessors = torch.cuda.get_device_properties(
                torch.cuda.current_device()
            ).multi_processor_count

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Put each token's K and V into its slot. See `AttentionBackend.write_kv`."""
        from kvscope.kernels.triton_cache import write_kv_kernel

        if self.interpreted and key_cache.dtype in (torch.bfloat16, torch.float8_e4m3fn):
            key, value = key.to(key_cache.dtype), value.to(key_cache.dtype)  # the interpreter truncates, torch rounds
        key, value = _with_dense_rows(key), _with_dense_rows(value)
        num_tokens, num_kv_heads, head_size = key.shape
        num_rows = num_tokens * num_kv_heads
        if num_rows == 0:
            return
        for cache in (key_cache, value_cache):
            CacheLayout.of(cache)
        rows = min(next_power_of_two(num_rows), INTERPRETED_ROWS) if self.interpreted else COMPILED_ROWS
        write_kv_kernel[(-(-num_rows // rows),)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            num_rows,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:2],
            *value_cache.stride()[:2],
            NUM_KV_HEADS=num_kv_heads,
            HEAD_SIZE=head_size,
            VALUE_HEAD_SIZE=value.shape[2],
            BLOCK_SIZE=key_cache.shape[2],
            ROWS=rows,
            HEAD_PAD=next_power_of_two(head_size),
            VALUE_PAD=next_power_of_two(value.shape[2]),
        )

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

        Raises ValueError where a cache is not contiguous per block and head.
        """
        for cache in (key_cache, value_cache):
            CacheLayout.of(cache)
        if batch.num_seqs == 0:
            return query.new_empty(0, query.shape[1], value_cache.shape[3])
        query = _with_dense_rows(query)
        # The interpreter truncates to bfloat16 where a GPU rounds: there the result is rounded by torch.
        output_dtype = torch.float32 if self.interpreted else query.dtype
        output = query.new_empty(*query.shape[:2], value_cache.shape[3], dtype=output_dtype)
        for phase in self._phases(batch, num_tokens=query.shape[0]):
            self._launch(phase, output, query, key_cache, value_cache, batch, scale, sliding_window, soft_cap)
        return output.to(query.dtype)

    def _phases(self, batch: PagedBatch, num_tokens: int) -> Sequence[Phase]:
        """One launch per phase; a program of the interpreter costs so much that it does all in one."""
        if batch.max_query_length == 1 and batch.num_seqs == num_tokens:
            return (Phase.DECODE,)
        if not self._by_phase or batch.num_seqs * batch.max_query_length == num_tokens:
            return (Phase.ALL,)
        return (Phase.DECODE, Phase.PREFILL)

    def _launch(
        self,
        phase: Phase,
        output: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: PagedBatch,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> None:
        import triton.language as tl

        from kvscope.kernels.triton_attention import paged_attention_kernel
        from kvscope.kernels.triton_splits import combine_splits_kernel

        num_tokens, num_query_heads, head_size = query.shape
        num_kv_heads, block_size, value_head_size = value_cache.shape[1:]
        group_size = num_query_heads // num_kv_heads
        tiles = self._choose_tiles(phase, batch, query, group_size, max(head_size, value_head_size))
        splits = self._choose_splits(phase, batch, num_kv_heads)
        group_rows = next_power_of_two(group_size)
        num_tiles = batch.num_seqs
        if phase is not Phase.DECODE:
            num_tiles += num_tokens // (tiles.block_m // group_rows)
        # numpy, on which the interpreter runs, has no bfloat16 to multiply.
        dot_dtype = tl.float32 if self.interpreted else getattr(tl, str(query.dtype).removeprefix("torch."))
        parts, lse = output, output  # never touched without splits
        if splits.per_sequence > 1:
            parts, lse = self._new_parts((batch.num_seqs, num_query_heads, splits.per_sequence), value_head_size, query)
        constants = {
            "GROUP": group_size,
            "VALUE_HEAD_SIZE": value_head_size,
            "BLOCK_SIZE": block_size,
            "SLIDING_WINDOW": sliding_window,
            "NUM_SPLITS": splits.per_sequence,
            "SEQS_PAD": next_power_of_two(batch.num_seqs),
            "TILE": tiles.tile,
            "VALUE_PAD": max(16, next_power_of_two(value_head_size)),
        }
        paged_attention_kernel[(num_tiles, num_kv_heads, splits.per_sequence)](
            output,
            parts,
            lse,
            query,
            key_cache,
            value_cache,
            batch.query_start,
            batch.context_lengths,
            batch.block_tables,
            batch.num_seqs,
            splits.programs,
            scale * LOG2_E if soft_cap is None else 2 * LOG2_E * scale / soft_cap,
            0.0 if soft_cap is None else soft_cap * LOG2_E,
            *output.stride()[:2],
            *query.stride()[:2],
            *key_cache.stride()[:2],
            *value_cache.stride()[:2],
            batch.block_tables.stride(0),
            HEAD_SIZE=head_size,
            HAS_SOFT_CAP=soft_cap is not None,
            ONE_QUERY=phase is Phase.DECODE,
            SKIP_ONE_QUERY=phase is Phase.PREFILL,
            BLOCK_M=tiles.block_m,
            GROUP_ROWS=group_rows,
            HEAD_PAD=max(16, next_power_of_two(head_size)),
            DOT_DTYPE=dot_dtype,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            enable_fp_fusion=True,  # Triton 3.10 turns it off by default, and warns from 3.9 on
            **constants,
        )
        if splits.per_sequence > 1:
            combine_splits_kernel[(batch.num_seqs, num_query_heads)](
                output,
                parts,
                lse,
                batch.query_start,
                batch.context_lengths,
                batch.num_seqs,
                splits.programs,
                *output.stride()[:2],
                enable_fp_fusion=True,
                **constants,
            )

    def copy_blocks(self, caches: Sequence[Tensor], source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy whole blocks, as integers: a NaN keeps its bits. See `AttentionBackend.copy_blocks`."""
        from kvscope.kernels.triton_cache import copy_blocks_kernel

        if len(source_ids) == 0:
            return
        for cache in caches:
            CacheLayout.of(cache)
            _, num_kv_heads, block_size, head_size = cache.shape
            row_size = block_size * head_size
            num_rows = len(source_ids) * num_kv_heads
            rows, columns = (16, INTERPRETED_COLUMNS) if self.interpreted else (1, COMPILED_COLUMNS)
            copy_blocks_kernel[(-(-num_rows // rows), -(-row_size // columns))](
                cache.view(INTEGER_OF_SIZE[cache.element_size()]),
                source_ids,
                target_ids,
                num_rows,
                *cache.stride()[:2],
                NUM_KV_HEADS=num_kv_heads,
                ROW_SIZE=row_size,
                ROWS=rows,
                COLUMNS=columns,
            )

    def _new_parts(self, shape: tuple[int, int, int], value_head_size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Scratch for the results of splits and the logarithms of their weights, of which only a part is written."""
        parts = like.new_empty(*shape, value_head_size, dtype=torch.float32)
        return parts, like.new_empty(shape, dtype=torch.float32)

    def _choose_tiles(self, phase: Phase, batch: PagedBatch, query: Tensor, group_size: int, head_size: int) -> Tiles:
        if self._tiles is not None:
            return self._tiles
        if self.interpreted:
            return interpreted_tiles(
                group_size=group_size,
                max_query_length=batch.max_query_length,
                max_context_length=batch.max_context_length,
            )
        return compiled_tiles(
            one_query=phase is Phase.DECODE,
            group_size=group_size,
            head_size=head_size,
            element_size=query.element_size(),
        )

    def _choose_splits(self, phase: Phase, batch: PagedBatch, num_kv_heads: int) -> Splits:
        if phase is not Phase.DECODE:
            return NO_SPLITS
        if self._splits is not None:
            return self._splits
        return compiled_splits(
            num_seqs=batch.num_seqs, num_kv_heads=num_kv_heads, num_multiprocessors=self._num_multiprocessors
        )


def _with_dense_rows(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where the elements of a head are not next to each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
