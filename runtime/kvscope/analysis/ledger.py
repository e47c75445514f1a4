"""The waste ledger: what a state's memory is spent on, what sharing spares, and what reserving maxima would take.

A pure function of the state. Everything is counted in slots or blocks of held memory:

    unwritten    reserved slots without KV; `slack` are those of them in the last block of a table
    duplicates   full blocks whose tokens, from the first on, are those of another held block
    saved        table entries that need no block of their own: see `Saved`
    maximum      what `--allocator contiguous` would hold: whole blocks for each sequence's possible length
"""

from typing import NamedTuple

from kvscope.events.state import EngineState, RequestState, SequenceState

MAX_IDLE_KEYS = 65_536  # of blocks that nobody holds any more


class Saved(NamedTuple):
    """Blocks that would be held besides, if every table needed its own; apart by what spared them."""

    sharing: int = 0  # full blocks in common to candidates of one request
    copy_on_write: int = 0  # partly written ones: a fork that copies at once would have copied them
    prefix_cache: int = 0  # blocks in common to several requests

    @property
    def total(self) -> int:
        return self.sharing + self.copy_on_write + self.prefix_cache


class Maximum(NamedTuple):
    """The same requests, each sequence with all the room it may ever need, in one piece and for itself alone."""

    slots: int = 0
    num_fitting: int = 0  # of those requests, in order of arrival, until the first that would not fit


class Ledger(NamedTuple):
    """One moment's account; `num_requests` hold blocks."""

    step: int = 0
    num_blocks: int = 0
    block_size: int = 1
    bytes_per_block: int = 0
    num_requests: int = 0
    held: int = 0
    written_slots: int = 0  # of held blocks
    slack_slots: int = 0
    duplicates: int = 0
    saved: Saved = Saved()
    maximum: Maximum = Maximum()

    @property
    def unwritten_slots(self) -> int:
        return self.held * self.block_size - self.written_slots

    def num_bytes(self, num_slots: float) -> float:
        return num_slots * self.bytes_per_block / self.block_size

    def more_requests(self, num_slots: float) -> float:
        """How many requests like the present ones, on average, this room would hold."""
        return num_slots * self.num_requests / (self.held * self.block_size) if self.held else 0.0


class Bookkeeper:
    """Draws up ledgers. Remembers which tokens are in which full block, so that only new blocks are looked at."""

    def __init__(self) -> None:
        self._epoch = b""
        self._keys: dict[tuple[object, tuple[int, ...]], int] = {}
        self._of_sequence: dict[str, tuple[int, list[int]]] = {}  # when its request came, keys of its full blocks

    def draw_up(self, state: EngineState) -> Ledger:
        """The account of a state; does not change it. O(table entries)."""
        if state.info is None:
            return Ledger()
        holding = [request for request in state.requests.values() if any(s.block_table for s in request.sequences)]
        held = sorted({b for request in holding for s in request.sequences for b in s.block_table})
        info = state.info
        return Ledger(
            step=state.step,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            bytes_per_block=info.bytes_per_block,
            num_requests=len(holding),
            held=len(held),
            written_slots=sum(state.written_slots[block_id] for block_id in held),
            slack_slots=_count_slack(state, holding),
            duplicates=self._count_duplicates(state, holding),
            saved=count_saved(state, holding),
            maximum=count_maximum(state, holding),
        )

    def _count_duplicates(self, state: EngineState, holding: list[RequestState]) -> int:
        if state.epoch != self._epoch:
            self._epoch, self._keys, self._of_sequence = state.epoch, {}, {}
        live: dict[str, tuple[int, list[int]]] = {}
        blocks_of_key: dict[int, set[int]] = {}
        for request in holding:
            for sequence in request.sequences:
                keys = self._keys_of(request, sequence, state)
                live[sequence.sequence_id] = (request.submitted_ns, keys)
                for key, block_id in zip(keys[sequence.num_released :], sequence.block_table, strict=False):
                    blocks_of_key.setdefault(key, set()).add(block_id)
        self._of_sequence = live
        if len(self._keys) > 2 * len(blocks_of_key) + MAX_IDLE_KEYS:
            self._keys, self._of_sequence = {}, {}  # most are of requests that have ended: begin anew
        return sum(len(block_ids) - 1 for block_ids in blocks_of_key.values())

    def _keys_of(self, request: RequestState, sequence: SequenceState, state: EngineState) -> list[int]:
        """One number per full block: equal numbers, equal tokens from the first one on and equal salt."""
        block_size = state.info.block_size if state.info is not None else 1
        came, keys = self._of_sequence.get(sequence.sequence_id, (None, []))
        if came != request.submitted_ns:
            keys = []
        num_full = sequence.num_written // block_size
        if len(keys) < num_full:
            keys = list(keys)
            tokens = [*request.prompt_token_ids, *sequence.token_ids]
            for logical in range(len(keys), num_full):
                before: object = keys[-1] if keys else request.params.cache_salt
                here = tuple(tokens[logical * block_size : (logical + 1) * block_size])
                keys.append(self._keys.setdefault((before, here), len(self._keys)))
        return keys[:num_full]


def count_saved(state: EngineState, holding: list[RequestState]) -> Saved:
    """Table entries beyond the first of each block, by who else has it. Within a request, by whether it is full."""
    block_size = state.info.block_size if state.info is not None else 1
    sharing = copy_on_write = prefix_cache = 0
    seen: set[int] = set()
    for request in holding:
        mine: set[int] = set()
        for sequence in request.sequences:
            for block_id in sequence.block_table:
                if block_id not in mine:
                    mine.add(block_id)
                elif state.written_slots[block_id] >= block_size:
                    sharing += 1
                else:
                    copy_on_write += 1
        prefix_cache += len(mine & seen)
        seen |= mine
    return Saved(sharing, copy_on_write, prefix_cache)


def count_maximum(state: EngineState, holding: list[RequestState]) -> Maximum:
    """In whole blocks. The last token of a sequence never gets KV, so no room is reserved for it."""
    info = state.info
    if info is None:
        return Maximum()
    total, fitting, room = 0, 0, info.num_blocks * info.block_size
    for request in holding:
        longest = min(len(request.prompt_token_ids) + request.params.max_tokens, info.max_model_len) - 1
        longest += -longest % info.block_size
        total += longest * sum(sequence.finish_reason is None for sequence in request.sequences)
        fitting += total <= room
    return Maximum(total, fitting)


def _count_slack(state: EngineState, holding: list[RequestState]) -> int:
    block_size = state.info.block_size if state.info is not None else 1
    last = {s.block_table[-1] for request in holding for s in request.sequences if s.block_table}
    return sum(block_size - state.written_slots[block_id] for block_id in last)
