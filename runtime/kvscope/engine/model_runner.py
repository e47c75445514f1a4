"""The model and its KV tensors: the one place of the engine that owns torch objects.

A step is one forward pass over the packed tokens of all extents. Rows of logits come back only for those extents
that reach their sequence's last token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvscope.engine.attention import LayerCache, LayerGeometry, PagedStep
from kvscope.engine.block_tables import BlockCopy, Extent
from kvscope.engine.decode_graphs import Capture, DecodeGraphs
from kvscope.engine.host_blocks import HostBlocks
from kvscope.engine.kv_scales import FP8, KvScales
from kvscope.engine.step_inputs import StepInputs, pack_inputs
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
        self.graphs: DecodeGraphs | None = None

    @property
    def num_graph_steps(self) -> int:
        """Steps so far that were replayed."""
        return self.graphs.num_replays if self.graphs is not None else 0

    @torch.inference_mode()
    def capture_decodes(
        self, capture: Capture, *, max_num_seqs: int, max_model_len: int, when_met: bool = False
    ) -> DecodeGraphs:
        """From now on replay decodes of up to so many sequences; the backend must take padding, as triton does.

        Unless batch sizes are captured when they are met.

        Raises:
            RuntimeError: the model's forward pass cannot be captured.
        """
        self.graphs = DecodeGraphs(
            self._forward,
            capture,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=self.block_size,
            device=self._device,
            when_met=when_met,
        )
        return self.graphs

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
        inputs = pack_inputs(extents, self.block_size)
        choosing = [i for i, extent in enumerate(extents) if extent.stop == extent.sequence.num_tokens]
        if self.graphs is not None and self.graphs.fits(inputs):
            rows = self.graphs.run(inputs).to("cpu")
            rows = rows if len(choosing) == len(extents) else rows[choosing]
        else:
            rows = self._run_inputs(inputs, choosing).to("cpu")
        return {extents[i].sequence.sequence_id: row for i, row in zip(choosing, rows, strict=True)}

    def _run_inputs(self, inputs: StepInputs, choosing: Sequence[int]) -> torch.Tensor:
        """The logits of the last token of each sequence that chooses one."""
        batch = PagedBatch(
            query_start=self._tensor(inputs.query_start, torch.int32),
            context_lengths=self._tensor(inputs.context_lengths, torch.int32),
            block_tables=self._tensor(inputs.block_tables, torch.int32),
            slot_mapping=self._tensor(inputs.slot_mapping, torch.int64),
            max_query_length=inputs.max_query_length,
            max_context_length=int(inputs.context_lengths.max()),
        )
        return self._forward(
            self._tensor(inputs.token_ids, torch.int64),
            self._tensor(inputs.positions, torch.int64),
            batch,
            self._tensor(inputs.query_start[1:][choosing] - 1, torch.int64),
        )

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, keep: torch.Tensor | int = 0
    ) -> torch.Tensor:
        """The logits of the tokens at the places `keep`, all by default: float32 `[num_kept, vocab_size]`."""
        output = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            paged=PagedStep(batch, self.caches, self._backend, self._scales),
        )
        return output.logits[0].to(torch.float32)  # type: ignore[no-any-return]

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
        if self.graphs is None or self._device.type == "cpu":
            return torch.tensor(values, dtype=dtype, device=self._device)
        return torch.tensor(values, dtype=dtype, pin_memory=True).to(self._device, non_blocking=True)


def bytes_per_slot(layers: dict[int, LayerGeometry], dtype: torch.dtype) -> int:
    """K and V of one token position in all layers and heads."""
    return (
        sum(geometry.num_kv_heads * (geometry.key_size + geometry.value_size) for geometry in layers.values())
        * dtype.itemsize
    )
