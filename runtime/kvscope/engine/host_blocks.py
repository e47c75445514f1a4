"""Host memory for swapped-out blocks: the same layout as the device's caches, pinned where the device is a GPU."""

from collections.abc import Iterable, Sequence

import torch

from kvscope.engine.block_tables import BlockCopy


class HostBlocks:
    """One host tensor per cache `[num_blocks, ...]`; blocks move bit for bit."""

    def __init__(self, caches: Iterable[torch.Tensor], num_blocks: int) -> None:
        self._pairs = [
            (cache, torch.empty((num_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=cache.is_cuda))
            for cache in caches
        ]

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy device blocks to host blocks. Mutates the host tensors."""
        for cache, host in self._pairs:
            sources = torch.tensor([copy.source_block for copy in copies], device=cache.device)
            host[[copy.target_block for copy in copies]] = cache[sources].to("cpu")

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy host blocks to device blocks. Mutates the caches."""
        for cache, host in self._pairs:
            targets = torch.tensor([copy.target_block for copy in copies], device=cache.device)
            cache[targets] = host[[copy.source_block for copy in copies]].to(cache.device)
