"""What the engine costs without a model: sequence steps per second with 64 sequences running; prints one table.

    python benchmarks/simulation.py [--requests 192] [--output 200] [--rounds 5]

A made-up trace, everybody there from the start, goes through scheduler, block tables, pool and prefix cache, as
`kvscope simulate` does it. Every event is made; they go nowhere, or the auditor checks and folds each, or all are
recorded. CPU time is that of the process; a figure is the median of the rounds, which are interleaved.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvscope.engine.simulation.command import Settings, make_info
from kvscope.engine.simulation.cost import StepCost
from kvscope.engine.simulation.recording import RecordingSink
from kvscope.engine.simulation.simulation import Simulation
from kvscope.engine.simulation.synthetic import make_trace, parse_synthetic
from kvscope.engine.sinks import AuditSink
from kvscope.transport.publisher import EventSink, NullPublisher
from kvscope.transport.recording import open_recorder

HASH_CHUNK = 512  # prompt tokens
Rates = tuple[float, float]  # sequence steps per second of CPU time, and of the clock on the wall


def measure(synthetic: str, sink: EventSink, finish: Callable[[], None]) -> Rates:
    """`finish` ends what the sink has begun; it counts."""
    settings = Settings(
        trace=None, synthetic=synthetic, num_blocks=10_000, block_size=16, max_num_seqs=64,
        max_num_batched_tokens=2_048, max_model_len=None, prefix_caching=True, max_requests=None, max_waiting=1_000,
        speed=1.0, chunk_size=HASH_CHUNK, step_us=8_000, token_us=40, context_us=0,
    )  # fmt: skip
    trace = make_trace(parse_synthetic(synthetic), HASH_CHUNK)
    cost = StepCost(base_ns=8_000_000, per_token_ns=40_000, per_context_token_ns=0)
    simulation = Simulation(trace, make_info(settings, trace), sink, cost, settings.max_waiting)
    gc.collect()
    started_cpu, started = time.process_time(), time.perf_counter()
    for _ in simulation.steps():
        pass
    simulation.engine.stop("the trace has ended")
    finish()
    cpu_s, wall_s = time.process_time() - started_cpu, time.perf_counter() - started
    return simulation.meter.num_sequence_steps / cpu_s, simulation.meter.num_sequence_steps / wall_s


def measure_all(synthetic: str, path: Path) -> dict[str, Rates]:
    recorder = open_recorder(path, force=True)
    return {
        "events made": measure(synthetic, NullPublisher(), lambda: None),
        "and audited": measure(synthetic, AuditSink(), lambda: None),
        "and recorded": measure(synthetic, RecordingSink(recorder), recorder.close),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=200, help="tokens, on average")
    parser.add_argument("--output", type=int, default=200, help="tokens, on average")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    synthetic = f"requests={args.requests} rate=0 prompt={args.prompt} output={args.output} prefixes=8 seed=0"
    with tempfile.TemporaryDirectory() as directory:
        rounds = [measure_all(synthetic, Path(directory) / "simulation.mcap") for _ in range(args.rounds)]
    print(f"{'sequence steps per second':<26}{'of CPU':>12}{'wall':>12}")
    for name in rounds[0]:
        cpu, wall = (statistics.median(rates[name][place] for rates in rounds) for place in (0, 1))
        print(f"{name:<26}{cpu:>12,.0f}{wall:>12,.0f}")


if __name__ == "__main__":
    main()
