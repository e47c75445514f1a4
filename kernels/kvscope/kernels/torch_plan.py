"""What the torch backend works out once per step: which rows of the cache each group of sequences gathers."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvscope.kernels.batch import PagedBatch
from kvscope.kernels.layout import CacheLayout
from kvscope.kernels.reference import first_visible

# Sequences of one chunk are padded to the longest of them: a shorter context than this share starts a new chunk.
MIN_FILL = 0.75
# Gathered K of one chunk, in elements: 2 MiB of float32, so that K and V are still in cache when they are multiplied.
MAX_CHUNK_ELEMENTS = 2**19


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Sequences with one query each that are gathered and multiplied together, padded to `num_slots` positions."""

    tokens: Tensor
    """int64 [num_seqs], where their query sits in the packed axis."""
    cache_rows: Tensor
    """int64 [num_seqs * num_kv_heads * num_blocks], rows to gather."""
    num_slots: int
    """Gathered positions per sequence, a multiple of the block size."""
    hidden: Tensor | None
    """bool [num_seqs, 1, num_slots], positions that are no part of what the query sees; None: all are."""
    hidden_value_rows: Tensor | None
    """int64, the same positions as rows of the gathered V `[num_seqs * num_kv_heads * num_slots, head_size]`."""


@dataclass(frozen=True, slots=True)
class PrefillSequence:
    """A sequence with several queries in this step."""

    tokens: slice
    num_positions: int
    """Gathered positions, up to the last query's: all of them, or from the first block in the window on."""
    cache_rows: Tensor
    """int64 [num_kv_heads * num_blocks], rows to gather."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The step's sequences, by the way they are computed."""

    decode_chunks: list[DecodeChunk]
    prefill_sequences: list[PrefillSequence]


def plan_step(batch: PagedBatch, layout: CacheLayout, head_size: int, sliding_window: int | None) -> StepPlan:
    """Split the step into chunks of decodes of similar length and single prefills."""
    starts = batch.query_start.tolist()
    contexts = batch.context_lengths.tolist()
    query_lengths = [end - start for start, end in pairwise(starts)]

    # Positions each decode reads, longest first.
    decodes = sorted(
        ((min(contexts[i], sliding_window or contexts[i]), i) for i, length in enumerate(query_lengths) if length == 1),
        reverse=True,
    )
    max_positions = MAX_CHUNK_ELEMENTS // (layout.num_kv_heads * head_size)
    chunks = [
        _plan_chunk(batch, layout, [i for _, i in decodes[first:last]], sliding_window)
        for first, last in _split_by_length([length for length, _ in decodes], max_positions)
    ]
    prefills = []
    for i, length in enumerate(query_lengths):
        if length > 1:
            first_block = first_visible(length, contexts[i], sliding_window) // layout.block_size
            block_ids = batch.block_tables[i, first_block : -(-contexts[i] // layout.block_size)]
            num_positions = contexts[i] - first_block * layout.block_size
            tokens = slice(starts[i], starts[i + 1])
            prefills.append(PrefillSequence(tokens, num_positions, layout.row_ids(block_ids).flatten()))
    return StepPlan(chunks, prefills)


def _split_by_length(lengths: list[int], max_positions: int) -> Iterator[tuple[int, int]]:
    """Intervals [first, last) of a descending list, each at least `MIN_FILL` full and at most `max_positions` large."""
    first = 0
    for i in range(1, len(lengths) + 1):
        longest = lengths[first]
        fits = i < len(lengths) and lengths[i] >= MIN_FILL * longest and (i + 1 - first) * longest <= max_positions
        if not fits:
            yield first, i
            first = i


def _plan_chunk(
    batch: PagedBatch, layout: CacheLayout, sequences: list[int], sliding_window: int | None
) -> DecodeChunk:
    """Rows and mask of one chunk. Gathering starts at the block with the first position in the window."""
    block_size = layout.block_size
    device = batch.block_tables.device
    members = torch.tensor(sequences, device=device)
    context = batch.context_lengths[members].long()[:, None]
    first_position = (context - sliding_window).clamp(min=0) if sliding_window else torch.zeros_like(context)
    first_block = first_position // block_size
    num_blocks = int(((context + block_size - 1) // block_size - first_block).max())

    logical = first_block + torch.arange(num_blocks, device=device)  # [num_seqs, num_blocks]
    is_used = logical * block_size < context
    # Padding gathers the sequence's own first block: a valid address whose content is hidden below.
    logical = torch.where(is_used, logical, first_block)
    block_ids = batch.block_tables[members].gather(1, logical)

    num_slots = num_blocks * block_size
    position = first_block * block_size + torch.arange(num_slots, device=device)
    hidden = (position < first_position) | (position >= context)
    hidden_value_rows = None
    if hidden.any():
        per_head = hidden[:, None].expand(-1, layout.num_kv_heads, -1)
        hidden_value_rows = per_head.flatten().nonzero().flatten()
    return DecodeChunk(
        tokens=batch.query_start[members].long(),
        cache_rows=layout.row_ids(block_ids).flatten(),
        num_slots=num_slots,
        hidden=hidden[:, None] if hidden_value_rows is not None else None,
        hidden_value_rows=hidden_value_rows,
    )
