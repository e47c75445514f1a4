"""A few rows times a weight in oneDNN's blocked order, compiled: one walk through the weight, front to back.

Of one row, torch's operators make so little work that they read a weight at half the speed of the memory, or less.

```
float32    [out_features / 64, in_features,     64]       the 64 outputs of a block lie side by side
bfloat16   [out_features / 64, in_features / 2, 64, 2]    in pairs of inputs, which are read as one uint32
```
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from kvscope.kernels.numba_layers import OPTIONS, at, compiled, narrow, wide

BLOCK = 64  # outputs that lie side by side
UNROLLED = 4  # inputs that are added at a time: their sum is loaded and stored once


def _add(totals: Any, weight: Any, start: Any, x: Any) -> None:
    """Add four inputs `x`, times their weights from `start` on, to a block's totals."""
    raise NotImplementedError


@overload(_add, strict=False, jit_options={"fastmath": OPTIONS["fastmath"]})
def _add_for(totals: Any, weight: Any, start: Any, x: Any) -> Callable[..., None]:
    if weight.dtype == types.float32:

        def add_float32(totals: Any, weight: Any, start: Any, x: Any) -> None:
            w0, w1 = weight[start : start + BLOCK], weight[start + BLOCK : start + 2 * BLOCK]
            w2, w3 = weight[start + 2 * BLOCK : start + 3 * BLOCK], weight[start + 3 * BLOCK : start + 4 * BLOCK]
            for i in range(BLOCK):
                totals[i] += w0[i] * x[0] + w1[i] * x[1] + w2[i] * x[2] + w3[i] * x[3]

        return add_float32

    def add_bfloat16(totals: Any, weight: Any, start: Any, x: Any) -> None:
        low, high = weight[start : start + BLOCK], weight[start + BLOCK : start + 2 * BLOCK]
        shift, mask = np.uint32(16), np.uint32(0xFFFF0000)
        for i in range(BLOCK):
            w0, w1 = np.uint32(low[i] << shift).view(np.float32), np.uint32(low[i] & mask).view(np.float32)
            w2, w3 = np.uint32(high[i] << shift).view(np.float32), np.uint32(high[i] & mask).view(np.float32)
            totals[i] += w0 * x[0] + w1 * x[1] + w2 * x[2] + w3 * x[3]

    return add_bfloat16


@numba.njit(**OPTIONS)
def _multiply(first, last, rows, num_rows, weight, words_per_input, bias, output, size, num_outputs):
    totals = np.empty((num_rows, BLOCK), np.float32)
    for block in range(first, last):
        for row in range(num_rows):
            for i in range(BLOCK):
                totals[row, i] = wide(bias[block * BLOCK + i]) if len(bias) else np.float32(0)
        for k in range(0, size, UNROLLED):
            start = (block * size + k) * words_per_input
            for row in range(num_rows):
                to = row * size + k
                x = wide(rows[to]), wide(rows[to + 1]), wide(rows[to + 2]), wide(rows[to + 3])
                _add(totals[row], weight, start, x)
        for row in range(num_rows):
            out = output[row * num_outputs + block * BLOCK : row * num_outputs + (block + 1) * BLOCK]
            for i in range(BLOCK):
                out[i] = narrow(totals[row, i], rows[0])


@lru_cache
def multiply_function(bfloat16: bool) -> Callable[..., None]:
    """(first, last, rows, number of rows, weight, bias, its length or 0, output, in_features, out_features), addresses
    and numbers: outputs of the blocks `first:last`. Compiled when first asked for, and kept on disk.

    Rows, bias and output are of one type and contiguous; sums are float32. `in_features` is a multiple of 4.
    """
    element, word = (np.uint16, np.uint32) if bfloat16 else (np.float32, np.float32)
    words = BLOCK // 2 if bfloat16 else BLOCK

    def multiply(first, last, rows, num_rows, weight, bias, bias_length, output, size, num_outputs):
        biases = numba.carray(bias, (bias_length,), element)
        _multiply(
            first,
            last,
            at(rows, element),
            num_rows,
            at(weight, word),
            words,
            biases,
            at(output, element),
            size,
            num_outputs,
        )

    n, a = types.int64, types.voidptr
    return compiled(multiply, n, n, a, n, a, a, n, a, n, n)
