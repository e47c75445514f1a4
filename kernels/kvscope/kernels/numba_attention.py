"""Paged attention compiled for the CPU: K and V are read where they lie, through the block table.

A kernel is compiled per head sizes, query heads per KV head and cache dtype: with these as constants the compiler keeps
the loops over a head in vector registers. It works off tiles (a few query tokens of one sequence and one KV head): all
query heads of the KV head share each load of K and V (in place as in PagedAttention, SOSP'23).
Scores of a tile stay in a scratch buffer, so that the softmax is the plain two-pass one. Blocks of 16 or 8 bits are
widened to float32 once per tile. What lies outside a query's visible positions is not read at all. Blocks lie anywhere,
so that no processor guesses the next one: it is asked for while the one before is worked off.
"""

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numba.extending import overload
from platformdirs import user_cache_path

from kvscope.kernels.numba_prefetch import ask_for

if not os.environ.get("NUMBA_CACHE_DIR"):
    # Not beside the source, which may be shared or read-only.
    numba.config.CACHE_DIR = str(user_cache_path("kvscope") / "numba")

AHEAD_BYTES = 8192  # how far before its use a block is asked for, one KV head's part of each block counted
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered; NaN and infinities keep their meaning


@numba.njit(inline="never", cache=True)  # not part of what may be reordered: the remainder below must be exact
def exp(x: Any) -> Any:
    """exp of a float32 <= 0 to about 1 ulp, as 2^n * p(r) without branches, so that loops over it vectorise."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)  # ln 2 in two parts
    p = np.float32(1 / 5040)
    for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = p * r + np.float32(c)
    return p * np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


def _widened(row: Any, buffer: Any) -> Any:
    """A block's elements as float32: `row` itself, or its copy in `buffer`.

    uint16 is bfloat16, int16 is float16, uint8 is float8_e4m3fn.
    """
    raise NotImplementedError


@overload(_widened, strict=False)
def _widened_for(row: Any, buffer: Any) -> Callable[..., Any]:
    if row.dtype == numba.types.float32:
        return lambda row, buffer: row
    if row.dtype == numba.types.uint16:

        def from_bfloat16(row: Any, buffer: Any) -> Any:
            for i in range(len(row)):
                buffer[i] = np.uint32(np.uint32(row[i]) << np.uint32(16)).view(np.float32)
            return buffer

        return from_bfloat16

    if row.dtype == numba.types.uint8:

        def from_float8(row: Any, buffer: Any) -> Any:
            for i in range(len(row)):
                bits = np.uint32(row[i])
                # As below, for 4 bits of exponent and 3 of fraction; the largest magnitude stands for NaN.
                magnitude = np.uint32((bits & np.uint32(0x7F)) << np.uint32(20)).view(np.float32) * np.float32(2.0**120)
                if (bits & np.uint32(0x7F)) == np.uint32(0x7F):
                    magnitude = np.float32(np.nan)
                buffer[i] = -magnitude if bits & np.uint32(0x80) else magnitude
            return buffer

        return from_float8

    def from_float16(row: Any, buffer: Any) -> Any:
        for i in range(len(row)):
            bits = np.uint32(np.uint16(row[i]))
            # Exponent and fraction moved to where float32 has them; the factor mends the bias, subnormals included.
            magnitude = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
            buffer[i] = -magnitude if bits & np.uint32(0x8000) else magnitude
        return buffer

    return from_float16


@numba.njit(inline="always")
def _add_four(out, weights, at, v, start, size):
    """Add four rows of `size` values, times their weights, to `out`, which so is loaded and stored once."""
    w0, w1, w2, w3 = weights[at], weights[at + 1], weights[at + 2], weights[at + 3]
    rows = v[start : start + 4 * size]
    for d in range(size):
        out[d] += w0 * rows[d] + w1 * rows[size + d] + w2 * rows[2 * size + d] + w3 * rows[3 * size + d]


@lru_cache(maxsize=64)
def attention_kernel(head_size: int, value_size: int, group_size: int) -> Any:
    """The kernel for these sizes; compiled at its first call per cache dtype, and kept on disk.

    It works off `tiles[first:last]`, rows of (first token, number of queries, position of the first, sequence, KV
    head), and writes `output [num_tokens, num_query_heads, value_size]`, float32 like `query`. A cache comes as
    `[num_rows, block_size * head_size]`, one row per block and head. `window` 0 and `soft_cap` 0 mean none. `scores`
    is scratch of `max_queries * group_size` rows, `buffer` of one block, both the calling thread's own.
    """

    @numba.njit(nogil=True, fastmath=FASTMATH, cache=True, error_model="numpy")
    def kernel(
        query, keys, values, tables, tiles, first, last, strides, scale, window, soft_cap, scores, buffer, output
    ):
        block_size, rows_per_block, rows_per_head = strides
        distance = max(AHEAD_BYTES // (block_size * head_size * keys.itemsize), 1)
        for tile in range(first, last):
            token, num_queries, position, sequence, head = tiles[tile]
            table = tables[sequence]
            head_row = head * rows_per_head
            first_head = head * group_size
            start = max(position - window + 1, 0) if window > 0 else 0
            end = position + num_queries
            first_block, end_block = start // block_size, (end - 1) // block_size + 1
            for block in range(first_block, end_block):
                base = block * block_size
                k = _widened(keys[np.int64(table[block]) * rows_per_block + head_row], buffer)
                following = block + distance
                if following < end_block:
                    ahead = keys[np.int64(table[following]) * rows_per_block + head_row]
                else:  # the values are next
                    following = min(following - end_block + first_block, end_block - 1)
                    ahead = values[np.int64(table[following]) * rows_per_block + head_row]
                for j in range(num_queries):
                    seen = max(position + j - window + 1, 0) if window > 0 else 0
                    for t in range(max(seen - base, 0), min(block_size, position + j + 1 - base)):
                        if j == 0:
                            ask_for(ahead, t * head_size, (t + 1) * head_size)
                        key = k[t * head_size : (t + 1) * head_size]
                        for g in range(group_size):
                            q = query[token + j, first_head + g]
                            total = np.float32(0)
                            for d in range(head_size):
                                total += q[d] * key[d]
                            scores[j * group_size + g, base + t - start] = total * scale
            for j in range(num_queries):
                low = (max(position + j - window + 1, 0) if window > 0 else 0) - start
                high = position + j + 1 - start
                for g in range(group_size):
                    row = scores[j * group_size + g, low:high]
                    if soft_cap > 0:
                        for i in range(len(row)):
                            row[i] = soft_cap * np.float32(np.tanh(row[i] / soft_cap))
                    largest = row[0]
                    for i in range(len(row)):
                        largest = max(largest, row[i])
                    total = np.float32(0)
                    for i in range(len(row)):
                        row[i] = exp(row[i] - largest)
                        total += row[i]
                    inverse = np.float32(1) / total
                    for i in range(len(row)):
                        row[i] *= inverse
                    output[token + j, first_head + g] = np.float32(0)
            for block in range(first_block, end_block):
                base = block * block_size
                v = _widened(values[np.int64(table[block]) * rows_per_block + head_row], buffer)
                following = min(block + distance, end_block - 1)
                ahead = values[np.int64(table[following]) * rows_per_block + head_row]
                for j in range(num_queries):
                    seen = max(position + j - window + 1, 0) if window > 0 else 0
                    t, high = max(seen - base, 0), min(block_size, position + j + 1 - base)
                    while t + 4 <= high:
                        if j == 0:
                            ask_for(ahead, t * value_size, (t + 4) * value_size)
                        for g in range(group_size):
                            row = j * group_size + g
                            out = output[token + j, first_head + g]
                            _add_four(out, scores[row], base + t - start, v, t * value_size, value_size)
                        t += 4
                    while t < high:
                        for g in range(group_size):
                            weight = scores[j * group_size + g, base + t - start]
                            out = output[token + j, first_head + g]
                            for d in range(value_size):
                                out[d] += weight * v[t * value_size + d]
                        t += 1

    return kernel
