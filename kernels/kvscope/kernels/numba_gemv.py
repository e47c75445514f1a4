"""Some rows times a weight in oneDNN's blocked order, compiled: one walk through the weight, front to back.

Of so few rows, torch's operators make so little work that they wait for the memory and compute in turns. Here the next
block of weights is asked for while the rows are multiplied by this one.

```
float32    [out_features / 64, in_features,     64]       the 64 outputs of a block lie side by side
bfloat16   [out_features / 64, in_features / 2, 64, 2]    in pairs of inputs, which are read as one uint32
```
"""

from collections.abc import Callable
from functools import lru_cache

import numba
import numpy as np
from numba import types

from kvscope.kernels.numba_elements import narrow, wide
from kvscope.kernels.numba_layers import OPTIONS, at, compiled
from kvscope.kernels.numba_tile import BLOCK, LINES_AHEAD, MAX_ROWS, multiply_rows

_WORDS_AHEAD = LINES_AHEAD * 16  # per step of `multiply_rows`


@numba.njit(**OPTIONS)
def _multiply(first, last, inputs, num_rows, weight, bias, output, count, num_outputs):
    """`inputs [num_rows, count]` and weight in words, output in elements."""
    sums = np.empty(MAX_ROWS * BLOCK, np.float32)
    num_passes = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    for block in range(first, last):
        start, to, row = block * count * BLOCK, block * BLOCK, 0
        for number in range(num_passes):
            stop = num_rows * (number + 1) // num_passes
            ahead = start + count * (BLOCK + _WORDS_AHEAD * number)
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
def multiply_function(bfloat16: bool) -> Callable[..., None]:
    """(first, last, rows, number of rows, weight, bias, its length or 0, output, in_features, out_features), addresses
    and numbers: outputs of the blocks `first:last`. Compiled when first asked for, and kept on disk.

    Rows, bias and output are of one type and contiguous; sums are float32. `in_features` is a multiple of 2.
    """
    element, word = (np.uint16, np.uint32) if bfloat16 else (np.float32, np.float32)
    elements_per_word = 2 if bfloat16 else 1

    def multiply(first, last, rows, num_rows, weight, bias, bias_length, output, size, num_outputs):
        inputs, weights, biases = at(rows, word), at(weight, word), numba.carray(bias, (bias_length,), element)
        count = size // elements_per_word
        _multiply(first, last, inputs, num_rows, weights, biases, at(output, element), count, num_outputs)

    n, a = types.int64, types.voidptr
    return compiled(multiply, n, n, a, n, a, a, n, a, n, n)
