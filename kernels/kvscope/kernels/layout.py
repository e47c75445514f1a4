"""How a KV cache tensor lies in memory."""

from typing import NamedTuple

import torch
from torch import Tensor


class CacheLayout(NamedTuple):
    """How a cache tensor is laid out, counted in rows of one block and head: `block_size * head_size` elements."""

    block_size: int
    num_kv_heads: int
    rows_per_block: int
    rows_per_head: int

    @classmethod
    def of(cls, cache: Tensor) -> "CacheLayout":
        """The layout of `[num_blocks, num_kv_heads, block_size, head_size]`, also of a slice of a larger tensor.

        Raises ValueError where a block and head is not contiguous or does not start at a multiple of its size.
        """
        _, num_kv_heads, block_size, head_size = cache.shape
        block_stride, head_stride, slot_stride, element_stride = cache.stride()
        row = block_size * head_size
        if (slot_stride, element_stride) != (head_size, 1) or block_stride % row or head_stride % row:
            raise ValueError(f"a KV cache must be contiguous per block and head, got strides {cache.stride()}")
        return cls(block_size, num_kv_heads, block_stride // row, head_stride // row)

    def rows(self, cache: Tensor) -> Tensor:
        """A view of the cache as `[num_rows, block_size * head_size]`, one row per block and head."""
        num_blocks, num_kv_heads, block_size, head_size = cache.shape
        num_rows = (num_blocks - 1) * self.rows_per_block + (num_kv_heads - 1) * self.rows_per_head + 1
        return cache.as_strided((num_rows, block_size * head_size), (block_size * head_size, 1))

    def row_ids(self, block_ids: Tensor) -> Tensor:
        """Rows of the given blocks, head by head: `[..., num_blocks]` -> `[..., num_kv_heads, num_blocks]`."""
        heads = torch.arange(self.num_kv_heads, device=block_ids.device)[:, None]
        return block_ids.long()[..., None, :] * self.rows_per_block + heads * self.rows_per_head
