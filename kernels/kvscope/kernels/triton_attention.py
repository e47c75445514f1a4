"""Paged attention in Triton: decode, prefill and chunked prefill in one kernel.

One program computes one tile of query rows of one sequence and one KV head. Its rows are (query, query head of the
KV head's group) pairs, so each K and V is read once per group, straight from the pool through the block table
(PagedAttention, SOSP'23). Softmax is computed online over tiles of positions (FlashAttention-2, algorithm 1).

A decode may split the positions of a sequence over several programs (Flash-Decoding); a second kernel then weighs
their partial results. How many is decided on the device, from the lengths of the whole batch: a launch depends on the
number of sequences alone, so that a CUDA graph can hold it.

```
rows     query 0: head 0, head 1, head 2, (pad)    GROUP = 3, GROUP_ROWS = 4
         query 1: head 0, head 1, head 2, (pad)    BLOCK_Q = BLOCK_M // GROUP_ROWS queries per tile
columns  positions [start, start + TILE)           any number of blocks, or a part of one
```

Nothing here calls Triton's jitted standard library (`tl.max`, `tl.sum`, `tl.zeros`, `tl.cdiv`): see `triton_runtime`.
"""

import triton
import triton.language as tl

from kvscope.kernels.triton_splits import split_length, visible_start


@triton.jit
def find_sequence(query_start, num_seqs, tile, BLOCK_Q: tl.constexpr):
    """The sequence that owns a tile, by binary search over the cumulative query lengths.

    Sequence i starts at tile `query_start[i] // BLOCK_Q + i`: never too early, and at most one tile per sequence is
    left over. The grid is then known from the number of tokens alone, without asking the device for lengths.
    """
    left = 0
    right = num_seqs
    while left < right:
        middle = (left + right) // 2
        first_tile = tl.load(query_start + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def load_block_ids(table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Physical blocks of the positions [start, start + TILE): one load per block that begins before `end`.

    Returns int64, `[TILE]` where a tile spans blocks, a scalar where it lies within one. `start` is a multiple of the
    smaller of TILE and BLOCK_SIZE, both powers of two.
    """
    if BLOCK_SIZE >= TILE:
        block_ids = tl.load(table + start // BLOCK_SIZE)
    else:
        logical = start // BLOCK_SIZE + tl.arange(0, TILE // BLOCK_SIZE)
        per_block = tl.load(table + logical, mask=logical * BLOCK_SIZE < end, other=0)
        block_ids = tl.reshape(tl.broadcast_to(per_block[:, None], (TILE // BLOCK_SIZE, BLOCK_SIZE)), (TILE,))
    return block_ids.to(tl.int64)


@triton.jit
def paged_attention_kernel(
    output,
    partial_output,
    partial_lse,
    query,
    key_cache,
    value_cache,
    query_start,
    context_lengths,
    block_tables,
    num_seqs,
    target_programs,
    score_scale,
    soft_cap,
    output_stride_token,
    output_stride_head,
    query_stride_token,
    query_stride_head,
    key_stride_block,
    key_stride_head,
    value_stride_block,
    value_stride_head,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    SKIP_ONE_QUERY: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Grid `(tiles, num_kv_heads, NUM_SPLITS)`; tiles are sequences where ONE_QUERY, else `num_tokens // BLOCK_Q +
    num_seqs`.

    ONE_QUERY computes the sequences with one query (decodes) and leaves the others alone; SKIP_ONE_QUERY the reverse:
    one launch per phase. NUM_SPLITS, a power of two, is above one for decodes only. A sequence that is split in several
    leaves its parts in partial_output, float32 `[num_seqs, num_query_heads, NUM_SPLITS, VALUE_HEAD_SIZE]`, each
    divided by its own sum of weights, whose binary logarithm (the scores' maximum included) goes to partial_lse,
    float32 `[num_seqs, num_query_heads, NUM_SPLITS]`; `combine_splits_kernel` turns them into the output.

    Scores are kept in units of log2(e), for exp2: `score_scale` is `scale * log2(e)`. With a soft cap, `cap * tanh(x)`
    is `cap - 2 * cap / (exp2(2 * log2(e) * x) + 1)`: then `score_scale` is `2 * log2(e) * scale / cap` and `soft_cap`
    is `cap * log2(e)`. SLIDING_WINDOW is None or a number of positions. DOT_DTYPE is what the matrix units multiply.

    A sequence with a context of no positions pads a decode: its output is zeros.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_ROWS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tile
    first_query = 0
    if not ONE_QUERY:
        sequence = find_sequence(query_start, num_seqs, tile, BLOCK_Q)
        first_query = (tile - tl.load(query_start + sequence) // BLOCK_Q - sequence) * BLOCK_Q
    first_token = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - first_token
    if first_query >= num_queries:
        return
    if ONE_QUERY or SKIP_ONE_QUERY:  # noqa: SIM102 (the outer one is decided at compile time)
        if (num_queries == 1) != ONE_QUERY:
            return
    context_length = tl.load(context_lengths + sequence)
    table = block_tables + sequence.to(tl.int64) * table_stride

    row = tl.arange(0, BLOCK_M)
    query_index = first_query + row // GROUP_ROWS
    query_position = context_length - num_queries + query_index
    is_row = (query_index < num_queries) & (row % GROUP_ROWS < GROUP)
    token = (first_token + query_index).to(tl.int64)
    query_head = kv_head * GROUP + row % GROUP_ROWS
    dim = tl.arange(0, HEAD_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    q = tl.load(
        query + token[:, None] * query_stride_token + query_head[:, None] * query_stride_head + dim[None, :],
        mask=is_row[:, None] & (dim < HEAD_SIZE)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)

    # Positions [start, end) that any row of this tile sees, and of these the ones of this split.
    end = tl.minimum(context_length - num_queries + first_query + BLOCK_Q, context_length)
    start = visible_start(context_length, first_query, num_queries, SLIDING_WINDOW, min(TILE, BLOCK_SIZE))
    num_splits = 1
    if NUM_SPLITS > 1:
        length = split_length(
            context_lengths,
            num_seqs,
            end - start,
            tl.num_programs(1),
            target_programs,
            SLIDING_WINDOW,
            NUM_SPLITS,
            TILE,
            SEQS_PAD,
        )
        num_splits = tl.maximum((end - start + length - 1) // length, 1)
        if tl.program_id(2) >= num_splits:
            return
        start += tl.program_id(2) * length
        end = tl.minimum(start + length, end)

    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.full((BLOCK_M,), 0.0, tl.float32)
    accumulator = tl.full((BLOCK_M, VALUE_PAD), 0.0, tl.float32)
    for tile_start in range(start, end, TILE):
        position = tile_start + tl.arange(0, TILE)
        is_stored = position < end
        block_ids = load_block_ids(table, tile_start, end, BLOCK_SIZE, TILE)
        slot = position % BLOCK_SIZE
        # A slot past `end` is not read: masked lanes are 0, so that what it holds (NaN, say) cannot spread.
        key_row = block_ids * key_stride_block + kv_head * key_stride_head + slot * HEAD_SIZE
        k = tl.load(
            key_cache + key_row[:, None] + dim[None, :],
            mask=is_stored[:, None] & (dim < HEAD_SIZE)[None, :],
            other=0.0,
        ).to(DOT_DTYPE)
        value_row = block_ids * value_stride_block + kv_head * value_stride_head + slot * VALUE_HEAD_SIZE
        v = tl.load(
            value_cache + value_row[:, None] + value_dim[None, :],
            mask=is_stored[:, None] & (value_dim < VALUE_HEAD_SIZE)[None, :],
            other=0.0,
        ).to(DOT_DTYPE)

        # "ieee" keeps float32 inputs in float32: TF32 would cost ten bits of mantissa.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
        if HAS_SOFT_CAP:
            scores = soft_cap - 2.0 * soft_cap / (tl.exp2(scores) + 1.0)
        is_visible = position[None, :] <= query_position[:, None]
        if SLIDING_WINDOW is not None:
            is_visible = is_visible & (position[None, :] > query_position[:, None] - SLIDING_WINDOW)
        scores = tl.where(is_visible, scores, -float("inf"))

        new_max = tl.maximum(row_max, tl.reduce(scores, 1, tl.standard._elementwise_max))
        # A row that saw nothing yet has maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.reduce(weights, 1, tl.standard._sum_combine)
        accumulator = accumulator * rescale[:, None] + tl.dot(weights.to(DOT_DTYPE), v, input_precision="ieee")
        row_max = new_max

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # only padding saw nothing
    result = accumulator / row_sum[:, None]
    mask = is_row[:, None] & (value_dim < VALUE_HEAD_SIZE)[None, :]
    if num_splits == 1:
        target = token[:, None] * output_stride_token + query_head[:, None] * output_stride_head
        tl.store(output + target + value_dim[None, :], result.to(output.dtype.element_ty), mask=mask)
    else:
        part = (sequence.to(tl.int64) * tl.num_programs(1) * GROUP + query_head) * NUM_SPLITS + tl.program_id(2)
        tl.store(partial_output + part[:, None] * VALUE_HEAD_SIZE + value_dim[None, :], result, mask=mask)
        tl.store(partial_lse + part, row_max + tl.log2(row_sum), mask=is_row)
