"""A weight in oneDNN's blocked order, read by a multiplication of our own as far as that is the faster one."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvscope.kernels.choices import remembered
from kvscope.kernels.numba_gemv import multiply_function
from kvscope.kernels.numba_tile import BLOCK
from kvscope.kernels.threads import share_out

FEW_ROWS = 2  # reading the weight is all that matters, and one thread may be as fast as the memory
# Rows to try it with, and how many the answer holds for: of few, reading and waking threads matter; of many,
# arithmetic, for which a processor may have units that only oneDNN knows.
PROBES = ((16, 32), (64, math.inf))
NUM_TURNS = 4  # the best of them counts
MIN_TURNS, MAX_TURNS = 2, 12  # against another function: a no takes longer than a yes, since chance slows down either
NEEDED_GAIN = 1.1  # below, another thread is not worth what it takes from others, nor another function a change
_PROBED_BYTES = 1 << 26  # enough to come from memory, not from a cache; less where arithmetic takes longer

Multiply = Callable[[Tensor], Tensor]


class BlockedWeight:
    """`[out_features, in_features]` at an address that stays valid as long as this is used."""

    def __init__(self, address: int, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None) -> None:
        self.num_outputs, self.size = shape
        self.num_bytes = self.num_outputs * self.size * dtype.itemsize
        self.num_threads = 1  # for few rows
        self.max_rows = math.inf
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
        output = rows.new_empty((*rows.shape[:-1], self.num_outputs))
        num_rows = rows.numel() // self.size
        bias = (0, 0) if self._bias is None else (self._bias.data_ptr(), self.num_outputs)
        inputs = rows.data_ptr(), num_rows, self._address, *bias
        arguments = *inputs, output.data_ptr(), self.size, self.num_outputs
        num_threads = self.num_threads if num_rows <= FEW_ROWS else torch.get_num_threads()
        share_out(self._function, arguments, 2 * self.num_outputs // BLOCK, 2, num_threads)
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
    """Leave many rows to another function of the same product where that is faster here. Mutates the weights.

    So it is where the processor's vectors are too short, or too few, for the sums of a tile, or where it multiplies
    matrices. The answer is kept, since it is one of last bits as well.
    """
    for alike in _by_shape_and_type(list(operators)):
        question = f"rows of {len(alike)} weights {alike[0].num_outputs} x {alike[0].size} in {alike[0].dtype}"
        max_rows = remembered(question, partial(_most_rows, alike, operators))
        for weight in alike:
            weight.max_rows = max_rows


def _most_rows(alike: list[BlockedWeight], operators: Mapping[BlockedWeight, Multiply]) -> float:
    max_rows: float = FEW_ROWS
    for num_rows, holds_for in PROBES:
        rows = torch.ones(1, num_rows, alike[0].size, dtype=alike[0].dtype)
        probed = _probed(alike, _PROBED_BYTES * PROBES[0][0] // num_rows)
        if not as_fast([weight.multiply for weight in probed], [operators[weight] for weight in probed], rows):
            break
        max_rows = holds_for
    return max_rows


def as_fast(ours: Sequence[Multiply], theirs: Sequence[Multiply], rows: Tensor) -> bool:
    """Whether ours are; in turns, so that what else the machine does falls on both."""
    best = other = math.inf
    for turn in range(MAX_TURNS):
        best, other = min(best, seconds(ours, rows)), min(other, seconds(theirs, rows))
        if turn + 1 >= MIN_TURNS and best <= NEEDED_GAIN * other:
            return True
    return False


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


def _probed(alike: list[BlockedWeight], num_bytes: int = _PROBED_BYTES) -> list[BlockedWeight]:
    """So many of one shape, but one at least."""
    return alike[: max(num_bytes // alike[0].num_bytes, 1)]
