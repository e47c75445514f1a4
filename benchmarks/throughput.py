"""Tokens per second of the engine against transformers, same weights, prompts, machine and run.

    python benchmarks/throughput.py MODEL [--batch 1 8 16] [--prompt-tokens 128] [--new-tokens 64] [--rounds 5]

Rounds are interleaved (ours, generate, generate_batch, ours, ...); the table gives medians, and ratios of medians.
Every peer decodes greedily and ignores the end of sequence. `generate` is one static batch without padding, since all
prompts have the same length; `generate_batch` is transformers' own continuous batching over paged KV.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch, for every peer: see wait_for_threads_asleep

import torch

from kvscope.engine.build import build_engine, prepare
from kvscope.engine.config import EngineConfig
from kvscope.engine.model_loader import LoadedModel, load_model
from kvscope.engine.sinks import AuditSink
from kvscope.events.types import SamplingParams
from kvscope.kernels.backend import get_backend
from kvscope.transport.publisher import NullPublisher

PEERS = ("kvscope", "kvscope, no events", "generate", "generate_batch")


def prompts(batch: int, length: int, vocabulary: int) -> list[list[int]]:
    """Different prompts of one length, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(10, vocabulary - 10, (batch, length), generator=generator).tolist()


def run_kvscope(loaded: LoadedModel, tokens: list[list[int]], new_tokens: int, *, events: bool) -> None:
    num_blocks = len(tokens) * (-(-(len(tokens[0]) + new_tokens) // 16) + 1)
    config = EngineConfig(num_gpu_blocks_override=num_blocks, enable_prefix_caching=False, max_num_batched_tokens=4096)
    sink = AuditSink() if events else NullPublisher()
    engine = build_engine(prepare(config, loaded=loaded), sink)
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for number, ids in enumerate(tokens):
        engine.submit("", params, f"r{number}", ids)
    while engine.has_work():
        engine.step()


def run_generate(loaded: LoadedModel, tokens: list[list[int]], new_tokens: int) -> None:
    ids = torch.tensor(tokens)
    loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )


def run_generate_batch(loaded: LoadedModel, tokens: list[list[int]], new_tokens: int) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0)
    pool = ContinuousBatchingConfig(max_batch_tokens=2048, num_blocks=256, block_size=32)
    loaded.model.generate_batch(
        inputs=tokens, generation_config=config, continuous_batching_config=pool, progress_bar=False
    )


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(loaded: LoadedModel, batch: int, options: argparse.Namespace) -> dict[str, float | None]:
    """Median tokens per second of each peer; None where it could not run."""
    tokens = prompts(batch, options.prompt_tokens, loaded.vocab_size)
    seconds: dict[str, list[float]] = {peer: [] for peer in options.peers}
    for _ in range(options.rounds):
        for peer in options.peers:
            attention = "kvscope_paged" if peer.startswith("kvscope") else "sdpa"
            loaded.model.set_attn_implementation(attention)
            work = {
                "kvscope": lambda: run_kvscope(loaded, tokens, options.new_tokens, events=True),
                "kvscope, no events": lambda: run_kvscope(loaded, tokens, options.new_tokens, events=False),
                "generate": lambda: run_generate(loaded, tokens, options.new_tokens),
                "generate_batch": lambda: run_generate_batch(loaded, tokens, options.new_tokens),
            }[peer]
            try:
                seconds[peer].append(timed(work))
            except Exception as error:
                print(f"{peer} could not run: {type(error).__name__}: {error}")
    total = batch * options.new_tokens
    return {peer: total / statistics.median(times) if times else None for peer, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    options = parser.parse_args()
    loaded = load_model(EngineConfig(model=options.model, dtype=options.dtype), get_backend("torch"))
    print(f"{options.model}, {options.dtype}, {torch.get_num_threads()} threads")
    print(f"prompts of {options.prompt_tokens} tokens, {options.new_tokens} new ones each, end to end")
    print(f"tokens/s, median of {options.rounds} interleaved rounds")
    print(f"{'batch':>5}  " + "  ".join(f"{peer:>18}" for peer in options.peers) + "   ratios to generate")
    for batch in options.batch:
        rates = measure(loaded, batch, options)
        base = rates.get("generate")
        cells = [f"{rate:18.1f}" if rate is not None else f"{'-':>18}" for rate in rates.values()]
        ratios = [f"{peer} {rate / base:.2f}" for peer, rate in rates.items() if rate and base and peer != "generate"]
        print(f"{batch:>5}  " + "  ".join(cells) + "   " + ", ".join(ratios), flush=True)


if __name__ == "__main__":
    main()
