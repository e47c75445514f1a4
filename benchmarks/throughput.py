"""The engine on a CPU against its peers: same weights, prompts, dtype, threads and run. Prints one table with goals.

    python benchmarks/throughput.py [--only batch1 batch16 mixed attention context events] [--rounds 5]
                                    [--dtype bfloat16] [--llama-python PATH] [--peers kvscope generate]
                                    [--new-tokens 64] [--arrivals 4] [--clock cpu]

Competitors take turns, round by round, and the table has medians. Each part takes one to three minutes on two quiet
cores; `mixed` and slow peers take longer, hence `--only` and `--peers`. What llama.cpp needs: `llama_cpp_peer.py`.
On a machine that others use too, `--clock cpu` counts seconds of CPU instead of the clock's; it leaves out `mixed`,
where waiting is part of the matter, and best goes with OMP_NUM_THREADS=1.

    batch1, batch16   prompts of 128 tokens, 64 new ones each, end to end, in tokens/s; one of the competitors does
                      nothing but the engine's linear layers, a bound
    mixed             32 requests, prompts of 16 to 256, outputs of 16 to 128 tokens, arriving over 4 s, in tokens/s;
                      nobody ends before the last arrival, and the row `arrivals alone` is that bound: for SmolLM2
                      562 tokens/s; over 8 s it would be 281, and a fast engine would wait for work
    attention         one layer's decode, batch 16 x 1,024: in place, contiguous SDPA, gather + SDPA, in ms
    context           a whole step of 16 sequences at 1,024 positions of context each, and at 64, in ms
    events            steps of 16 sequences with a publisher and without, in ms
"""

import argparse
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch, for every peer: see wait_for_threads_asleep

import cpu_attention
import psutil
import torch
from throughput_bound import LinearsAlone, describe_machine
from throughput_peers import (
    MAX_BATCH,
    TUNED,
    Generate,
    GenerateBatch,
    GenerateBatchDefaults,
    Job,
    Kvscope,
    LlamaCpp,
)
from transformers import AutoModelForCausalLM

from kvscope.engine.block_tables import Extent
from kvscope.engine.build import build_engine, choose_backend, prepare
from kvscope.engine.config import EngineConfig
from kvscope.engine.model_hub import resolve_model
from kvscope.engine.model_loader import LoadedModel, load_model
from kvscope.engine.model_runner import ModelRunner
from kvscope.engine.request import Sequence as SequenceOfRequest
from kvscope.events.types import SamplingParams
from kvscope.transport.publisher import NullPublisher, Publisher

PARTS = ("batch1", "batch16", "mixed", "attention", "context", "events")
PEERS = ("kvscope", "generate", "generate_batch", "its defaults", "llama.cpp", "linears alone")


class Row(NamedTuple):
    """One comparison: figures of ours and of the peer, and a ratio that should be `at_least` or `at_most` the goal."""

    part: str
    peer: str
    ours: str
    theirs: str
    ratio: float
    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        goal, met = "", ""
        if self.at_least is not None:
            goal, met = f">= {self.at_least:g}", "yes" if self.ratio >= self.at_least else "no"
        elif self.at_most is not None:
            goal, met = f"<= {self.at_most:g}", "yes" if self.ratio <= self.at_most else "no"
        return f"{self.part:<10} {self.peer:<22} {self.ours:>11} {self.theirs:>11} {self.ratio:>7.2f}  {goal:<8} {met}"


GOALS = {
    "batch1": {"generate": 1.4, "generate_batch": None, "llama.cpp": None, "linears alone": None},
    "batch16": {
        "generate": 1.5,
        "generate_batch": 4.0,
        "its defaults": None,  # the goal is on the faster of the two
        "llama.cpp": 1.3,
        "linears alone": None,
    },
    "mixed": {"generate": 2.0, "generate_batch": 4.0, "arrivals alone": None},
}


def uniform_jobs(batch: int, vocabulary: int, new_tokens: int = 64) -> list[Job]:
    """Different prompts of one length, the same in every run, all there at the start."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(10, vocabulary - 10, (batch, 128), generator=generator).tolist()
    return [Job(0.0, prompt, new_tokens) for prompt in prompts]


def mixed_jobs(vocabulary: int, seconds_of_arrivals: float) -> list[Job]:
    """Requests of all sizes, evenly spread over so many seconds."""
    draw = random.Random(1)
    return [
        Job(
            number * seconds_of_arrivals / 32,
            [draw.randrange(10, vocabulary - 10) for _ in range(draw.randint(16, 256))],
            draw.randint(16, 128),
        )
        for number in range(32)
    ]


def timed(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    started = clock()
    result = work()
    return clock() - started, result


def cpu_seconds() -> float:
    """Of this process and its children, running ones included, in all threads."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


CLOCKS = {"wall": time.perf_counter, "cpu": cpu_seconds}


def throughput(
    part: str, peers: dict[str, Any], jobs: Sequence[Job], rounds: int, clock: Callable[[], float]
) -> Iterator[Row]:
    """Tokens per second of all peers, end to end, and how many of their sequences are those of `generate`."""
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    tokens: dict[str, list[list[int]]] = {}
    for peer in peers.values():
        peer.run([job._replace(arrival_s=0.0) for job in jobs])  # warm, its pool too
    for _ in range(rounds):
        for name, peer in peers.items():
            elapsed, tokens[name] = timed(lambda peer=peer: peer.run(jobs), clock)
            seconds[name].append(elapsed)
    num_tokens = sum(job.new_tokens for job in jobs)
    rates = {name: num_tokens / median(times) for name, times in seconds.items()}
    for name, generated in tokens.items():
        assert [len(row) for row in generated] == [job.new_tokens for job in jobs], name
        same = sum(map(list.__eq__, generated, tokens.get("generate", generated)))
        if name not in {"generate", "linears alone"} and "generate" in tokens:
            print(f"{part}: {same} of {len(jobs)} sequences of {name} are those of generate")
    if last_arrival_s := jobs[-1].arrival_s:
        rates["arrivals alone"] = num_tokens / last_arrival_s
    for name, goal in GOALS[part].items():
        if name in rates and "kvscope" in rates:
            ours, theirs = rates["kvscope"], rates[name]
            yield Row(part, name, f"{ours:.1f} tok/s", f"{theirs:.1f} tok/s", ours / theirs, at_least=goal)


def attention(dtype: torch.dtype, clock: Callable[[], float]) -> Iterator[Row]:
    """One layer's decode attention; see `cpu_attention.py` for the competitors."""
    with torch.inference_mode():
        functions = cpu_attention.competitors(MAX_BATCH, dtype)
        cpu_attention.check(functions, dtype)
        times = cpu_attention.medians(functions, clock)
    ours = times["numba, in place"]
    contiguous, gathered = times["SDPA, contiguous"], times["gather + SDPA"]
    yield Row("attention", "SDPA, contiguous", f"{ours:.2f} ms", f"{contiguous:.2f} ms", ours / contiguous, at_most=1.5)
    yield Row("attention", "gather + SDPA", f"{ours:.2f} ms", f"{gathered:.2f} ms", gathered / ours, at_least=6)


def context(loaded: LoadedModel, rounds: int, clock: Callable[[], float]) -> Iterator[Row]:
    """A decode step at two lengths of context, over KV of random numbers: what it holds costs no time."""
    steps = {length: decode_step(loaded, length) for length in (64, 1024)}
    times: dict[int, list[float]] = {length: [] for length in steps}
    for round_number in range(4 * rounds):
        for length, step in steps.items():
            elapsed, _ = timed(step, clock)
            if round_number:
                times[length].append(1e3 * elapsed)
    short, long = median(times[64]), median(times[1024])
    yield Row("context", "itself at 64", f"{long:.1f} ms", f"{short:.1f} ms", long / short, at_most=1.8)


def decode_step(loaded: LoadedModel, length: int) -> Callable[[], Any]:
    """One step of 16 sequences that have `length` positions each, blocks in random order."""
    blocks_each = -(-length // 16)
    backend = choose_backend(EngineConfig(device="cpu"))
    runner = ModelRunner(loaded.model, loaded.layers, backend, num_blocks=MAX_BATCH * blocks_each, block_size=16)
    for cache in runner.caches.values():
        cache.keys.normal_()
        cache.values.normal_()
    tables = torch.randperm(MAX_BATCH * blocks_each).view(MAX_BATCH, -1).tolist()
    extents = []
    for number, table in enumerate(tables):
        sequence = SequenceOfRequest(f"r{number}.0", 0, [7] * length)
        sequence.block_table = table
        extents.append(Extent(sequence, length - 1, length))
    return lambda: runner.run(extents, [])


def events(loaded: LoadedModel, rounds: int, clock: Callable[[], float]) -> Iterator[Row]:
    """Decode steps with a publisher and without, taking turns step by step."""
    jobs = uniform_jobs(MAX_BATCH, loaded.vocab_size)
    with contextlib.closing(Publisher("inproc://events")) as publisher:
        engines = {"on": ready_engine(loaded, jobs, publisher), "off": ready_engine(loaded, jobs, NullPublisher())}
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(10 * rounds):
            for name, engine in engines.items():
                times[name].append(1e3 * timed(engine.step, clock)[0])
    on, off = median(times["on"]), median(times["off"])
    yield Row("events", "no events", f"{on:.1f} ms", f"{off:.1f} ms", on / off, at_most=1.02)


def ready_engine(loaded: LoadedModel, jobs: Sequence[Job], sink: Any) -> Any:
    """An engine that has computed every prompt (cut to 16 tokens, to be there sooner) and decodes from now on."""
    config = EngineConfig(num_gpu_blocks_override=1024, enable_prefix_caching=False, max_num_batched_tokens=2048)
    engine = build_engine(prepare(config, loaded=loaded), sink)
    for number, job in enumerate(jobs):
        params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
        engine.submit("", params, f"r{number}", job.prompt[:16])
    engine.step()
    return engine


@contextlib.contextmanager
def competitors(options: argparse.Namespace, loaded: LoadedModel) -> Iterator[dict[str, Any]]:
    """The peers that were asked for and can run; transformers' have a model of their own, as it is."""
    dtype = getattr(torch, options.dtype)
    own = AutoModelForCausalLM.from_pretrained(resolve_model(options.model), dtype=dtype).eval()
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(contextlib.closing(Kvscope(loaded)))
        peers: dict[str, Any] = {
            "kvscope": engine,
            "generate": Generate(own),
            "its defaults": GenerateBatchDefaults(own),
            "linears alone": LinearsAlone(loaded.model),
        }
        if "generate_batch" in options.peers:
            batched = GenerateBatch(own, TUNED)
            peers["generate_batch"] = stack.enter_context(contextlib.closing(batched))
        if options.llama_python is not None:
            from gguf_file import write_gguf

            file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model.gguf"
            write_gguf(own, file)
            llama = LlamaCpp(options.llama_python, file, torch.get_num_threads())
            peers["llama.cpp"] = stack.enter_context(contextlib.closing(llama))
        yield {name: peer for name, peer in peers.items() if name in options.peers}


def rows(options: argparse.Namespace, loaded: LoadedModel) -> Iterator[Row]:
    """All comparisons that were asked for, in order."""
    parts, vocabulary = set(options.only) - ({"mixed"} if options.clock == "cpu" else set()), loaded.vocab_size
    if parts & GOALS.keys():
        with competitors(options, loaded) as peers:
            for part, jobs in (
                ("batch1", uniform_jobs(1, vocabulary, options.new_tokens)),
                ("batch16", uniform_jobs(MAX_BATCH, vocabulary, options.new_tokens)),
                ("mixed", mixed_jobs(vocabulary, options.arrivals)),
            ):
                if part in parts:
                    taking_part = {name: peer for name, peer in peers.items() if name in {"kvscope", *GOALS[part]}}
                    yield from throughput(part, taking_part, jobs, options.rounds, CLOCKS[options.clock])
    step_clock = time.process_time if options.clock == "cpu" else time.perf_counter  # finer, this process alone
    if "attention" in parts:
        yield from attention(getattr(torch, options.dtype), step_clock)
    if "context" in parts:
        yield from context(loaded, options.rounds, step_clock)
    if "events" in parts:
        yield from events(loaded, options.rounds, step_clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64, help="of batch1 and batch16")
    parser.add_argument("--arrivals", type=float, default=4.0, help="of mixed, in seconds")
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--llama-python", type=Path, help="a Python that has llama-cpp-python")
    options = parser.parse_args()
    config = EngineConfig(model=options.model, dtype=options.dtype, device="cpu")
    loaded = load_model(config, choose_backend(config))
    num_threads, clock = torch.get_num_threads(), options.clock
    print(f"{options.model}, {options.dtype}, {num_threads} threads, {options.rounds} rounds, {clock} seconds")
    print(describe_machine(getattr(torch, options.dtype), CLOCKS[clock]))
    measured = []
    for row in rows(options, loaded):
        measured.append(row)
        print(row, flush=True)
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{'part':<10} {'peer':<22} {'ours':>11} {'theirs':>11} {'ratio':>7}  goal     met    (load {load})")
    print(*measured, sep="\n")


if __name__ == "__main__":
    main()
