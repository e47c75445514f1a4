"""The interface between the model runner and the KV cache, and the choice of who implements it."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvscope.kernels.batch import PagedBatch

BACKEND_NAMES = ("reference", "torch", "numba", "triton")

MAX_TRITON_BLOCK_SIZE = 256


class AttentionBackend(Protocol):
    """Reads and writes the paged KV cache of one layer.

    A cache is `[num_blocks, num_kv_heads, block_size, head_size]`, one tensor for K and one for V, contiguous within a
    block and head, both with the same layout of blocks and heads; the head size of V may differ from that of K.
    No slot outside a sequence's context has any influence on its output, whatever the slot holds (NaN included).
    """

    name: str

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Put each token's K and V into its slot, cast to the cache's dtype. Mutates both caches.

        key is `[num_tokens, num_kv_heads, head_size]`, value the same with V's head size, slot_mapping int64
        `[num_tokens]` with distinct entries.
        """
        ...

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
        """Causal attention over the cached positions of each sequence.

        query is `[num_tokens, num_query_heads, head_size]`; returns `[num_tokens, num_query_heads, value_head_size]`
        in query's dtype. Query head h reads KV head `h // (num_query_heads // num_kv_heads)`. Token j of a sequence
        with q tokens sits at position `p = context_length - q + j` and sees the positions `[0, p]`, or
        `[p - sliding_window + 1, p]`. `soft_cap` turns a scaled score s into `soft_cap * tanh(s / soft_cap)`.
        """
        ...

    def copy_blocks(self, caches: Sequence[Tensor], source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy whole blocks, bit for bit, in every given cache. Mutates the caches.

        source_ids and target_ids are int64 `[num_copies]`. Targets are distinct and none is also a source: the copies
        of one call may run in any order.
        """
        ...


def get_backend(name: str) -> AttentionBackend:
    """The backend of that name. Triton is imported only when asked for; without a CUDA device it is interpreted.

    Raises ValueError for a name not in `BACKEND_NAMES`, ImportError where Triton is not installed, RuntimeError where
    its kernels cannot run on this machine.
    """
    match name:
        case "reference":
            from kvscope.kernels.reference import ReferenceBackend

            return ReferenceBackend()
        case "torch":
            from kvscope.kernels.torch_backend import TorchBackend

            return TorchBackend()
        case "numba":
            from kvscope.kernels.numba_backend import NumbaBackend

            return NumbaBackend()
        case "triton":
            from kvscope.kernels.triton_backend import TritonBackend

            return TritonBackend()
    raise ValueError(f"unknown attention backend {name!r}: choose one of {', '.join(BACKEND_NAMES)}")


def check_block_size(backend: str, block_size: int) -> None:
    """Raise ValueError where the backend cannot work with blocks of `block_size` slots, saying what it can.

    Triton asks for a power of two: a KV tile is then a whole number of blocks or a part of one, so each block costs
    one table load and no division. Beyond 256 slots the half-empty last block costs more than paging saves.
    """
    if backend not in BACKEND_NAMES:
        raise ValueError(f"unknown attention backend {backend!r}: choose one of {', '.join(BACKEND_NAMES)}")
    if block_size < 1:
        raise ValueError(f"block size must be at least 1, not {block_size}")
    is_power_of_two = block_size & (block_size - 1) == 0
    if backend == "triton" and not (is_power_of_two and block_size <= MAX_TRITON_BLOCK_SIZE):
        raise ValueError(
            f"the triton backend needs a block size that is a power of two from 1 to {MAX_TRITON_BLOCK_SIZE}, "
            f"not {block_size}; the torch backend takes any"
        )
