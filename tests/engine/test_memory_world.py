"""Pool, tables and prefix cache together: every state of a small world, and machines that search for a fault."""

from collections import deque
from itertools import permutations
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvscope.engine.block_pool import CACHED, FREE, HOLDER
from kvscope.engine.free_queue import FreeQueue
from kvscope.engine.prefix_cache import next_key, root_key
from kvscope.engine.request import Sequence

from .memory_world import MemoryWorld, fuzz

BLOCK_SIZE = 2
KINDS = (0, 1)  # of prompts: the first token, so that some begin alike and others do not


class Size(NamedTuple):
    """Of a world; a sequence becomes `max_positions` long, and looks back `window` of them or at all."""

    num_blocks: int
    num_sequences: int
    max_positions: int
    window: int | None


class Label(NamedTuple):
    """Whose KV a full block holds: logical block `depth` of sequences of this kind."""

    kind: int
    depth: int


class Held(NamedTuple):
    """A live sequence; logical blocks `0:num_released` fell out of its window."""

    kind: int
    num_computed: int
    num_released: int
    table: tuple[int, ...]


class World(NamedTuple):
    """Everything that decides what can happen next. `cached` is in the order of eviction; `indexed` are held."""

    sequences: tuple[Held | None, ...]
    cached: tuple[tuple[int, Label], ...]
    indexed: frozenset[int]


def tokens_of(kind: int, count: int) -> list[int]:
    return [kind, *([0] * (count - 1))]


def build(world: World, size: Size) -> MemoryWorld:
    """The real structures, in this state."""
    memory = MemoryWorld(size.num_blocks, BLOCK_SIZE, size.num_sequences, size.max_positions, size.window)
    pool = memory.pool
    labels = dict(world.cached)
    for place, held in enumerate(world.sequences):
        if held is None:
            continue
        tokens = tokens_of(held.kind, held.num_computed)
        sequence = Sequence(f"s{place}.0", 0, tokens)
        sequence.block_table, sequence.num_computed = list(held.table), held.num_computed
        sequence.num_indexed, sequence.num_released = held.num_computed // BLOCK_SIZE, held.num_released
        memory.live[place] = sequence
        for position in range(held.num_released * BLOCK_SIZE, held.num_computed):
            block = held.table[position // BLOCK_SIZE - held.num_released]
            memory.kv[block][position % BLOCK_SIZE] = hash(tuple(tokens[: position + 1]))
        for depth, block in enumerate(held.table, held.num_released):
            pool._states[block] += HOLDER
            if block in world.indexed:
                labels[block] = Label(held.kind, depth)
    for block, label in labels.items():
        index(memory, block, label)
    assert not pool._cached.append([block for block, _ in world.cached], pool._states, CACHED, CACHED)
    pool._free = FreeQueue([b for b in range(size.num_blocks) if pool._states[b] == FREE])
    return memory


def index(memory: MemoryWorld, block: int, label: Label) -> None:
    tokens = tokens_of(label.kind, (label.depth + 1) * BLOCK_SIZE)
    parent = key = root_key("")
    for depth in range(label.depth + 1):
        parent, key = key, next_key(key, tokens[depth * BLOCK_SIZE : (depth + 1) * BLOCK_SIZE])
    assert memory.prefixes._cache.insert(block, key, parent, tuple(tokens[label.depth * BLOCK_SIZE :]))
    memory.pool.keep(block)
    for slot in range(BLOCK_SIZE):
        memory.kv[block][slot] = hash(tuple(tokens[: label.depth * BLOCK_SIZE + slot + 1]))


def capture(memory: MemoryWorld) -> World:
    sequences = tuple(
        Held(s.prompt_token_ids[0], s.num_computed, s.num_released, tuple(s.block_table)) if s is not None else None
        for s in map(memory.live.get, range(memory.num_sequences))
    )
    cached = tuple((block, label_of(memory, block)) for block in memory.pool._cached)
    indexed = frozenset(memory.prefixes._cache._entries) - {block for block, _ in cached}
    return World(sequences, cached, indexed)


def label_of(memory: MemoryWorld, block: int) -> Label:
    """Read off the KV that is there, not off the index."""
    for kind in KINDS:
        for depth in range(memory.max_positions // BLOCK_SIZE):
            tokens = tokens_of(kind, (depth + 1) * BLOCK_SIZE)
            if memory.kv[block][-1] == hash(tuple(tokens)):
                return Label(kind, depth)
    raise AssertionError(f"P{block} is cached and holds the KV of nobody")


def canonical(world: World) -> World:
    """Neither the ids of blocks nor the order of sequences matter: the least of all renamings."""
    return min((renamed(world, order) for order in set(permutations(world.sequences))), key=rank)


def rank(world: World) -> tuple[list[tuple[object, ...]], list[int]]:
    return [held or () for held in world.sequences], sorted(world.indexed)


def renamed(world: World, order: tuple[Held | None, ...]) -> World:
    names: dict[int, int] = {}
    for held in order:
        for block in held.table if held is not None else ():
            names.setdefault(block, len(names))
    for block, _ in world.cached:
        names[block] = len(names)
    return World(
        tuple(held and Held(*held[:-1], tuple([names[block] for block in held.table])) for held in order),
        tuple((names[block], label) for block, label in world.cached),
        frozenset(names[block] for block in world.indexed),
    )


def successors(world: World, size: Size) -> list[World]:
    """Every operation on every sequence, each applied to a world of its own, all invariants checked after it."""
    found = []

    def attempt(operation: str, *arguments: object, **options: object) -> None:
        memory = build(world, size)
        if getattr(memory, operation)(*arguments, **options):
            memory.check()
            found.append(capture(memory))

    for place, held in enumerate(world.sequences):
        if held is None:
            for kind in KINDS:
                for count in range(1, size.max_positions + 1):
                    attempt("admit", place, tokens_of(kind, count))
            continue
        for count in (1, 2):
            attempt("write", place, count, 0)
        attempt("release", place, preempt=False)
        for other, theirs in enumerate(world.sequences):
            if theirs is None:
                attempt("fork", place, other)
    return found


@pytest.mark.parametrize(
    ("size", "num_states", "num_transitions"),
    [
        (Size(5, 3, 4, None), 10_659, 98_850),
        (Size(5, 3, 4, 3), 10_386, 97_836),
        (Size(4, 2, 6, 3), 6_769, 60_666),  # long enough to give up two blocks
    ],
)
def test_every_state_of_a_small_world_with_a_prefix_cache(size: Size, num_states: int, num_transitions: int) -> None:
    """Blocks of two slots: fork, append, copy-on-write, cache hit, evict, preempt, free, and falling out of a window.

    A hit leaves at least one token to compute; it is computed by the next append. Preempting and ending are the same
    to memory: the tokens that come back are those of some prompt.
    """
    start = World((None,) * size.num_sequences, (), frozenset())
    seen, frontier = {start}, deque([start])
    transitions = 0
    while frontier:
        for world in successors(frontier.popleft(), size):
            transitions += 1
            if (key := canonical(world)) not in seen:
                seen.add(key)
                frontier.append(key)
    # Fewer: an operation went missing; more: one does what it should not.
    assert (len(seen), transitions) == (num_states, num_transitions)


def test_a_short_fuzz() -> None:
    counts = fuzz(20_000, seed=1)
    assert min(counts.values()) > 0  # everything happens: hits, copies, evictions, forks


PLACES, TOKENS = st.integers(0, 3), st.integers(0, 1)


class MemoryMachine(RuleBasedStateMachine):
    """Four sequences on a pool that is always too small; hypothesis shrinks what it finds to a few steps."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), window=st.none() | st.integers(1, 9))
    def start(self, num_blocks: int, block_size: int, window: int | None) -> None:
        self.world = MemoryWorld(num_blocks, block_size, num_sequences=4, max_positions=16, window=window)

    @rule(place=PLACES, tokens=st.lists(TOKENS, min_size=1, max_size=16))
    def admit(self, place: int, tokens: list[int]) -> None:
        self.world.admit(place, tokens)

    @rule(place=PLACES, count=st.integers(1, 5), token=TOKENS)
    def write(self, place: int, count: int, token: int) -> None:
        self.world.write(place, count, token)

    @rule(place=PLACES, other=PLACES)
    def fork(self, place: int, other: int) -> None:
        self.world.fork(place, other)

    @rule(place=PLACES, preempt=st.booleans())
    def release(self, place: int, preempt: bool) -> None:
        self.world.release(place, preempt=preempt)

    @rule(place=PLACES)
    def resume(self, place: int) -> None:
        self.world.resume(place)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


MemoryMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
test_a_machine_that_searches_for_a_fault = MemoryMachine.TestCase
