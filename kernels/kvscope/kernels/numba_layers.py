"""The small operations between a model's multiplications, each as one compiled pass over its rows.

torch's eager operators write each result to memory for the next to read. And after a layer's weights have gone through
the core's cache, the code of six operators has to be fetched again, which takes longer than what they do for one row.

Elements are float32, or bfloat16 handed over as uint16: widened in registers, and rounded to the nearest wherever the
eager operators would have rounded, so that results are theirs but for the order of a sum. Rows are contiguous; where
they may lie apart, the number of elements from one to the next is given.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from kvscope.kernels.numba_elements import FASTMATH, exp, narrow, rounded, wide

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": FASTMATH}
_ENDLESS = 1 << 60  # nothing is looked up by length; a slice is made with both of its ends


@numba.njit(**OPTIONS)
def _rms_norm(first, last, x, weight, output, size, epsilon, offset):
    for row in range(first, last):
        values, out = x[row * size : (row + 1) * size], output[row * size : (row + 1) * size]
        total = np.float32(0)
        for i in range(size):
            value = wide(values[i])
            total += value * value
        scale = np.float32(1) / np.float32(np.sqrt(total / np.float32(size) + epsilon))
        if offset == 0:
            for i in range(size):
                out[i] = narrow(wide(weight[i]) * rounded(wide(values[i]) * scale, values[0]), values[0])
        else:
            for i in range(size):
                out[i] = narrow(wide(values[i]) * scale * (offset + wide(weight[i])), values[0])


@numba.njit(**OPTIONS)
def _silu_and_multiply(first, last, gate, gate_stride, up, up_stride, output, size):
    one = np.float32(1)
    for row in range(first, last):
        gates, ups = gate[row * gate_stride : row * gate_stride + size], up[row * up_stride : row * up_stride + size]
        out = output[row * size : (row + 1) * size]
        for i in range(size):
            x = wide(gates[i])
            e = exp(-abs(x))
            activated = x * ((one if x >= 0 else e) / (one + e))
            out[i] = narrow(rounded(activated, gates[0]) * wide(ups[i]), gates[0])


@numba.njit(**OPTIONS)
def _rotate(first, last, x, x_strides, cosines, sines, output, num_heads, half):
    size = 2 * half
    for token in range(first, last):
        c, s = cosines[token * size : (token + 1) * size], sines[token * size : (token + 1) * size]
        for head in range(num_heads):
            start, to = token * x_strides[0] + head * x_strides[1], (token * num_heads + head) * size
            left, right = x[start : start + half], x[start + half : start + size]
            out_left, out_right = output[to : to + half], output[to + half : to + size]
            for i in range(half):
                a, b, like = wide(left[i]), wide(right[i]), left[0]
                out_left[i] = narrow(rounded(a * wide(c[i]), like) - rounded(b * wide(s[i]), like), like)
            for i in range(half):
                a, b, like = wide(left[i]), wide(right[i]), left[0]
                turned = rounded(a * wide(s[half + i]), like)
                out_right[i] = narrow(rounded(b * wide(c[half + i]), like) + turned, like)


@numba.njit(**OPTIONS)
def _write_slots(first, last, new, new_strides, cache, cache_strides, slots, shape):
    block_size, num_heads, size = shape
    for token in range(first, last):
        block, slot = slots[token] // block_size, slots[token] % block_size
        for head in range(num_heads):
            start = token * new_strides[0] + head * new_strides[1]
            to = block * cache_strides[0] + head * cache_strides[1] + slot * size
            values, out = new[start : start + size], cache[to : to + size]
            for i in range(size):
                out[i] = values[i]


@numba.njit
def at(address, element):
    return numba.carray(address, (_ENDLESS,), element)


class LayerFunctions(NamedTuple):
    """Functions of addresses and numbers, for one type of element. They hold no lock of Python's.

    Called through ctypes: numba's own dispatch of tensors takes longer than most of these take to run.
    """

    rms_norm: Callable[..., None]
    """(first, last, x, weight, output, size, epsilon, offset): rows to a mean square of 1, times `offset + weight`.

    Without an offset a row is rounded before it is multiplied, with one only afterwards, as the models do.
    """
    silu_and_multiply: Callable[..., None]
    """(first, last, gate, row stride, up, row stride, output, size): `silu(gate) * up`."""
    rotate: Callable[..., None]
    """(first, last, x, token stride, head stride, cosines, sines, output, number of heads, half the size)

    Rotary positions: i of each head of `x [num_tokens, num_heads, size]` paired with i + half; angles `[num_tokens,
    size]`.
    """
    write_slots: Callable[..., None]
    """(first, last, new, token stride, head stride, cache, block stride, head stride, slots, block size, heads, size)

    `new [num_tokens, num_kv_heads, size]` to `slots [num_tokens]` of a cache.
    """


@lru_cache
def layer_functions(bfloat16: bool) -> LayerFunctions:
    """The functions for bfloat16, or for float32; compiled when first asked for, and kept on disk.

    What they close over is part of the name they are found by: a type has the same one in every process, a compiled
    function has not.
    """
    element = np.uint16 if bfloat16 else np.float32

    def rms_norm(first, last, x, weight, output, size, epsilon, offset):
        _rms_norm(first, last, at(x, element), at(weight, element), at(output, element), size, epsilon, offset)

    def silu_and_multiply(first, last, gate, gate_stride, up, up_stride, output, size):
        _silu_and_multiply(
            first, last, at(gate, element), gate_stride, at(up, element), up_stride, at(output, element), size
        )

    def rotate(first, last, x, by_token, by_head, cosines, sines, output, heads, half):
        _rotate(
            first,
            last,
            at(x, element),
            (by_token, by_head),
            at(cosines, element),
            at(sines, element),
            at(output, element),
            heads,
            half,
        )

    def write_slots(first, last, new, by_token, by_head, cache, by_block, by_kv_head, slots, block_size, heads, size):
        numbers = numba.carray(slots, (_ENDLESS,), np.int64)
        shape = (block_size, heads, size)
        _write_slots(
            first,
            last,
            at(new, element),
            (by_token, by_head),
            at(cache, element),
            (by_block, by_kv_head),
            numbers,
            shape,
        )

    n, a, r = types.int64, types.voidptr, types.float32  # number, address, real
    return LayerFunctions(
        compiled(rms_norm, n, n, a, a, a, n, r, r),
        compiled(silu_and_multiply, n, n, a, n, a, n, a, n),
        compiled(rotate, n, n, a, n, n, a, a, a, n, n),
        compiled(write_slots, n, n, a, n, n, a, n, n, a, n, n, n),
    )


def compiled(function: Callable[..., None], *arguments: Any) -> Callable[..., None]:
    """A function of these types of arguments as machine code behind ctypes."""
    decorate = numba.cfunc(types.void(*arguments), cache=True, error_model="numpy", fastmath=FASTMATH)
    return decorate(function).ctypes  # type: ignore[no-any-return]
