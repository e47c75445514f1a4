"""Decode attention of one layer on a CPU: in place through the block table, against contiguous and gathered K and V.

    python benchmarks/cpu_attention.py

The peers are torch's `scaled_dot_product_attention` over K and V that lie contiguous already (what paging gives up),
and over a copy gathered through the block table first. The competitors of a row take turns, each result is checked
against the contiguous one, and the table holds medians. The shape is SmolLM2-135M's: 9 query heads, 3 KV heads of 64.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvscope.kernels.backend import get_backend
from kvscope.kernels.batch import PagedBatch
from kvscope.kernels.huge_pages import huge_zeros

NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
BATCH_SIZES, CONTEXT_LENGTH = (1, 16), 1024
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative error of the whole output
NUM_WARMUPS, NUM_REPEATS = 5, 100

Competitors = dict[str, Callable[[], Tensor]]


def competitors(batch_size: int, dtype: torch.dtype) -> Competitors:
    """The same random step for each: one query per sequence, its blocks shuffled over a pool twice as large."""
    blocks_per_sequence = CONTEXT_LENGTH // BLOCK_SIZE
    num_blocks = 2 * batch_size * blocks_per_sequence
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    keys, values = (huge_zeros(shape, dtype).normal_() for _ in range(2))  # in such memory as the engine's
    tables = torch.randperm(num_blocks)[: num_blocks // 2].view(batch_size, blocks_per_sequence)
    query = torch.randn(batch_size, NUM_QUERY_HEADS, HEAD_SIZE).to(dtype)
    grouped = query.view(batch_size, NUM_KV_HEADS, -1, HEAD_SIZE)  # the query heads of a KV head as rows
    batch = PagedBatch(
        query_start=torch.arange(batch_size + 1, dtype=torch.int32),
        context_lengths=torch.full((batch_size,), CONTEXT_LENGTH, dtype=torch.int32),
        block_tables=tables.int(),
        slot_mapping=tables[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1,
        max_query_length=1,
        max_context_length=CONTEXT_LENGTH,
    )

    def gather(cache: Tensor) -> Tensor:
        return cache[tables].transpose(1, 2).reshape(batch_size, NUM_KV_HEADS, CONTEXT_LENGTH, HEAD_SIZE)

    contiguous_keys, contiguous_values = gather(keys), gather(values)
    in_place, gathering = get_backend("numba"), get_backend("torch")
    scale = HEAD_SIZE**-0.5
    return {
        "SDPA, contiguous": lambda: scaled_dot_product_attention(
            grouped, contiguous_keys, contiguous_values
        ).reshape_as(query),
        "numba, in place": lambda: in_place.attention(query, keys, values, batch, scale=scale),
        "gather + SDPA": lambda: scaled_dot_product_attention(grouped, gather(keys), gather(values)).reshape_as(query),
        "torch backend": lambda: gathering.attention(query, keys, values, batch, scale=scale),
    }


def check(functions: Competitors, dtype: torch.dtype) -> None:
    """Raises AssertionError where a competitor's result is not that of the first."""
    expected, *others = (function().float() for function in functions.values())
    for name, output in zip(list(functions)[1:], others, strict=True):
        error = float((output - expected).norm() / expected.norm())
        assert error < TOLERANCE[dtype], f"{name}: relative error {error:.1e} in {dtype}"


def medians(functions: Competitors, clock: Callable[[], float] = perf_counter) -> dict[str, float]:
    """Milliseconds per call, the competitors taking turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(NUM_WARMUPS + NUM_REPEATS):
        for name, function in functions.items():
            started = clock()
            function()
            if repeat >= NUM_WARMUPS:
                times[name].append(1e3 * (clock() - started))
    return {name: median(measured) for name, measured in times.items()}


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    print(f"milliseconds per layer, medians of {NUM_REPEATS}; {torch.get_num_threads()} threads\n")
    print("dtype     batch  context", *(f"{name:>17}" for name in competitors(1, torch.float32)))
    for dtype in TOLERANCE:
        for batch_size in BATCH_SIZES:
            functions = competitors(batch_size, dtype)
            check(functions, dtype)
            row = medians(functions)
            label = str(dtype).removeprefix("torch.")
            print(f"{label:<9} {batch_size:>5} {CONTEXT_LENGTH:>8}", *(f"{row[name]:>17.3f}" for name in row))


if __name__ == "__main__":
    main()
