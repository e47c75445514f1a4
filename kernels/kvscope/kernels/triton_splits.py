"""Decodes whose positions are shared out over several programs (split-KV): how far each goes, and the sum of the parts.

Nothing here calls Triton's jitted standard library: see `triton_runtime`.
"""

import triton
import triton.language as tl


@triton.jit
def visible_start(context_length, query_index, num_queries, SLIDING_WINDOW: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The first position that a query of the sequence sees, rounded down to where a table load may begin."""
    start = 0
    if SLIDING_WINDOW is not None:
        start = tl.maximum(context_length - num_queries + query_index - SLIDING_WINDOW + 1, 0) // ALIGNMENT * ALIGNMENT
    return start


@triton.jit
def split_length(
    context_lengths,
    num_seqs,
    num_visible,
    num_kv_heads,
    target_programs,
    SLIDING_WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    SEQS_PAD: tl.constexpr,
):
    """Positions per program for a sequence that sees `num_visible`: a multiple of TILE, and never none.

    Every program of the batch gets about as many, so that `target_programs` share the work evenly and a long sequence
    among short ones is split more often than they are; NUM_SPLITS bounds the splits of one sequence.
    """
    index = tl.arange(0, SEQS_PAD)
    lengths = tl.load(context_lengths + index, mask=index < num_seqs, other=0)
    if SLIDING_WINDOW is not None:
        lengths = tl.minimum(lengths, SLIDING_WINDOW)
    total = tl.reduce(lengths.to(tl.int64), 0, tl.standard._sum_combine) * num_kv_heads
    fair = ((total + target_programs - 1) // target_programs).to(tl.int32)
    least = (num_visible + NUM_SPLITS - 1) // NUM_SPLITS
    return tl.maximum((tl.maximum(fair, least) + TILE - 1) // TILE, 1) * TILE


@triton.jit
def combine_splits_kernel(
    output,
    partial_output,
    partial_lse,
    query_start,
    context_lengths,
    num_seqs,
    target_programs,
    output_stride_token,
    output_stride_head,
    GROUP: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SEQS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """The output of decodes that were split, from their parts, all at once. Grid `(num_seqs, num_query_heads)`."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    context_length = tl.load(context_lengths + sequence)
    start = visible_start(context_length, 0, 1, SLIDING_WINDOW, min(TILE, BLOCK_SIZE))
    length = split_length(
        context_lengths,
        num_seqs,
        context_length - start,
        tl.num_programs(1) // GROUP,
        target_programs,
        SLIDING_WINDOW,
        NUM_SPLITS,
        TILE,
        SEQS_PAD,
    )
    num_splits = (context_length - start + length - 1) // length
    if num_splits <= 1:  # none: a row that pads the batch
        return
    # Splits that were not computed have no weight, and are not read: what the scratch holds there is undefined.
    split = tl.arange(0, NUM_SPLITS)
    is_split = split < num_splits
    part = (sequence.to(tl.int64) * tl.num_programs(1) + head) * NUM_SPLITS + split
    value_dim = tl.arange(0, VALUE_PAD)
    is_dim = value_dim < VALUE_HEAD_SIZE
    lse = tl.load(partial_lse + part, mask=is_split, other=-float("inf"))
    parts = tl.load(
        partial_output + part[:, None] * VALUE_HEAD_SIZE + value_dim[None, :],
        mask=is_split[:, None] & is_dim[None, :],
        other=0.0,
    )
    weights = tl.exp2(lse - tl.reduce(lse, 0, tl.standard._elementwise_max))
    total = tl.reduce(weights, 0, tl.standard._sum_combine)
    result = tl.reduce(parts * weights[:, None], 0, tl.standard._sum_combine) / total
    target = token.to(tl.int64) * output_stride_token + head.to(tl.int64) * output_stride_head
    tl.store(output + target + value_dim, result.to(output.dtype.element_ty), mask=is_dim)
