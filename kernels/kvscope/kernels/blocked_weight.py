"""A weight in oneDNN's blocked order, read by a multiplication of our own where there are few rows."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvscope.kernels.numba_gemv import multiply_function
from kvscope.kernels.numba_tile import BLOCK
from kvscope.kernels.threads import STRETCHES_PER_THREAD, share_out

MAX_ROWS = 32  # with more of them, how the weight is read matters less than arithmetic, in which oneDNN is as good
FEW_ROWS = 2  # reading the weight is all that matters, and one thread may be as fast as the memory
PROBED_ROWS = 16
NUM_TURNS = 4  # the best of them counts
NEEDED_GAIN = 1.1  # below, another thread is not worth what it takes from others, nor another function a change
_MAX_PROBED_BYTES = 1 << 26  # enough to come from memory, not from a cache

Multiply = Callable[[Tensor], Tensor]


class BlockedWeight:
    """`[out_features, in_features]` at an address that stays valid as long as this is used."""

    def __init__(self, address: int, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> None:
        self.num_outputs, self.size = shape
        self.num_bytes = self.num_outputs * self.size * dtype.itemsize
        self.num_threads = 1  # for few rows
        self.max_rows = MAX_ROWS
        self.dtype = dtype
        self._address, self._bias = address, bias
        self._function = multiply_function(dtype == torch.bfloat16)

    @staticmethod
    def may_be(shape: tuple[int, int], dtype: torch.dtype) -> bool:
        """Whether a weight like this can lie in whole blocks."""
        return dtype in (torch.float32, torch.bfloat16) and shape[0] % BLOCK == 0 and shape[1] % 16 == 0

    def takes(self, rows: Tensor) -> bool:
        """Whether these rows are not too many, and such as `multiply` expects."""
        return 0 < rows.numel() <= self.max_rows * self.size and rows.is_contiguous() and rows.dtype == self.dtype

    def multiply(self, rows: Tensor) -> Tensor:
        """`[..., in_features]`, contiguous -> `[..., out_features]`."""
        output = torch.empty((*rows.shape[:-1], self.num_outputs), dtype=rows.dtype)
        num_rows = rows.numel() // self.size
        bias = (0, 0) if self._bias is None else (self._bias.data_ptr(), self.num_outputs)
        inputs = rows.data_ptr(), num_rows, self._address, *bias
        arguments = *inputs, output.data_ptr(), self.size, self.num_outputs
        num_blocks = self.num_outputs // BLOCK
        num_threads = self.num_threads if num_rows <= FEW_ROWS else min(torch.get_num_threads(), num_blocks)
        if num_threads == 1:
            self._function(0, num_blocks, *arguments)
        else:
            count = min(STRETCHES_PER_THREAD * num_threads, num_blocks)
            stretches = list(pairwise(num_blocks * i // count for i in range(count + 1)))
            share_out(lambda _, *stretch: self._function(*stretch, *arguments), stretches, num_threads)
        return output


def choose_num_threads(weights: Sequence[BlockedWeight]) -> None:
    """Let each shape of weight be read by as many threads as pay on this machine for few rows. Mutates them."""
    for alike in _by_shape_and_type(weights):
        rows = torch.ones(1, alike[0].size, dtype=alike[0].dtype)
        best, num_threads = _best_seconds(_probed(alike), rows, 1), 1
        while 2 * num_threads <= min(torch.get_num_threads(), alike[0].num_outputs // BLOCK):
            found = _best_seconds(_probed(alike), rows, 2 * num_threads)
            if found * NEEDED_GAIN > best:
                break
            best, num_threads = found, 2 * num_threads
        for weight in alike:
            weight.num_threads = num_threads


def choose_max_rows(operators: Mapping[BlockedWeight, Multiply]) -> None:
    """Leave all but few rows to another function of the same product where that is faster here. Mutates the weights.

    So it is where the processor's vectors are too short, or too few, for the sums of a tile. Both take turns, so that
    what else the machine does falls on both.
    """
    for alike in _by_shape_and_type(list(operators)):
        rows = torch.ones(1, PROBED_ROWS, alike[0].size, dtype=alike[0].dtype)
        probed = _probed(alike)
        own = theirs = float("inf")
        for _ in range(NUM_TURNS):
            own = min(own, seconds([weight.multiply for weight in probed], rows))
            theirs = min(theirs, seconds([operators[weight] for weight in probed], rows))
        for weight in alike:
            weight.max_rows = MAX_ROWS if own <= NEEDED_GAIN * theirs else FEW_ROWS


def seconds(functions: Sequence[Multiply], rows: Tensor) -> float:
    """One turn through all of them."""
    started = time.perf_counter()
    for function in functions:
        function(rows)
    return time.perf_counter() - started


def _best_seconds(weights: Sequence[BlockedWeight], rows: Tensor, num_threads: int) -> float:
    for weight in weights:
        weight.num_threads = num_threads
    return min(seconds([weight.multiply for weight in weights], rows) for _ in range(NUM_TURNS))


def _by_shape_and_type(weights: Sequence[BlockedWeight]) -> list[list[BlockedWeight]]:
    shapes: dict[tuple[int, int, torch.dtype], list[BlockedWeight]] = {}
    for weight in weights:
        shapes.setdefault((weight.num_outputs, weight.size, weight.dtype), []).append(weight)
    return list(shapes.values())


def _probed(alike: list[BlockedWeight]) -> list[BlockedWeight]:
    """So many of one shape that they come from memory."""
    return alike[: max(_MAX_PROBED_BYTES // alike[0].num_bytes, 1)]
