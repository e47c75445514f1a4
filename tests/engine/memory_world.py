"""Pool, tables and prefix cache under random operations, with the KV in every slot written down beside them.

Used by the stateful test, and as a fuzzer of its own:

    python tests/engine/memory_world.py [--operations 10000000] [--seed 0]
"""

import argparse
import random
import time

from kvscope.engine.block_pool import BlockPool
from kvscope.engine.block_tables import BlockTables, Extent
from kvscope.engine.prefixes import Prefixes
from kvscope.engine.request import Sequence
from kvscope.events import types as ev
from kvscope.events.types import Event

ATTEMPTS_PER_WORLD = 2_000
ATTEMPTS_PER_CHECK = 16  # of the fuzzer: the check is O(world)


class MemoryWorld:
    """What a step does to memory, one sequence at a time.

    The KV of a position depends on all tokens up to it, so what a slot holds here is their hash.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_sequences: int, max_positions: int, window: int | None = None
    ) -> None:
        self.events: list[Event] = []
        self.pool = BlockPool(num_blocks, block_size)
        self.prefixes = Prefixes(self.pool, self.events)
        self.tables = BlockTables(self.pool, self.events, self.prefixes, window)
        self.num_sequences, self.max_positions = num_sequences, max_positions
        self.live: dict[int, Sequence] = {}
        self.preempted: dict[int, list[int]] = {}  # tokens of sequences that lost their blocks
        self.kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.num_started = 0

    def admit(self, place: int, tokens: list[int]) -> bool:
        """A prompt, or a preempted sequence's tokens, begins with whatever the cache knows of it."""
        if place in self.live or not tokens or len(tokens) > self.max_positions:
            return False
        sequence = Sequence(f"r{self.num_started}.0", 0, list(tokens))
        self.num_started += 1
        idle_before = {block for block in range(self.pool.num_blocks) if self.pool.ref_count(block) == 0}
        free_before = set(self.pool._free)
        self.prefixes.reuse(sequence, len(tokens), "")
        assert sequence.num_computed < len(tokens), "one token is always computed"
        assert free_before.isdisjoint(sequence.block_table), "a free block has no content"
        assert all(self.pool.ref_count(b) == 1 for b in sequence.block_table if b in idle_before)
        assert sequence.num_released == 0
        self._read(sequence)
        self.tables.release_out_of_window(sequence)
        if sequence.block_table:
            self._check_released(sequence)
            self.live[place] = sequence
            return True
        return self._write(place, sequence, len(tokens))

    def write(self, place: int, num_new: int, token: int) -> bool:
        """Compute what is not computed yet, and `num_new` generated tokens more."""
        sequence = self.live.get(place)
        if sequence is None or sequence.num_tokens + num_new > self.max_positions:
            return False
        sequence.generated += [token] * num_new
        if self._write(place, sequence, sequence.num_tokens):
            return True
        del sequence.generated[len(sequence.generated) - num_new :]
        return False

    def fork(self, place: int, other: int) -> bool:
        parent = self.live.get(place)
        if parent is None or other in self.live or parent.num_computed < parent.num_tokens:
            return False
        child = Sequence(f"r{self.num_started}.0", 0, parent.prompt_token_ids, generated=list(parent.generated))
        self.num_started += 1
        available = self.pool.num_available_blocks
        self.tables.fork(parent, child)
        assert self.pool.num_available_blocks == available, "a fork copies nothing"
        self.live[other] = child
        return True

    def release(self, place: int, *, preempt: bool) -> bool:
        """End, or lose all blocks and remember the tokens."""
        sequence = self.live.pop(place, None)
        if sequence is None:
            return False
        if preempt:
            self.preempted[place] = sequence.tokens(0, sequence.num_tokens)
        held = {block for other in self.live.values() for block in other.block_table}
        table = sequence.block_table
        freed = self.tables.release(sequence)
        assert freed == [block for block in table if block not in held]
        assert all(self.pool.is_cached(block) == (block in self.prefixes._cache) for block in freed)
        return True

    def resume(self, place: int) -> bool:
        tokens = self.preempted.get(place)
        if tokens is None or not self.admit(place, tokens):
            return False
        del self.preempted[place]
        return True

    def check(self) -> None:
        """Invariants 1 to 7 on the whole world; the events are those of this step."""
        live = list(self.live.values())
        assert self.tables.check_integrity(live) == []
        for sequence in live:
            self._read(sequence)
        for block in range(self.pool.num_blocks):
            assert not (self.pool.is_cached(block) and block not in self.prefixes._cache)
        if not live:
            assert self.pool.num_available_blocks == self.pool.num_blocks

    def _write(self, place: int, sequence: Sequence, stop: int) -> bool:
        """What the scheduler, the runner and the commit do; False, and nothing done, when there is no room."""
        extent = Extent(sequence, sequence.num_computed, stop)
        needed, available = self.tables.blocks_needed([extent]), self.pool.num_available_blocks
        if needed > available:
            return False
        shared = {block for other in self.live.values() if other is not sequence for block in other.block_table}
        for source, target in self.tables.prepare(extent):
            assert target not in shared
            self.kv[target] = list(self.kv[source])
        assert available - self.pool.num_available_blocks == needed, "the forecast is exact"
        tokens, block_size = sequence.tokens(0, stop), self.pool.block_size
        for position in range(extent.start, stop):
            block = sequence.block_table[position // block_size - sequence.num_released]
            assert self.pool.ref_count(block) == 1, "nobody else holds what is written"
            assert block not in self.prefixes._cache, "what is cached is never written again"
            self.kv[block][position % block_size] = hash(tuple(tokens[: position + 1]))
        sequence.num_computed = stop
        self._read(sequence, extent.start)
        self.prefixes.index_written(sequence, "")
        self.tables.release_out_of_window(sequence)
        self._check_released(sequence)
        self.live[place] = sequence
        return True

    def _read(self, sequence: Sequence, first_query: int | None = None) -> None:
        """Every position that this query, else the next one, looks back to holds the KV of exactly these tokens."""
        tokens, block_size, window = sequence.tokens(0, sequence.num_computed), self.pool.block_size, self.tables.window
        query = sequence.num_computed if first_query is None else first_query
        for position in range(max(query - window + 1, 0) if window is not None else 0, sequence.num_computed):
            place = position // block_size - sequence.num_released
            assert place >= 0, f"{sequence.sequence_id} has given up what it reads"
            stored = self.kv[sequence.block_table[place]][position % block_size]
            assert stored == hash(tuple(tokens[: position + 1])), f"{sequence.sequence_id} reads foreign KV"

    def _check_released(self, sequence: Sequence) -> None:
        """Everything before the first position that the next token reads; who has KV holds a block."""
        window, first_read = self.tables.window, 0
        if window is not None:
            first_read = max(sequence.num_computed - max(window, 2) + 1, 0)
        assert sequence.num_released == first_read // self.pool.block_size
        assert sequence.block_table


def random_operation(world: MemoryWorld, rng: random.Random) -> bool:
    """Whether it could be done."""
    place = rng.randrange(world.num_sequences)
    if place not in world.live:
        if place in world.preempted and rng.random() < 0.5:
            return world.resume(place)
        return world.admit(place, [rng.randrange(2) for _ in range(rng.randint(1, world.max_positions))])
    kind = rng.random()
    if kind < 0.7:
        return world.write(place, rng.randint(1, 4), rng.randrange(2))
    if kind < 0.85:
        return world.fork(place, rng.randrange(world.num_sequences))
    return world.release(place, preempt=rng.random() < 0.5)


def fuzz(num_operations: int, seed: int) -> dict[str, int]:
    """Worlds of 2 to 24 blocks, one after the other, each from a seed that is told when it fails."""
    counts = {"operations": 0, "worlds": 0, "hits": 0, "copies": 0, "evicted": 0, "shared": 0, "out": 0}
    while counts["operations"] < num_operations:
        world_seed = seed * 1_000_003 + counts["worlds"]
        rng = random.Random(world_seed)
        sizes = rng.randint(2, 24), rng.randint(1, 4), rng.randint(1, 8), rng.randint(4, 24)
        world = MemoryWorld(*sizes, window=rng.choice([None, rng.randint(1, 9)]))
        try:
            for number in range(ATTEMPTS_PER_WORLD):
                counts["operations"] += random_operation(world, rng)
                if number % ATTEMPTS_PER_CHECK == 0:
                    world.check()
                    _count(world, counts)
            for place in list(world.live):
                world.release(place, preempt=False)
            world.check()
        except BaseException as error:
            error.add_note(f"in the world of seed {world_seed}, attempt {number}")
            raise
        counts["worlds"] += 1
    return counts


def _count(world: MemoryWorld, counts: dict[str, int]) -> None:
    for event in world.events:
        counts["hits"] += isinstance(event, ev.BlocksReused)
        counts["copies"] += isinstance(event, ev.BlockCopied)
        counts["evicted"] += isinstance(event, ev.BlocksEvicted)
        counts["shared"] += isinstance(event, ev.BlocksShared)
        counts["out"] += isinstance(event, ev.BlocksOutOfWindow)
    world.events.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.perf_counter()
    for name, count in fuzz(args.operations, args.seed).items():
        print(f"{name:<12}{count:>14,}")
    print(f"no fault, seed {args.seed}, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
