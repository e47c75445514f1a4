"""A weight in oneDNN's blocked order, read by a multiplication of our own where there are few rows."""

import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvscope.kernels.numba_gemv import BLOCK, multiply_function
from kvscope.kernels.threads import STRETCHES_PER_THREAD, share_out

MAX_ROWS = 2  # with more of them, arithmetic matters more than how the weight is read
NEEDED_GAIN = 1.1  # below, another thread is not worth what it takes from others
_MAX_PROBED_BYTES = 1 << 26  # enough to come from memory, not from a cache


class BlockedWeight:
    """`[out_features, in_features]` at an address that stays valid as long as this is used."""

    def __init__(self, address: int, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> None:
        self.num_outputs, self.size = shape
        self.num_bytes = self.num_outputs * self.size * dtype.itemsize
        self.num_threads = 1
        self.dtype = dtype
        self._address, self._bias = address, bias
        self._function = multiply_function(dtype == torch.bfloat16)

    @staticmethod
    def may_be(shape: tuple[int, int], dtype: torch.dtype) -> bool:
        """Whether a weight like this can lie in whole blocks."""
        return dtype in (torch.float32, torch.bfloat16) and shape[0] % BLOCK == 0 and shape[1] % 16 == 0

    def takes(self, rows: Tensor) -> bool:
        """Whether these rows are few, and such as `multiply` expects."""
        return 0 < rows.numel() <= MAX_ROWS * self.size and rows.is_contiguous() and rows.dtype == self.dtype

    def multiply(self, rows: Tensor) -> Tensor:
        """`[..., in_features]`, contiguous -> `[..., out_features]`."""
        output = torch.empty((*rows.shape[:-1], self.num_outputs), dtype=rows.dtype)
        bias = (0, 0) if self._bias is None else (self._bias.data_ptr(), self.num_outputs)
        inputs = rows.data_ptr(), rows.numel() // self.size, self._address, *bias
        arguments = *inputs, output.data_ptr(), self.size, self.num_outputs
        num_blocks = self.num_outputs // BLOCK
        if self.num_threads == 1:
            self._function(0, num_blocks, *arguments)
        else:
            count = min(STRETCHES_PER_THREAD * self.num_threads, num_blocks)
            stretches = list(pairwise(num_blocks * i // count for i in range(count + 1)))
            share_out(lambda _, *stretch: self._function(*stretch, *arguments), stretches, self.num_threads)
        return output


def choose_num_threads(weights: Sequence[BlockedWeight]) -> None:
    """Let each shape of weight be read by as many threads as pay on this machine, measured now. Mutates them."""
    for shape in {(weight.num_outputs, weight.size) for weight in weights}:
        alike = [weight for weight in weights if (weight.num_outputs, weight.size) == shape]
        probed = alike[: max(_MAX_PROBED_BYTES // alike[0].num_bytes, 1)]
        rows = torch.ones(1, shape[1], dtype=alike[0].dtype)
        best, num_threads = _seconds(probed, rows, 1), 1
        while 2 * num_threads <= min(torch.get_num_threads(), shape[0] // BLOCK):
            seconds = _seconds(probed, rows, 2 * num_threads)
            if seconds * NEEDED_GAIN > best:
                break
            best, num_threads = seconds, 2 * num_threads
        for weight in alike:
            weight.num_threads = num_threads


def _seconds(weights: Sequence[BlockedWeight], rows: Tensor, num_threads: int) -> float:
    """The best of some turns through all of them."""
    best = float("inf")
    for weight in weights:
        weight.num_threads = num_threads
    for _ in range(3):
        started = time.perf_counter()
        for weight in weights:
            weight.multiply(rows)
        best = min(best, time.perf_counter() - started)
    return best
