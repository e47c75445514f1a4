"""Writing to the KV pool in Triton: new K and V into their slots, and copies of whole blocks."""

import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    num_rows,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    key_cache_stride_block,
    key_cache_stride_head,
    value_cache_stride_block,
    value_cache_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """K and V of `num_rows` (token, KV head) pairs, cast, to their tokens' slots. Grid: tiles of ROWS.

    A token whose slot is negative pads the batch: it is written nowhere.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    token = (row // NUM_KV_HEADS).to(tl.int64)
    head = (row % NUM_KV_HEADS).to(tl.int64)
    slot_id = tl.load(slot_mapping + token, mask=is_row, other=-1)
    is_row = slot_id >= 0
    block_id = slot_id // BLOCK_SIZE
    slot = slot_id % BLOCK_SIZE

    dim = tl.arange(0, HEAD_PAD)
    mask = is_row[:, None] & (dim < HEAD_SIZE)[None, :]
    source = token * key_stride_token + head * key_stride_head
    target = block_id * key_cache_stride_block + head * key_cache_stride_head + slot * HEAD_SIZE
    k = tl.load(key + source[:, None] + dim[None, :], mask=mask, other=0.0)
    tl.store(key_cache + target[:, None] + dim[None, :], k.to(key_cache.dtype.element_ty), mask=mask)

    dim = tl.arange(0, VALUE_PAD)
    mask = is_row[:, None] & (dim < VALUE_HEAD_SIZE)[None, :]
    source = token * value_stride_token + head * value_stride_head
    target = block_id * value_cache_stride_block + head * value_cache_stride_head + slot * VALUE_HEAD_SIZE
    v = tl.load(value + source[:, None] + dim[None, :], mask=mask, other=0.0)
    tl.store(value_cache + target[:, None] + dim[None, :], v.to(value_cache.dtype.element_ty), mask=mask)


@triton.jit
def copy_blocks_kernel(
    cache,
    source_ids,
    target_ids,
    num_rows,
    stride_block,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows of `ROW_SIZE` integers, one per (copy, KV head), within one cache. Grid: tiles of ROWS by COLUMNS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head_offset = (row % NUM_KV_HEADS).to(tl.int64) * stride_head
    source = tl.load(source_ids + row // NUM_KV_HEADS, mask=is_row, other=0) * stride_block + head_offset
    target = tl.load(target_ids + row // NUM_KV_HEADS, mask=is_row, other=0) * stride_block + head_offset
    mask = is_row[:, None] & (column < ROW_SIZE)[None, :]
    content = tl.load(cache + source[:, None] + column[None, :], mask=mask, other=0)
    tl.store(cache + target[:, None] + column[None, :], content, mask=mask)
