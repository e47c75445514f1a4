"""The Triton kernels on a CUDA device: checked against the reference, then timed against what torch offers.

    python benchmarks/kernels_gpu.py

Decode is bound by reading KV, so the figure of merit is the share of the read bandwidth measured in the same run.
Peers: attention over contiguous K and V (`scaled_dot_product_attention`), and torch's own attention through a block
table (`varlen_attn`, where its Flash Attention takes the page size). Every timing flushes the L2 cache first, and the
competitors of a row take turns. Last come whole steps of the engine's model runner, launched kernel by kernel and
replayed as CUDA graphs (`--cuda-graphs`); only they need more than torch and triton.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvscope.kernels.backend import AttentionBackend, get_backend
from kvscope.kernels.batch import PagedBatch
from kvscope.kernels.triton_backend import TritonBackend
from kvscope.kernels.triton_tiles import NO_SPLITS

NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 8, 128
BATCH_SIZES, CONTEXT_LENGTHS, BLOCK_SIZES = (1, 8, 32, 128, 256), (512, 4096, 32768), (16, 64, 256)
SPLIT_SHAPES = ((1, 32768), (8, 4096), (32, 4096), (128, 4096))
PREFILL_SHAPES = ((1, 4096, 0), (8, 512, 0), (4, 512, 3584))  # sequences, new tokens each, context before them
STEP_BATCH_SIZES, STEP_CONTEXT_LENGTH = (1, 2, 8, 32, 64), 1024
# The shape of SmolLM2-135M, with random weights.
STEP_MODEL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
}
MAX_POOL_BYTES = 24 * 2**30
NUM_REPEATS = 30


class Step(NamedTuple):
    """A step: `num_queries` new tokens per sequence, blocks of all sequences shuffled over the pool."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PagedBatch

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the step must read."""
        positions = int(self.batch.context_lengths.sum())
        return 2 * positions * NUM_KV_HEADS * HEAD_SIZE * self.key_cache.element_size()


def make_step(  # noqa: PLR0917
    batch_size: int,
    context_length: int,
    block_size: int,
    dtype: torch.dtype = torch.bfloat16,
    num_queries: int = 1,
    device: str = "cuda",
) -> Step:
    """A random step."""
    blocks_per_seq = -(-context_length // block_size)
    shape = (batch_size * blocks_per_seq, NUM_KV_HEADS, block_size, HEAD_SIZE)
    tables = torch.randperm(shape[0], device=device).view(batch_size, blocks_per_seq)
    position = torch.arange(context_length - num_queries, context_length, device=device)
    slots = tables[:, position // block_size] * block_size + position % block_size
    return Step(
        query=torch.randn(batch_size * num_queries, NUM_QUERY_HEADS, HEAD_SIZE, device=device, dtype=dtype),
        key_cache=torch.randn(shape, device=device, dtype=dtype),
        value_cache=torch.randn(shape, device=device, dtype=dtype),
        batch=PagedBatch(
            query_start=torch.arange(batch_size + 1, device=device, dtype=torch.int32) * num_queries,
            context_lengths=torch.full((batch_size,), context_length, device=device, dtype=torch.int32),
            block_tables=tables.int(),
            slot_mapping=slots.flatten(),
            max_query_length=num_queries,
            max_context_length=context_length,
        ),
    )


def torch_paged(step: Step) -> Callable[[], Tensor] | None:
    """torch's attention through the same block table, on pages in its own layout; None where it refuses the shape."""
    from torch.nn.attention.varlen import varlen_attn

    keys, values = (cache.transpose(1, 2).contiguous() for cache in (step.key_cache, step.value_cache))
    batch = step.batch
    call = partial(
        varlen_attn,
        step.query,
        keys,
        values,
        batch.query_start,
        None,
        batch.max_query_length,
        batch.max_context_length,
        scale=HEAD_SIZE**-0.5,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=batch.context_lengths,
        block_table=batch.block_tables,
    )
    try:
        call()
    except (RuntimeError, ValueError):
        return None
    return call


def contiguous(step: Step, batch_size: int) -> Callable[[], Tensor]:
    """Attention over contiguous K and V of the same size; the queries of a KV head packed as rows of one decode."""
    context_length, num_queries = step.batch.max_context_length, step.batch.max_query_length
    shape = (2, batch_size, NUM_KV_HEADS, context_length, HEAD_SIZE)
    keys, values = torch.randn(shape, device=step.query.device, dtype=step.query.dtype)
    if num_queries == 1:
        packed = step.query.view(batch_size, NUM_KV_HEADS, -1, HEAD_SIZE)
        return partial(scaled_dot_product_attention, packed, keys, values)
    query = step.query.view(batch_size, num_queries, NUM_QUERY_HEADS, HEAD_SIZE).transpose(1, 2)
    mask = causal_lower_right(num_queries, context_length)
    return partial(scaled_dot_product_attention, query, keys, values, attn_mask=mask, enable_gqa=True)


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


def check_against_reference(backend: AttentionBackend, device: str = "cuda") -> None:
    """Raises AssertionError where a step differs from the reference by more than the element type explains."""
    for block_size, num_queries, (dtype, tolerance) in product(
        BLOCK_SIZES, (1, 70), ((torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2))
    ):
        step = make_step(5, 333, block_size, dtype, num_queries, device)
        torch.testing.assert_close(
            attend(backend, step), attend(get_backend("reference"), step), rtol=0, atol=tolerance
        )
    print(f"correct: 5 x 333 positions, decode and prefill, blocks of {BLOCK_SIZES}, float32, float16 and bfloat16")


def read_bandwidth() -> float:
    """Bytes per second of a sum over 2 GiB: what reading can reach on this device."""
    buffer = torch.ones(2**30, dtype=torch.float16, device="cuda")
    microseconds = median_microseconds({"sum": buffer.sum})["sum"]
    return 2**31 / microseconds * 1e6


def time_decode(backend: AttentionBackend, ceiling: float) -> None:
    """One line per batch size, context length and block size."""
    print("\ndecode")
    print(f"{'batch':>5} {'context':>8} {'block':>6} {'paged':>11} {'contiguous':>11} {'torch paged':>11} {'read':>5}")
    for batch_size, context_length, block_size in product(BATCH_SIZES, CONTEXT_LENGTHS, BLOCK_SIZES):
        if 4 * batch_size * context_length * NUM_KV_HEADS * HEAD_SIZE > MAX_POOL_BYTES:
            continue
        step = make_step(batch_size, context_length, block_size)
        competitors = {"paged": partial(attend, backend, step), "contiguous": contiguous(step, batch_size)}
        if (peer := torch_paged(step)) is not None:
            competitors["torch"] = peer
        times = median_microseconds(competitors)
        share = step.kv_bytes / times["paged"] * 1e6 / ceiling
        print(
            f"{batch_size:>5} {context_length:>8} {block_size:>6} {times['paged']:>8.1f} us "
            f"{times['contiguous']:>8.1f} us {_microseconds(times.get('torch'))} {share:>5.0%}"
        )


def time_splits() -> None:
    """The same decode with the device's choice of splits, and without any."""
    print("\nsplits")
    print(f"{'batch':>5} {'context':>8} {'chosen':>11} {'without':>11} {'ratio':>6}")
    for batch_size, context_length in SPLIT_SHAPES:
        step = make_step(batch_size, context_length, 16)
        times = median_microseconds(
            {
                "chosen": partial(attend, TritonBackend(), step),
                "without": partial(attend, TritonBackend(splits=NO_SPLITS), step),
            }
        )
        ratio = times["without"] / times["chosen"]
        print(
            f"{batch_size:>5} {context_length:>8} {times['chosen']:>8.1f} us {times['without']:>8.1f} us {ratio:>6.2f}"
        )


def time_prefill(backend: AttentionBackend) -> None:
    """Whole prompts, and chunks on top of a context."""
    print("\nprefill, block 16")
    print(f"{'batch':>5} {'new':>6} {'before':>7} {'paged':>11} {'contiguous':>11} {'torch paged':>11} {'TFLOP/s':>8}")
    for batch_size, num_queries, before in PREFILL_SHAPES:
        step = make_step(batch_size, before + num_queries, 16, num_queries=num_queries)
        competitors = {"paged": partial(attend, backend, step), "contiguous": contiguous(step, batch_size)}
        if (peer := torch_paged(step)) is not None:
            competitors["torch"] = peer
        times = median_microseconds(competitors)
        visible = num_queries * before + num_queries * (num_queries + 1) // 2  # pairs of query and position
        operations = 4 * batch_size * NUM_QUERY_HEADS * HEAD_SIZE * visible
        print(
            f"{batch_size:>5} {num_queries:>6} {before:>7} {times['paged']:>8.1f} us {times['contiguous']:>8.1f} us "
            f"{_microseconds(times.get('torch'))} {operations / times['paged'] / 1e6:>8.0f}"
        )


def make_runner(backend: AttentionBackend, num_blocks: int, device: str = "cuda") -> Any:
    """A model runner, as the engine has it, over a pool of blocks of 16."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from kvscope.engine.attention import PAGED_ATTENTION, register
    from kvscope.engine.model_checks import observe_layers
    from kvscope.engine.model_runner import ModelRunner

    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**STEP_MODEL), dtype=torch.bfloat16).to(device).eval()
    layers = observe_layers(model)
    model.set_attn_implementation(PAGED_ATTENTION)
    return ModelRunner(model, layers, backend, num_blocks=num_blocks, block_size=16)


def make_extents(batch_size: int) -> list[Any]:
    """One token each of sequences of `STEP_CONTEXT_LENGTH`."""
    from kvscope.engine.block_tables import Extent
    from kvscope.engine.request import Sequence

    blocks, length = STEP_CONTEXT_LENGTH // 16, STEP_CONTEXT_LENGTH
    extents = [Extent(Sequence(f"s{i}.0", 0, [i + 1] * length), length - 1, length) for i in range(batch_size)]
    for number, extent in enumerate(extents):
        extent.sequence.block_table = list(range(number * blocks, (number + 1) * blocks))
    return extents


def time_steps(runner: Any, capture: Any) -> None:
    """Decodes, from lists of tokens to logits on the host: both ways in turn, and how far the logits are apart."""
    started = time.perf_counter()
    runner.capture_decodes(capture, max_num_seqs=STEP_BATCH_SIZES[-1], max_model_len=STEP_CONTEXT_LENGTH)
    print(f"\nsteps of {STEP_CONTEXT_LENGTH} positions; capturing took {time.perf_counter() - started:.1f} s")
    print(f"{'batch':>5} {'eager':>11} {'graph':>11} {'ratio':>6} {'logits':>8}")
    ways = {"eager": None, "graph": runner.graphs}
    for extents in map(make_extents, STEP_BATCH_SIZES):
        logits: dict[str, dict[str, Tensor]] = {}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for repeat, (name, graphs) in product(range(NUM_REPEATS + 3), ways.items()):
            runner.graphs = graphs
            started = time.perf_counter()
            logits[name] = runner.run(extents, [])
            if repeat >= 3:
                times[name].append((time.perf_counter() - started) * 1e6)
        eager, graph = median(times["eager"]), median(times["graph"])
        apart = max(float((row - logits["eager"][name]).abs().max()) for name, row in logits["graph"].items())
        print(f"{len(extents):>5} {eager:>8.1f} us {graph:>8.1f} us {eager / graph:>6.2f} {apart:>8.1e}")


def time_graphs(backend: AttentionBackend) -> None:
    """Whole steps; one line where the engine is not installed, or the step cannot be captured."""
    try:
        from kvscope.engine.decode_graphs import CudaCapture

        time_steps(make_runner(backend, STEP_BATCH_SIZES[-1] * STEP_CONTEXT_LENGTH // 16), CudaCapture())
    except (ImportError, RuntimeError) as error:
        print(f"\nno steps as CUDA graphs: {error}")


def _microseconds(elapsed: float | None) -> str:
    return f"{'-':>11}" if elapsed is None else f"{elapsed:>8.1f} us"


def main() -> int:
    """Check, then print one line per shape. Returns the exit status."""
    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to time here, and the interpreter says nothing about speed")
        return 1
    backend = get_backend("triton")
    check_against_reference(backend)
    ceiling = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a sum reads {ceiling / 1e12:.2f} TB/s")
    time_decode(backend, ceiling)
    time_splits()
    time_prefill(backend)
    time_graphs(backend)
    return 0


if __name__ == "__main__":
    sys.exit(main())
