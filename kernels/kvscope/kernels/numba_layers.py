"""The small operations between a model's multiplications, each as one compiled pass over its rows.

torch's eager operators write each result to memory for the next to read. And after a layer's weights have gone through
the core's cache, the code of six operators has to be fetched again, which takes longer than what they do for one row.

Elements are float32, or bfloat16 handed over as uint16: widened in registers, and rounded to the nearest wherever the
eager operators would have rounded, so that results are theirs but for the order of a sum. Rows are contiguous; where
they may lie apart, the number of elements from one to the next is given.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from kvscope.kernels.numba_atomics import pointer
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
def _silu_row(gates, ups, out):
    """Alone, the loop becomes better vectors than inside another."""
    one = np.float32(1)
    for i in range(len(out)):
        x = wide(gates[i])
        e = exp(-abs(x))
        activated = x * ((one if x >= 0 else e) / (one + e))
        out[i] = narrow(rounded(activated, gates[i]) * wide(ups[i]), gates[i])


@numba.njit(**OPTIONS)
def _silu_and_multiply(first, last, gate, gate_stride, up, up_stride, output, size):
    for row in range(first, last):
        gates, ups = gate[row * gate_stride : row * gate_stride + size], up[row * up_stride : row * up_stride + size]
        _silu_row(gates, ups, output[row * size : (row + 1) * size])


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


@numba.njit(**OPTIONS)
def _add(first, last, left, right, output, size):
    """Over slices: an index that may be negative, as far as a compiler knows, keeps the loop from becoming vectors."""
    start, stop = first * size, last * size
    lefts, rights, sums = left[start:stop], right[start:stop], output[start:stop]
    for i in range(len(sums)):
        sums[i] = narrow(wide(lefts[i]) + wide(rights[i]), lefts[i])


@numba.njit
def at(address, element):
    return numba.carray(address, (_ENDLESS,), element)


@numba.njit
def words(address, count):
    """The arguments of a compiled function."""
    return numba.carray(pointer(address), (count,), np.int64)


@numba.njit
def real(word):
    """What `as_word` was given."""
    return np.uint32(word).view(np.float32)


@lru_cache
def as_word(x: float) -> int:
    """A float32 among a compiled function's arguments."""
    return int(np.float32(x).view(np.uint32))


class LayerFunctions(NamedTuple):
    """Compiled functions of (worker, first, last, address of the arguments), for one type of element.

    Arguments are words: addresses, numbers, and float32 as their bits. They hold no lock of Python's.
    """

    rms_norm: Any
    """x, weight, output, size, epsilon, offset: rows to a mean square of 1, times `offset + weight`.

    Without an offset a row is rounded before it is multiplied, with one only afterwards, as the models do.
    """
    silu_and_multiply: Any
    """gate, row stride, up, row stride, output, size: `silu(gate) * up`, by rows."""
    rotate: Any
    """x, token stride, head stride, cosines, sines, output, number of heads, half the size: by tokens.

    Rotary positions: i of each head of `x [num_tokens, num_heads, size]` paired with i + half; angles `[num_tokens,
    size]`.
    """
    write_slots: Any
    """Twice (new, token stride, head stride, cache, block stride, head stride, size), then slots, block size, heads.

    `new [num_tokens, num_kv_heads, size]` to `slots [num_tokens]` of a cache: K and V.
    """
    add: Any
    """left, right, output, size: `left + right`, by rows."""


@lru_cache
def layer_functions(bfloat16: bool) -> LayerFunctions:
    """The functions for bfloat16, or for float32; compiled when first asked for, and kept on disk.

    What they close over is part of the name they are found by: a type has the same one in every process, a compiled
    function has not.
    """
    element = np.uint16 if bfloat16 else np.float32

    def rms_norm(worker, first, last, arguments):
        x, weight, output, size, epsilon, offset = words(arguments, 6)
        x, weight, output = at(pointer(x), element), at(pointer(weight), element), at(pointer(output), element)
        _rms_norm(first, last, x, weight, output, size, real(epsilon), real(offset))

    def silu_and_multiply(worker, first, last, arguments):
        gate, by_gate, up, by_up, output, size = words(arguments, 6)
        gate, up, output = at(pointer(gate), element), at(pointer(up), element), at(pointer(output), element)
        _silu_and_multiply(first, last, gate, by_gate, up, by_up, output, size)

    def rotate(worker, first, last, arguments):
        x, by_token, by_head, cosines, sines, output, heads, half = words(arguments, 8)
        x, output = at(pointer(x), element), at(pointer(output), element)
        cosines, sines = at(pointer(cosines), element), at(pointer(sines), element)
        _rotate(first, last, x, (by_token, by_head), cosines, sines, output, heads, half)

    def write_slots(worker, first, last, arguments):
        numbers = words(arguments, 17)
        slots, block_size, heads = at(pointer(numbers[14]), np.int64), numbers[15], numbers[16]
        for i in (0, 7):
            new, by_token, by_head, cache, by_block, by_kv_head, size = numbers[i : i + 7]
            new, cache = at(pointer(new), element), at(pointer(cache), element)
            shape = (block_size, heads, size)
            _write_slots(first, last, new, (by_token, by_head), cache, (by_block, by_kv_head), slots, shape)

    def add(worker, first, last, arguments):
        left, right, output, size = words(arguments, 4)
        _add(first, last, at(pointer(left), element), at(pointer(right), element), at(pointer(output), element), size)

    return LayerFunctions(*map(compiled, (rms_norm, silu_and_multiply, rotate, write_slots, add)))


def compiled(function: Any) -> Any:
    """A function of (worker, first, last, address of the arguments) as machine code."""
    n = types.int64
    return numba.cfunc(types.void(n, n, n, n), cache=True, error_model="numpy", fastmath=FASTMATH)(function)
