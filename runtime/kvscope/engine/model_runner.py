"""The model and its KV tensors: the one place of the engine that owns torch objects.

A step is one forward pass over the packed tokens of all extents. Rows of logits come back only for those extents
that reach their sequence's last token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvscope.engine.attention import LayerCache, LayerGeometry, PagedStep
from kvscope.engine.block_tables import BlockCopy, Extent
from kvscope.engine.host_blocks import HostBlocks
from kvscope.engine.kv_scales import FP8, KvScales
from kvscope.kernels.backend import AttentionBackend
from kvscope.kernels.batch import PagedBatch
from kvscope.kernels.huge_pages import huge_zeros


class ModelRunner:
    """Runs steps of one model over one pool of blocks."""

    def __init__(
        self,
        model: Any,
        layers: dict[int, LayerGeometry],
        backend: AttentionBackend,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        scales: Mapping[int, KvScales] | None = None,
    ) -> None:
        """With scales, of every layer, KV is stored in 8 bits; else in the model's own dtype."""
        self.model = model
        self._scales = scales or {}
        self._cache_dtype = FP8 if scales else model.dtype
        self.block_size = block_size
        self._backend = backend
        self._device = model.device
        self.caches = {
            layer: LayerCache(
                self._new_cache(num_blocks, geometry.num_kv_heads, geometry.key_size),
                self._new_cache(num_blocks, geometry.num_kv_heads, geometry.value_size),
            )
            for layer, geometry in layers.items()
        }
        self.host = HostBlocks((tensor for cache in self.caches.values() for tensor in cache), num_host_blocks)

    @torch.inference_mode()
    def swap(self, to_host: Sequence[BlockCopy], from_host: Sequence[BlockCopy]) -> None:
        """Move blocks between device and host, first out, then in. Mutates the KV cache."""
        if to_host:
            self.host.swap_out(to_host)
        if from_host:
            self.host.swap_in(from_host)

    @torch.inference_mode()
    def run(self, extents: Sequence[Extent], copies: Sequence[BlockCopy]) -> dict[str, torch.Tensor]:
        """Copy blocks, then compute KV for every extent.

        Returns the logits, float32 `[vocab_size]` on the CPU, by sequence id of each extent that reaches its
        sequence's last token. Mutates the KV cache.
        """
        self._copy_blocks(copies)
        if not extents:
            return {}
        batch, positions = self._batch(extents)
        ends = batch.query_start[1:].tolist()
        choosing = [i for i, extent in enumerate(extents) if extent.stop == extent.sequence.num_tokens]
        token_ids = [token for extent in extents for token in extent.sequence.tokens(extent.start, extent.stop)]
        logits = self.model(
            input_ids=self._tensor([token_ids], torch.int64),
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=self._tensor([ends[i] - 1 for i in choosing], torch.int64),
            paged=PagedStep(batch, self.caches, self._backend, self._scales),
        ).logits[0]
        rows = logits.to(device="cpu", dtype=torch.float32)
        return {extents[i].sequence.sequence_id: row for i, row in zip(choosing, rows, strict=True)}

    def _batch(self, extents: Sequence[Extent]) -> tuple[PagedBatch, torch.Tensor]:
        """Where the step's tokens go, and their positions, int64 `[num_tokens]`."""
        starts, stops = np.array([(extent.start, extent.stop) for extent in extents]).T
        # Nothing reads what fell out of the window: any number will do.
        tables = [[0] * extent.sequence.num_released + extent.sequence.block_table for extent in extents]
        longest = max(map(len, tables))
        block_tables = np.array([table + [0] * (longest - len(table)) for table in tables])
        lengths = stops - starts
        ends = np.cumsum(lengths)
        sequences = np.repeat(np.arange(len(extents)), lengths)
        positions = np.arange(ends[-1]) - (ends - stops)[sequences]
        block_ids = block_tables[sequences, positions // self.block_size]
        batch = PagedBatch(
            query_start=self._tensor([0, *ends], torch.int32),
            context_lengths=self._tensor(stops, torch.int32),
            block_tables=self._tensor(block_tables, torch.int32),
            slot_mapping=self._tensor(block_ids * self.block_size + positions % self.block_size, torch.int64),
            max_query_length=int(lengths.max()),
            max_context_length=int(stops.max()),
        )
        return batch, self._tensor(positions, torch.int64)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._backend.copy_blocks(
                [tensor for cache in self.caches.values() for tensor in cache],
                self._tensor([copy.source_block for copy in copies], torch.int64),
                self._tensor([copy.target_block for copy in copies], torch.int64),
            )

    def _new_cache(self, num_blocks: int, num_kv_heads: int, head_size: int) -> torch.Tensor:
        shape = (num_blocks, num_kv_heads, self.block_size, head_size)
        if self._device.type == "cpu":
            return huge_zeros(shape, self._cache_dtype)
        return torch.zeros(shape, dtype=self._cache_dtype, device=self._device)

    def _tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def bytes_per_slot(layers: dict[int, LayerGeometry], dtype: torch.dtype) -> int:
    """K and V of one token position in all layers and heads."""
    return (
        sum(geometry.num_kv_heads * (geometry.key_size + geometry.value_size) for geometry in layers.values())
        * dtype.itemsize
    )
