"""The prefix cache at work on sequences and the pool: lookup at admission, reuse, indexing, eviction.

The index itself is `PrefixCache`; here are its uses, each recorded as an event.

Blocks that fell out of a sliding window stay cached like others, but a hit still takes the whole chain from position 0
(and gives back at once what no layer reads). The window's own blocks would do; but then the first block that was not
hit, and with it the reason of a miss, would mean nothing definite. The price: a chain whose head has been evicted is of
no use.
"""

from kvscope.engine.block_pool import BlockPool
from kvscope.engine.prefix_cache import BlockKey, Eviction, Match, PrefixCache, next_key, root_key
from kvscope.engine.request import Sequence
from kvscope.events import types as ev
from kvscope.events.types import Event


class Prefixes:
    """Decides which blocks a sequence may take over instead of computing them."""

    def __init__(self, pool: BlockPool, events: list[Event]) -> None:
        self.step = 0  # the engine's, for evictions to name
        self._pool = pool
        self._events = events
        self._cache = PrefixCache(pool.num_blocks)

    def match(self, sequence: Sequence, num_positions: int, salt: str) -> Match:
        """What is known of positions `0:num_positions`, leaving at least one to compute. Does not mutate."""
        max_blocks = (num_positions - 1) // self._pool.block_size
        root, keys = self._keys(sequence, max_blocks, salt)
        return self._cache.match(root, keys, sequence.tokens(0, num_positions), self._pool.block_size)

    def reuse(self, sequence: Sequence, num_positions: int, salt: str) -> None:
        """Let the table of a sequence without blocks begin with what is known; say what was not, and why."""
        match = self.match(sequence, num_positions, salt)
        num_hit = len(match.block_ids) * self._pool.block_size
        self._events.append(
            ev.PrefixLookup(
                request_id=sequence.sequence_id.rpartition(".")[0],
                num_tokens=num_positions,
                num_hit_tokens=num_hit,
                miss=self._miss(match, num_positions),
                num_common_tokens=match.num_common_tokens,
                evicted_at_step=match.eviction.step if match.eviction else None,
                evicted_for=match.eviction.sequence_id if match.eviction else None,
            )
        )
        if not match.block_ids:
            return
        self._pool.reuse(match.block_ids)
        sequence.block_table = match.block_ids
        sequence.num_computed, sequence.num_indexed = num_hit, len(match.block_ids)
        self._events.append(
            ev.BlocksReused(sequence_id=sequence.sequence_id, block_ids=list(match.block_ids), num_tokens=num_hit)
        )

    def index_written(self, sequence: Sequence, salt: str) -> None:
        """Index the sequence's full blocks, once the KV in them is written."""
        block_size = self._pool.block_size
        num_full = sequence.num_computed // block_size
        root, keys = self._keys(sequence, num_full, salt)
        for logical in range(sequence.num_indexed, num_full):
            parent = keys[logical - 1] if logical else root
            tokens = tuple(sequence.tokens(logical * block_size, (logical + 1) * block_size))
            block_id = sequence.block_table[logical - sequence.num_released]
            if self._cache.insert(block_id, keys[logical], parent, tokens):
                self._pool.keep(block_id)
        sequence.num_indexed = num_full

    def evict(self, block_ids: list[int], for_sequence_id: str) -> None:
        """Forget blocks that the pool has just handed out again."""
        self._events.append(ev.BlocksEvicted(block_ids=block_ids, for_sequence_id=for_sequence_id))
        for block_id in block_ids:
            self._cache.evict(block_id, Eviction(self.step, for_sequence_id))

    def _keys(self, sequence: Sequence, num_blocks: int, salt: str) -> tuple[BlockKey, list[BlockKey]]:
        """The root and the keys of the sequence's first blocks; each is computed once."""
        block_size, root = self._pool.block_size, root_key(salt)
        keys = sequence.block_keys
        for logical in range(len(keys), num_blocks):
            tokens = sequence.tokens(logical * block_size, (logical + 1) * block_size)
            keys.append(next_key(keys[-1] if keys else root, tokens))
        return root, keys[:num_blocks]

    def _miss(self, match: Match, num_positions: int) -> ev.MissKind | None:
        """Why no more was known; None when everything was that may be reused."""
        if match.block_ids and len(match.block_ids) == (num_positions - 1) // self._pool.block_size:
            return None
        if match.eviction is not None:
            return "evicted"
        return "shorter_than_block" if match.num_common_tokens else "nothing_shared"
