"""Rows times a weight in oneDNN's blocked order, compiled: one walk through the weight, front to back.

Of few rows, torch's operators make so little work that they wait for the memory and compute in turns. Here the next
block of weights is asked for while the rows are multiplied by this one, which stays in a core's cache for all of them.

```
float32    [out_features / 64, in_features,     64]       the 64 outputs of a block lie side by side
bfloat16   [out_features / 64, in_features / 2, 64, 2]    in pairs of inputs, which are read as one uint32
```
"""

from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numba import types

from kvscope.kernels.numba_atomics import pointer
from kvscope.kernels.numba_elements import FASTMATH, narrow, wide
from kvscope.kernels.numba_layers import OPTIONS, at
from kvscope.kernels.numba_tile import BLOCK, LINES_AHEAD, MAX_ROWS, multiply_rows

_WORDS_AHEAD = LINES_AHEAD * 16  # per step of `multiply_rows`


@numba.njit(**OPTIONS)
def _multiply_block(block, first_row, last_row, inputs, weight, bias, output, count, num_outputs, sums):
    """`inputs [num_rows, count]` and weight in words, output in elements; rows `first_row:last_row` of them."""
    num_passes = (last_row - first_row + MAX_ROWS - 1) // MAX_ROWS
    start, to, row = block * count * BLOCK, block * BLOCK, first_row
    for number in range(num_passes):
        stop = first_row + (last_row - first_row) * (number + 1) // num_passes
        ahead = start + count * (BLOCK + _WORDS_AHEAD * min(number, 1))
        multiply_rows(stop - row, weight, start, inputs, row * count, count, ahead, sums)
        for i in range(row, stop):
            totals = sums[(i - row) * BLOCK : (i - row + 1) * BLOCK]
            out = output[i * num_outputs + to : i * num_outputs + to + BLOCK]
            if len(bias):
                for j in range(BLOCK):
                    out[j] = narrow(totals[j] + wide(bias[to + j]), out[j])
            else:
                for j in range(BLOCK):
                    out[j] = narrow(totals[j], out[j])
        row = stop


@lru_cache
def multiply_function(bfloat16: bool) -> Any:
    """A compiled function (worker, first, last, address of the arguments): outputs of the half blocks `first:last`.

    Half a block is half of its rows, so that two threads have equal parts of an odd number of blocks. Arguments are
    words, addresses and numbers: rows, number of rows, weight, bias, its length or 0, output, in_features,
    out_features. Rows, bias and output are of one type and contiguous; sums are float32. `in_features` is a multiple
    of 2.
    """
    element, word = (np.uint16, np.uint32) if bfloat16 else (np.float32, np.float32)
    elements_per_word = 2 if bfloat16 else 1

    def multiply(worker, first, last, arguments):
        rows, num_rows, weight, bias, bias_length, output, size, num_outputs = numba.carray(
            pointer(arguments), (8,), np.int64
        )
        inputs, weights, out = at(pointer(rows), word), at(pointer(weight), word), at(pointer(output), element)
        biases, count = numba.carray(pointer(bias), (bias_length,), element), size // elements_per_word
        half, sums = num_rows // 2, np.empty(MAX_ROWS * BLOCK, np.float32)
        for block in range(first // 2, (last + 1) // 2):
            first_row = half if 2 * block < first else 0
            last_row = half if 2 * block + 1 == last else num_rows
            _multiply_block(block, first_row, last_row, inputs, weights, biases, out, count, num_outputs, sums)

    n = types.int64
    return numba.cfunc(types.void(n, n, n, n), cache=True, error_model="numpy", fastmath=FASTMATH)(multiply)
