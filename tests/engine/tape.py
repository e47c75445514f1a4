"""A CUDA graph's stand-in on a CPU: what a function did is repeated on the same memory; the function is called once.

torch's operations are recorded below Python, Triton's launches where they are made; both with the very tensors and
numbers that they were given. As on a device, what hands a tensor's content to Python, or takes it from there, cannot be
recorded.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvscope.engine.decode_graphs import Captured
from kvscope.kernels.batch import PagedBatch
from kvscope.kernels.torch_backend import TorchBackend
from kvscope.kernels.triton_backend import TritonBackend
from kvscope.kernels.triton_tiles import Splits

KERNELS = (
    "triton_attention.paged_attention_kernel",
    "triton_splits.combine_splits_kernel",
    "triton_cache.write_kv_kernel",
)
# Content or a shape that the device must be waited for (the last two begin `tolist` and `numpy`), or that Python gives.
HOST_BOUND = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "lift_fresh"),
    *("resolve_conj", "resolve_neg"),
}
MAX_ROWS = 24


class Tape(TorchDispatchMode):
    """Records the calls made under it."""

    now: "Tape | None" = None  # the one that records

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._is_launching = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_launching:
            name = function.overloadpacket.__name__
            if name in HOST_BOUND or (name.startswith("index") and any(map(is_mask, tree_leaves(args[1:])))):
                raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
            result = function(*args, **kwargs)
            self.calls.append((function, args, kwargs, result))
            return result
        return function(*args, **kwargs)

    def launch(self, kernel: Callable[..., None], args: Any, kwargs: Any) -> None:
        """What the interpreter does with torch meanwhile is its own affair."""
        self.calls.append((kernel, args, kwargs, None))
        self._is_launching = True
        kernel(*args, **kwargs)
        self._is_launching = False

    def replay(self) -> None:
        """A view, and what was changed in place, is where it was; any other result goes to where it was."""
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def is_mask(value: Any) -> bool:
    """Indexing with one gives a shape that depends on its content."""
    return isinstance(value, Tensor) and value.dtype == torch.bool


class TapedKernel:
    """A kernel whose launches are recorded, with their grids."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        launch: Callable[..., None] = self._kernel[grid]
        return launch if Tape.now is None else lambda *args, **kwargs: Tape.now.launch(launch, args, kwargs)


def capture(function: Callable[[], Tensor]) -> Captured:
    """As `CudaCapture`: run, then record."""
    function()
    with Tape() as tape:
        Tape.now = tape
        try:
            output = function()
        finally:
            Tape.now = None
    return Captured(tape.replay, output)


def triton_backend(monkeypatch: pytest.MonkeyPatch, splits: Splits | None) -> TritonBackend:
    """The interpreted kernels, so that a tape can hold them."""
    backend = TritonBackend(splits=splits)
    for name in KERNELS:
        path = f"kvscope.kernels.{name}"
        module, _, attribute = path.rpartition(".")
        monkeypatch.setattr(path, TapedKernel(getattr(__import__(module, fromlist=[attribute]), attribute)))
    return backend


class DeviceOnly(TorchBackend):
    """Decodes without a look at what lengths and tables hold, padded or not, in torch; the rest as torch's backend."""

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if len(key) > MAX_ROWS:
            super().write_kv(key, value, key_cache, value_cache, slot_mapping)
            return
        for new, cache in ((key, key_cache), (value, value_cache)):
            for row, slot in zip(new[:, None], slot_mapping[:, None], strict=True):
                block_id, place = slot.clamp(min=0) // cache.shape[2], slot.clamp(min=0) % cache.shape[2]
                old = cache[block_id, :, place]
                cache[block_id, :, place] = torch.where(slot[:, None, None] >= 0, row.to(cache.dtype), old)

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
        if batch.max_query_length > 1:
            options = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
            return super().attention(query, key_cache, value_cache, batch, **options)
        tables = batch.block_tables.clamp(0, len(key_cache) - 1).long()
        keys, values = (cache[tables].transpose(1, 2).flatten(2, 3) for cache in (key_cache, value_cache))
        position, length = torch.arange(keys.shape[2]), batch.context_lengths[:, None]
        seen = ((position < length) & (position >= length - (sliding_window or 1 << 30)))[:, None, :, None]
        keys, values = torch.where(seen, keys, 0), torch.where(seen, values, 0)
        scores = query.unflatten(1, (keys.shape[1], -1)) @ keys.mT * scale
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        weights = scores.masked_fill(~seen.mT, -1e30).softmax(-1) * seen.mT
        return (weights @ values).flatten(1, 2)
