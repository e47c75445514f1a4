"""Paged attention compiled for the CPU: K and V are read where they lie, through the block table.

A kernel is compiled per head sizes, query heads per KV head and dtypes: with these as constants the loops over a head
are vectors in registers (`numba_rows`). It works off tiles (a few query tokens of one sequence and one KV head): all
query heads of the KV head share each load of K and V (in place as in PagedAttention, SOSP'23).
Scores of a tile stay in a scratch buffer, so that the softmax is the plain two-pass one. bfloat16 is widened as it is
loaded, blocks of float16 and 8 bits once per tile. What lies outside a query's visible positions is not read at all.
Blocks lie anywhere, so that no processor guesses the next one: it is asked for while the one before is worked off.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import overload, register_jitable

from kvscope.kernels.numba_atomics import pointer
from kvscope.kernels.numba_elements import exp, narrow, wide
from kvscope.kernels.numba_layers import OPTIONS, compiled, real, words
from kvscope.kernels.numba_prefetch import ask_for
from kvscope.kernels.numba_rows import KEYS, add_values, rows_at_once, score_key, score_keys

_MANY = 1 << 40  # of what is looked up by number, and never by length
AHEAD_BYTES = 8192  # how far before its use a block is asked for, one KV head's part of each block counted


def _widened(row: Any, buffer: Any) -> Any:
    """A block's elements as the inner loops take them: `row` itself, float32 or bfloat16, or its copy in `buffer`.

    int16 is float16, uint8 is float8_e4m3fn.
    """
    raise NotImplementedError


@overload(_widened, strict=False)
def _widened_for(row: Any, buffer: Any) -> Callable[..., Any]:
    if row.dtype in (numba.types.float32, numba.types.uint16):
        return lambda row, buffer: row
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


@numba.njit(**OPTIONS)
def _exponentials(row, largest):
    """Of the differences to the largest, in place; their sum. Alone, the loop becomes vectors; inside others, not."""
    total = np.float32(0)
    for i in range(len(row)):
        x = exp(row[i] - largest)
        row[i] = x
        total += x
    return total


@register_jitable
def scratch_elements(block_elements, num_rows, row_size, most):
    """Of one thread, in float32: a widened block, queries and outputs, and scores; whole cache lines."""
    return (block_elements + num_rows * (row_size + most) + 15) // 16 * 16


class AttentionArguments(NamedTuple):
    """What a function of `attention_function` is told, each a word."""

    query: int
    """Addresses: query `[num_tokens, num_query_heads, head_size]`."""
    keys: int
    values: int
    """Caches as `[num_rows, block_size * head_size]`, one row per block and head."""
    block_tables: int
    context_lengths: int
    """int32 `[num_seqs, table_size]` and `[num_seqs]`."""
    tiles: int
    """int64 `[num_tiles, 5]`: first token, number of queries, how far before the end of the context the first is,
    sequence, KV head."""
    output: int
    """`[num_tokens, num_query_heads, value_size]`."""
    num_query_heads: int
    table_size: int
    block_size: int
    rows_per_block: int
    rows_per_head: int
    """See `CacheLayout`."""
    scale: int
    window: int
    soft_cap: int
    """The first and the last float32, see `as_word`; 0: none."""
    scratch: int
    """Address of `scratch_elements` for each thread."""
    num_rows: int
    max_context_length: int
    """Of a tile's query heads, and of positions: at most."""


@lru_cache(maxsize=64)
def attention_function(head_size: int, value_size: int, group_size: int, stored: Any, computed: Any) -> Any:
    """A compiled function of (worker, first, last, address of the arguments): tiles `first:last`.

    K and V come as elements of numpy's type `stored`, query and output as `computed`: see `_widened` and `wide`.
    Compiled when first asked for, and kept on disk. The arguments are `AttentionArguments`, in their order.
    """
    scored, added = rows_at_once(head_size, group_size), rows_at_once(value_size, group_size)
    row_size, in_sixteens = head_size + value_size, head_size % 16 == 0

    def attend(worker, first, last, arguments):
        (
            query_at, keys_at, values_at, tables_at, contexts_at, tiles_at, output_at, num_heads, table_size,
            block_size, rows_per_block, rows_per_head, scale_bits, window, cap_bits, scratch_at, num_rows, most,
        ) = words(arguments, 18)  # fmt: skip
        query = numba.carray(pointer(query_at), (_MANY, num_heads, head_size), computed)
        output = numba.carray(pointer(output_at), (_MANY, num_heads, value_size), computed)
        keys = numba.carray(pointer(keys_at), (_MANY, block_size * head_size), stored)
        values = numba.carray(pointer(values_at), (_MANY, block_size * value_size), stored)
        tables = numba.carray(pointer(tables_at), (_MANY, table_size), np.int32)
        contexts = numba.carray(pointer(contexts_at), (_MANY,), np.int32)
        tiles = numba.carray(pointer(tiles_at), (_MANY, 5), np.int64)
        block_elements = block_size * max(head_size, value_size)
        mine = scratch_at + 4 * worker * scratch_elements(block_elements, num_rows, row_size, most)
        buffer = numba.carray(pointer(mine), (block_elements,), np.float32)
        rows = numba.carray(pointer(mine + 4 * block_elements), (num_rows, row_size), np.float32)
        scores_at = mine + 4 * (block_elements + num_rows * row_size)
        scores = numba.carray(pointer(scores_at), (num_rows, most), np.float32)
        scale, soft_cap = real(scale_bits), real(cap_bits)
        distance = max(AHEAD_BYTES // (block_size * head_size * keys.itemsize), 1)
        for tile in range(first, last):
            token, num_queries, back, sequence, head = tiles[tile]
            position = np.int64(contexts[sequence]) - back
            table = tables[sequence]
            head_row = head * rows_per_head
            first_head = head * group_size
            start = max(position - window + 1, 0) if window > 0 else 0
            end = position + num_queries
            for j in range(num_queries):
                for g in range(group_size):
                    row = rows[j * group_size + g]
                    for d in range(head_size):
                        row[d] = wide(query[token + j, first_head + g, d])
                    row[head_size:] = np.float32(0)
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
                    t, high = max(seen - base, 0), min(block_size, position + j + 1 - base)
                    while in_sixteens and t + KEYS <= high:
                        for g in range(group_size):
                            if j == 0:
                                asked, until = t + KEYS * g // group_size, t + KEYS * (g + 1) // group_size
                                ask_for(ahead, asked * head_size, until * head_size)
                            row = j * group_size + g
                            score_keys(
                                head_size, k, t * head_size, rows, row * row_size, query,
                                ((token + j) * num_heads + first_head + g) * head_size, scale,
                                scores, row * most + base + t - start,
                            )  # fmt: skip
                        t += KEYS
                    while t < high:
                        if j == 0:
                            ask_for(ahead, t * head_size, (t + 1) * head_size)
                        for g in range(0, group_size, scored):
                            row = j * group_size + g
                            score_key(
                                head_size, scored, k, t * head_size, rows, row * row_size, row_size, scale,
                                scores, row * most + base + t - start, most,
                            )  # fmt: skip
                        t += 1
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
                    total = _exponentials(row, largest)
                    inverse = np.float32(1) / total
                    for i in range(len(row)):
                        row[i] *= inverse
            for block in range(first_block, end_block):
                base = block * block_size
                v = _widened(values[np.int64(table[block]) * rows_per_block + head_row], buffer)
                following = min(block + distance, end_block - 1)
                ahead = values[np.int64(table[following]) * rows_per_block + head_row]
                for j in range(num_queries):
                    seen = max(position + j - window + 1, 0) if window > 0 else 0
                    t, high = max(seen - base, 0), min(block_size, position + j + 1 - base)
                    if j == 0:
                        ask_for(ahead, t * value_size, high * value_size)
                    for g in range(0, group_size, added):
                        row = j * group_size + g
                        if t < high:
                            add_values(
                                value_size, added, v, t * value_size, high - t, scores, row * most + base + t - start,
                                most, rows, row * row_size + head_size, row_size,
                            )  # fmt: skip
            for j in range(num_queries):
                for g in range(group_size):
                    out, sums = output[token + j, first_head + g], rows[j * group_size + g, head_size:]
                    for d in range(value_size):
                        out[d] = narrow(sums[d], out[d])

    return compiled(attend)
