"""The prefix cache: which physical block holds the KV of which tokens, in which context.

A full block is keyed by a SHA-256 chain over (key of the block before it, its own tokens); the first block's
predecessor is the salt. So equal keys mean equal tokens from the very beginning, which is what makes KV equal. Tokens
and predecessor are compared on a hit all the same. After vLLM's automatic prefix caching.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, NewType

BlockKey = NewType("BlockKey", bytes)

MAX_REMEMBERED_EVICTIONS = 65_536
REMEMBERED_EVICTIONS_PER_BLOCK = 16  # so that a small pool's memory of what it lost is soon full, and small too
MAX_SIBLINGS_COMPARED = 256  # when looking for the longest near miss


class _Entry(NamedTuple):
    key: BlockKey
    parent: BlockKey
    tokens: tuple[int, ...]


class Eviction(NamedTuple):
    """When a block's content was given up, and for whom."""

    step: int
    sequence_id: str


class Match(NamedTuple):
    """The cached beginning of a token sequence, and why it ends there.

    `num_common_tokens` is how far the best cached block agrees with the first block that was not hit; `eviction` is
    set when that very block was here once.
    """

    block_ids: list[int]
    num_common_tokens: int
    eviction: Eviction | None


@lru_cache(1_024)
def root_key(salt: str) -> BlockKey:
    """The predecessor of every first block under this salt."""
    return BlockKey(hashlib.sha256(b"kvscope prefix\0" + salt.encode()).digest())


def next_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """The key of a full block."""
    return BlockKey(hashlib.sha256(parent + array("q", tokens).tobytes()).digest())


class PrefixCache:
    """An index over blocks; whether a block is held or only kept is the pool's business."""

    def __init__(self, num_blocks: int) -> None:
        """For a pool of that many blocks."""
        self._max_evictions = min(REMEMBERED_EVICTIONS_PER_BLOCK * num_blocks, MAX_REMEMBERED_EVICTIONS)
        self._entries: dict[int, _Entry] = {}
        self._blocks: dict[BlockKey, int] = {}
        self._children: dict[BlockKey, dict[int, None]] = {}
        self._evictions: OrderedDict[BlockKey, Eviction] = OrderedDict()

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def insert(self, block_id: int, key: BlockKey, parent: BlockKey, tokens: tuple[int, ...]) -> bool:
        """Remember a full block whose KV is written. False: another block already holds the same."""
        if key in self._blocks:
            return False
        self._entries[block_id] = _Entry(key, parent, tokens)
        self._blocks[key] = block_id
        self._children.setdefault(parent, {})[block_id] = None
        self._evictions.pop(key, None)
        return True

    def evict(self, block_id: int, eviction: Eviction) -> None:
        """Forget a block that is about to be overwritten."""
        key, parent, _ = self._entries.pop(block_id)
        del self._blocks[key]
        siblings = self._children[parent]
        del siblings[block_id]
        if not siblings:
            del self._children[parent]
        self._evictions[key] = eviction
        if len(self._evictions) > self._max_evictions:
            self._evictions.popitem(last=False)

    def match(self, root: BlockKey, keys: Sequence[BlockKey], tokens: Sequence[int], block_size: int) -> Match:
        """The longest cached run of the blocks named by `keys`; `tokens` are the tokens from position 0 on."""
        block_ids: list[int] = []
        parent = root
        for key in keys:
            start = len(block_ids) * block_size
            block_id = self._blocks.get(key)
            if block_id is None or not self._holds(block_id, parent, tokens[start : start + block_size]):
                return Match(
                    block_ids, self._common(parent, tokens[start : start + block_size]), self._evictions.get(key)
                )
            block_ids.append(block_id)
            parent = key
        start = len(block_ids) * block_size
        return Match(block_ids, self._common(parent, tokens[start : start + block_size]), None)

    def _holds(self, block_id: int, parent: BlockKey, tokens: Sequence[int]) -> bool:
        entry = self._entries[block_id]
        return entry.parent == parent and entry.tokens == tuple(tokens)

    def _common(self, parent: BlockKey, tokens: Sequence[int]) -> int:
        """The longest beginning that any cached successor of `parent` shares with the tokens."""
        best = 0
        for block_id, _ in zip(self._children.get(parent, {}), range(MAX_SIBLINGS_COMPARED), strict=False):
            common = 0
            for ours, theirs in zip(tokens, self._entries[block_id].tokens, strict=False):
                if ours != theirs:
                    break
                common += 1
            best = max(best, common)
        return best
