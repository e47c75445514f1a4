"""The block pool against vLLM's, interleaved in one process; prints one table.

    pip download --no-deps vllm && unzip -q vllm-*.whl 'vllm/v1/core/*' 'vllm/distributed/*' 'vllm/utils/*' -d vllm_src
    python benchmarks/pool.py --vllm vllm_src

Ours is `BlockTables` as the engine calls it, each call with its event; with events off, the same calls of the pool, and
the same fields of the sequence set. vLLM's `BlockPool` (prefix caching on) records no event here, and keeps no tables.
Only the modules of its pool are loaded, the rest of vLLM is stubbed. Without --vllm our side alone.
A figure is the median of the rounds, a ratio the median of the rounds' ratios: the machine's mood cancels out.
"""

import argparse
import gc
import importlib.machinery
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvscope.engine.block_pool import BlockPool
from kvscope.engine.block_tables import BlockTables
from kvscope.engine.request import Sequence
from kvscope.events import types as ev

BLOCK_SIZE, RUN, NUM_RUNS = 16, 64, 200  # slots per block, blocks per call, calls per measurement
VLLM_MODULES = {
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_utils",
    "vllm.distributed.kv_events",
    "vllm.utils.math_utils",
}

Figures = dict[str, float]


def per_block(call: Callable[[Any], object], items: list[Any], blocks_per_item: int) -> float:
    """Nanoseconds of this thread's CPU time per block; the garbage collector waits until afterwards."""
    gc.collect()
    gc.disable()
    started = time.thread_time_ns()
    for item in items:
        call(item)
    elapsed = time.thread_time_ns() - started
    gc.enable()
    return elapsed / (len(items) * blocks_per_item)


class Ours:
    """The engine's calls, each with its event."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self._events: list[ev.Event] = []
        self._tables = BlockTables(self.pool, self._events)
        self.grow, self.release = self._tables.grow, self._tables.release

    def hit(self, pair: tuple[Sequence, list[int]]) -> None:
        sequence, block_ids = pair
        self.pool.reuse(block_ids)
        sequence.block_table = block_ids
        self._events.append(
            ev.BlocksReused(sequence_id=sequence.sequence_id, block_ids=block_ids, num_tokens=RUN * BLOCK_SIZE)
        )


class Silent:
    """The same without events."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)

    def grow(self, sequence: Sequence, num_positions: int) -> None:
        table = sequence.block_table
        block_ids, _ = self.pool.allocate(self.pool.blocks_for(num_positions) - len(table))
        sequence.block_table = [*table, *block_ids] if table else block_ids

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = sequence.num_indexed = 0

    def hit(self, pair: tuple[Sequence, list[int]]) -> None:
        sequence, block_ids = pair
        self.pool.reuse(block_ids)
        sequence.block_table = block_ids


def measure_ours(ours: Ours | Silent) -> Figures:
    """Allocate, free into the cache, hit, and allocate one by one."""
    sequences = [Sequence(f"r{number}.0", 0, []) for number in range(NUM_RUNS)]
    figures = {"allocate 64": per_block(lambda s: ours.grow(s, RUN * BLOCK_SIZE), sequences, RUN)}
    runs = [sequence.block_table for sequence in sequences]
    for block_id in (block_id for run in runs for block_id in run):
        ours.pool.keep(block_id)
    figures["free 64"] = per_block(ours.release, sequences, RUN)
    figures["cache hit 64"] = per_block(ours.hit, list(zip(sequences, runs, strict=True)), RUN)
    single = [Sequence(f"s{number}.0", 0, []) for number in range(NUM_RUNS * 8)]
    figures["allocate 1"] = per_block(lambda s: ours.grow(s, 1), single, 1)
    return figures


def measure_vllm(block_pool: Any, num_blocks: int) -> Figures:
    pool = block_pool(num_blocks, True, BLOCK_SIZE)
    runs: list[Any] = []
    figures = {"allocate 64": per_block(lambda _: runs.append(pool.get_new_blocks(RUN)), [None] * NUM_RUNS, RUN)}
    figures["free 64"] = per_block(lambda run: pool.free_blocks(reversed(run)), runs, RUN)
    figures["cache hit 64"] = per_block(pool.touch, runs, RUN)
    figures["allocate 1"] = per_block(lambda _: pool.get_new_blocks(1), [None] * (NUM_RUNS * 8), 1)
    return figures


class _Anything:
    """A stub for what the pool's modules import and the pool never uses."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        stub = (lambda *_, **__: _Anything()) if name == "init_logger" else type(name, (_Anything,), {})
        setattr(self, name, stub)
        return stub


class _VllmFinder:
    """Finds the pool's modules in the unpacked wheel, and stubs for every other module of vLLM."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name in VLLM_MODULES:
            return importlib.util.spec_from_file_location(name, self._source / f"{name.replace('.', '/')}.py")
        if name == "vllm" or name.startswith("vllm."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StubModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, _: types.ModuleType) -> None: ...


def load_vllm(source: Path) -> Any:
    """vLLM's BlockPool class."""
    sys.meta_path.insert(0, _VllmFinder(source))  # type: ignore[arg-type]
    return importlib.import_module("vllm.v1.core.block_pool").BlockPool


def medians(rounds: list[Figures]) -> Figures:
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def ratios(above: list[Figures], below: list[Figures]) -> Figures:
    pairs = list(zip(above, below, strict=True))
    return {name: statistics.median(a[name] / b[name] for a, b in pairs) for name in above[0]}


def print_table(columns: dict[str, Figures]) -> None:
    print("ns per block".ljust(14) + "".join(title.rjust(18) for title in columns))
    for name in next(iter(columns.values())):
        cells = (f"{column[name]:.2f}x" if "/" in title else f"{column[name]:.0f}" for title, column in columns.items())
        print(name.ljust(14) + "".join(cell.rjust(18) for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, help="an unpacked vLLM wheel")
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    vllm_pool = load_vllm(args.vllm) if args.vllm is not None else None
    ours, silent, large, theirs = [], [], [], []
    for number in range(args.rounds):
        pair = [(ours, Ours), (silent, Silent)]
        for figures, make in pair if number % 2 else pair[::-1]:  # whoever is first finds the caches cold
            figures.append(measure_ours(make(args.blocks)))
        large.append(measure_ours(Ours(10 * args.blocks)))
        if vllm_pool is not None:
            theirs.append(measure_vllm(vllm_pool, args.blocks))
    columns = {"ours": medians(ours)}
    if theirs:
        columns |= {"vLLM": medians(theirs), "vLLM / ours": ratios(theirs, ours)}
    columns["events on / off"] = ratios(ours, silent)
    columns[f"{10 * args.blocks:,} / {args.blocks:,}"] = ratios(large, ours)
    print(f"{args.blocks:,} blocks, {args.rounds} rounds")
    print_table(columns)


if __name__ == "__main__":
    main()
