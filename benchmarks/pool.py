"""The block pool against vLLM's, in turns in one process; prints one table.

    pip download --no-deps vllm && unzip -q vllm-*.whl 'vllm/v1/core/*' 'vllm/distributed/*' 'vllm/utils/*' -d vllm_src
    python benchmarks/pool.py --vllm vllm_src

Ours is `BlockTables` as the engine calls it, each call with its event; with events off, the same work but for the
event. vLLM's `BlockPool` (prefix caching on) records no event here, and keeps no tables. Only the modules of its pool
are loaded, the rest of vLLM is stubbed. Without --vllm our side alone.

In each round all pools are made first, then used a few calls at a time in a drawn order. So all of them meet the same
caches, as an engine's pool does after a forward pass; a pool measured just after it was made is in them if it is small.
A figure is the median of the rounds, a ratio the median of the rounds' ratios: the machine's mood cancels out.
"""

import argparse
import gc
import importlib.machinery
import importlib.util
import random
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvscope.engine.block_pool import BlockPool
from kvscope.engine.block_tables import BlockTables
from kvscope.engine.request import Sequence
from kvscope.events import types as ev

BLOCK_SIZE, RUN, NUM_RUNS = 16, 64, 200  # slots per block, blocks per call, calls per measurement
NUM_TURNS = 10  # of each measurement
VLLM_MODULES = {
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_utils",
    "vllm.distributed.kv_events",
    "vllm.utils.math_utils",
}

Figures = dict[str, float]


class Phase(NamedTuple):
    """What is measured: one call for each item."""

    name: str
    call: Callable[[Any], object]
    items: list[Any]
    blocks_per_item: int


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
    """The same without events: line by line what `BlockTables` does otherwise."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self._tables = BlockTables(self.pool, [])

    def grow(self, sequence: Sequence, num_positions: int) -> None:
        table = sequence.block_table
        first = sequence.num_released + len(table)
        count = self.pool.blocks_for(num_positions) - first
        if count <= 0:
            return
        block_ids = self._tables.allocate(count, sequence)
        sequence.block_table = [*table, *block_ids] if table else block_ids

    def release(self, sequence: Sequence) -> list[int]:
        if not sequence.block_table:
            return []
        freed, _ = self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = sequence.num_indexed = sequence.num_released = 0
        return freed

    def hit(self, pair: tuple[Sequence, list[int]]) -> None:
        sequence, block_ids = pair
        self.pool.reuse(block_ids)
        sequence.block_table = block_ids


def phases_of(ours: Ours | Silent) -> Iterator[Phase]:
    """Allocate, free into the cache, hit, and allocate one by one; each builds on the one before it."""
    sequences = [Sequence(f"r{number}.0", 0, []) for number in range(NUM_RUNS)]
    yield Phase("allocate 64", lambda sequence: ours.grow(sequence, RUN * BLOCK_SIZE), sequences, RUN)
    runs = [sequence.block_table for sequence in sequences]
    for block_id in (block_id for run in runs for block_id in run):
        ours.pool.keep(block_id)
    yield Phase("free 64", ours.release, sequences, RUN)
    yield Phase("cache hit 64", ours.hit, list(zip(sequences, runs, strict=True)), RUN)
    single = [Sequence(f"s{number}.0", 0, []) for number in range(NUM_RUNS * 8)]
    yield Phase("allocate 1", lambda sequence: ours.grow(sequence, 1), single, 1)


def phases_of_vllm(pool: Any) -> Iterator[Phase]:
    runs: list[Any] = []
    yield Phase("allocate 64", lambda _: runs.append(pool.get_new_blocks(RUN)), [None] * NUM_RUNS, RUN)
    yield Phase("free 64", lambda run: pool.free_blocks(reversed(run)), runs, RUN)
    yield Phase("cache hit 64", pool.touch, runs, RUN)
    yield Phase("allocate 1", lambda _: pool.get_new_blocks(1), [None] * (NUM_RUNS * 8), 1)


def measure(sides: list[Iterator[Phase]], rng: random.Random) -> list[Figures]:
    """Nanoseconds of this thread's CPU time per block; the garbage collector waits until a phase is over."""
    figures: list[Figures] = [{} for _ in sides]
    for phases in zip(*sides, strict=True):
        gc.collect()
        gc.disable()
        elapsed = take_turns(phases, rng)
        gc.enable()
        for side, phase, elapsed_ns in zip(figures, phases, elapsed, strict=True):
            side[phase.name] = elapsed_ns / (len(phase.items) * phase.blocks_per_item)
    return figures


def take_turns(phases: tuple[Phase, ...], rng: random.Random) -> list[int]:
    """Nanoseconds of each; who comes after whom is drawn anew for every turn."""
    elapsed = [0] * len(phases)
    for turn in range(NUM_TURNS):
        for place in rng.sample(range(len(phases)), len(phases)):
            _, call, items, _ = phases[place]
            size = len(items) // NUM_TURNS
            part = items[turn * size : (turn + 1) * size]
            started = time.thread_time_ns()
            for item in part:
                call(item)
            elapsed[place] += time.thread_time_ns() - started
    return elapsed


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
    rng, rounds = random.Random(0), []
    for _ in range(args.rounds):
        sides = [phases_of(pool) for pool in (Ours(args.blocks), Silent(args.blocks), Ours(10 * args.blocks))]
        if vllm_pool is not None:
            sides.append(phases_of_vllm(vllm_pool(args.blocks, True, BLOCK_SIZE)))
        rounds.append(measure(sides, rng))
    ours, silent, large, *others = (list(figures) for figures in zip(*rounds, strict=True))
    columns = {"ours": medians(ours)}
    for theirs in others:
        columns |= {"vLLM": medians(theirs), "vLLM / ours": ratios(theirs, ours)}
    columns["events on / off"] = ratios(ours, silent)
    columns[f"{10 * args.blocks:,} / {args.blocks:,}"] = ratios(large, ours)
    print(f"{args.blocks:,} blocks, {args.rounds} rounds")
    print_table(columns)


if __name__ == "__main__":
    main()
