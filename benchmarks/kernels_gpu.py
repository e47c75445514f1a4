"""The Triton kernels on a CUDA device: checked against the reference, then timed against contiguous attention.

    python benchmarks/kernels_gpu.py

Decode is bound by reading KV, so the figure of merit is the share of the read bandwidth measured in the same run.
Every timing flushes the L2 cache first, and the competitors of a row take turns. Needs no package but torch and triton.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvscope.kernels.backend import AttentionBackend, get_backend
from kvscope.kernels.batch import PagedBatch

NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 8, 128
BATCH_SIZES, CONTEXT_LENGTHS, BLOCK_SIZES = (1, 8, 64), (256, 2048, 16384), (16, 64, 256)
MAX_POOL_BYTES = 16 * 2**30
NUM_REPEATS = 30


class Step(NamedTuple):
    """A decode step: one query per sequence, blocks of all sequences shuffled over the pool."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PagedBatch

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the step must read."""
        positions = int(self.batch.context_lengths.sum())
        return 2 * positions * NUM_KV_HEADS * HEAD_SIZE * self.key_cache.element_size()


def make_step(batch_size: int, context_length: int, block_size: int, dtype: torch.dtype = torch.bfloat16) -> Step:
    """A random step on the current CUDA device."""
    blocks_per_seq = -(-context_length // block_size)
    shape = (batch_size * blocks_per_seq, NUM_KV_HEADS, block_size, HEAD_SIZE)
    tables = torch.randperm(shape[0], device="cuda").view(batch_size, blocks_per_seq)
    last = tables[:, -1] * block_size + (context_length - 1) % block_size
    return Step(
        query=torch.randn(batch_size, NUM_QUERY_HEADS, HEAD_SIZE, device="cuda", dtype=dtype),
        key_cache=torch.randn(shape, device="cuda", dtype=dtype),
        value_cache=torch.randn(shape, device="cuda", dtype=dtype),
        batch=PagedBatch(
            query_start=torch.arange(batch_size + 1, device="cuda", dtype=torch.int32),
            context_lengths=torch.full((batch_size,), context_length, device="cuda", dtype=torch.int32),
            block_tables=tables.int(),
            slot_mapping=last,
            max_query_length=1,
            max_context_length=context_length,
        ),
    )


def attend(backend: AttentionBackend, step: Step) -> Tensor:
    """The step's attention by that backend."""
    return backend.attention(step.query, step.key_cache, step.value_cache, step.batch, scale=HEAD_SIZE**-0.5)


def median_microseconds(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median time of each function, one call of each in turn, the L2 cache flushed before each call."""
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(NUM_REPEATS + 3):
        for name, function in functions.items():
            started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            started.record()
            function()
            ended.record()
            torch.cuda.synchronize()
            if repeat >= 3:  # the first calls compile and warm up
                times[name].append(started.elapsed_time(ended) * 1e3)
    return {name: median(elapsed) for name, elapsed in times.items()}


def check_against_reference(backend: AttentionBackend) -> None:
    """Raises AssertionError where a decode differs from the reference by more than the element type explains."""
    for block_size, (dtype, tolerance) in product(
        BLOCK_SIZES, ((torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2))
    ):
        step = make_step(5, 333, block_size, dtype)
        torch.testing.assert_close(
            attend(backend, step), attend(get_backend("reference"), step), rtol=0, atol=tolerance
        )
    print(f"correct: decode of 5 x 333 positions, blocks of {BLOCK_SIZES}, float32, float16 and bfloat16")


def read_bandwidth() -> float:
    """Bytes per second of a sum over 2 GiB: what reading can reach on this device."""
    buffer = torch.ones(2**30, dtype=torch.float16, device="cuda")
    microseconds = median_microseconds({"sum": buffer.sum})["sum"]
    return 2**31 / microseconds * 1e6


def main() -> int:
    """Check, then print one line per shape. Returns the exit status."""
    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to time here, and the interpreter says nothing about speed")
        return 1
    backend = get_backend("triton")
    check_against_reference(backend)
    ceiling = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a sum reads {ceiling / 1e12:.2f} TB/s")
    print(f"{'batch':>5} {'context':>8} {'block':>6} {'paged':>10} {'contiguous':>11} {'ratio':>6} {'of ceiling':>11}")
    for batch_size, context_length, block_size in product(BATCH_SIZES, CONTEXT_LENGTHS, BLOCK_SIZES):
        if 4 * batch_size * context_length * NUM_KV_HEADS * HEAD_SIZE > MAX_POOL_BYTES:
            continue
        step = make_step(batch_size, context_length, block_size)
        contiguous = torch.randn(2, batch_size, NUM_KV_HEADS, context_length, HEAD_SIZE, device="cuda").bfloat16()
        packed = step.query.view(batch_size, NUM_KV_HEADS, -1, HEAD_SIZE)
        times = median_microseconds(
            {
                "paged": partial(attend, backend, step),
                "contiguous": partial(scaled_dot_product_attention, packed, contiguous[0], contiguous[1]),
            }
        )
        share = step.kv_bytes / times["paged"] * 1e6 / ceiling
        paged, compared = times["paged"], times["contiguous"]
        print(
            f"{batch_size:>5} {context_length:>8} {block_size:>6} {paged:>7.1f} us {compared:>8.1f} us "
            f"{paged / compared:>6.2f} {share:>10.0%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
