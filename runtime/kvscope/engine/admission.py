"""Who may come in: what an admission asks of the pool, and the blocks it takes there. Plain Python, no torch."""

import math
from collections.abc import Sequence
from typing import Protocol

from kvscope.engine.block_tables import BlockCopy, BlockTables
from kvscope.engine.prefixes import Prefixes
from kvscope.engine.request import Request
from kvscope.engine.swapping import Swapper
from kvscope.events.state import WaitingReason
from kvscope.events.types import SamplingParams

WATERMARK = 0.01  # share of the pool that the admission policy of that name leaves


class Admission(Protocol):
    """What the scheduler asks before it lets a request in. Seats and budget of a step are its own business."""

    def worst_case_blocks(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Blocks a request holds when every candidate runs to its limit. The last token never gets KV."""
        ...

    def obstacle(self, request: Request, running: Sequence[Request]) -> WaitingReason | None:
        """What the pool lacks for this request, with the two numbers; None if it may come in."""
        ...

    def reserve(self, request: Request) -> list[BlockCopy]:
        """Take the blocks it begins with; the copies returned bring back what was swapped out. Mutates it."""
        ...


class PagedAdmission:
    """Blocks for what is computed before the next token; the rest follows as sequences grow.

    `now` asks for just these. `worst-case`: for those that all running requests and this one could ever come to hold;
    then nobody is preempted. `watermark`: as `now`, with some left to spare, so that an admission does not preempt
    somebody in the next step; a lone request needs nothing to spare.
    """

    def __init__(
        self,
        tables: BlockTables,
        swapper: Swapper,
        prefixes: Prefixes | None,
        *,
        max_model_len: int,
        step_tokens: int,
        policy: str,
    ) -> None:
        """No step computes more than `step_tokens` positions."""
        self._tables, self._pool = tables, tables.pool
        self._swapper = swapper
        self._prefixes = prefixes
        self._max_model_len = max_model_len
        self._step_tokens = step_tokens
        self._policy = policy

    def worst_case_blocks(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Full blocks of the prompt are common to all candidates; with one candidate that cancels out."""
        num_positions = min(num_prompt_tokens + params.max_tokens, self._max_model_len) - 1
        shared = num_prompt_tokens // self._pool.block_size
        needed = shared + params.num_sequences * (self._pool.blocks_for(num_positions) - shared)
        return self._within_windows(needed, params.num_sequences)

    def obstacle(self, request: Request, running: Sequence[Request]) -> WaitingReason | None:
        if self._policy == "worst-case":
            needed = self._worst_case(request)
            available = self._pool.num_blocks - sum(map(self._worst_case, running))
            return WaitingReason("worst_case", needed, max(available, 0)) if needed > available else None
        spared = self._policy == "watermark" and running
        kind, spare = ("watermark", self._watermark_blocks()) if spared else ("blocks", 0)
        needed, available = self._blocks_to_run(request), max(self._pool.num_available_blocks - spare, 0)
        if needed > available:
            needed -= self._blocks_held_by_others(request)
        needed = self._within_windows(needed, len(request.alive_sequences()))
        return WaitingReason(kind, needed, available) if needed > available else None

    def reserve(self, request: Request) -> list[BlockCopy]:
        copies: list[BlockCopy] = []
        if request.swapped_out:
            copies = self._swapper.swap_in(request.alive_sequences())
        else:
            self._begin_computing(request)
        for sequence in request.active_sequences():
            if self._tables.window is None:  # else only step by step, as earlier blocks fall out of the window
                self._tables.grow(sequence, request.compute_limit(sequence))
        return copies

    def _begin_computing(self, request: Request) -> None:
        """Nothing is there yet but, with luck, a prefix that others have computed."""
        request.forked = len(request.alive_sequences()) == 1  # nobody to share with: no fork to wait for
        (lead,) = request.active_sequences()
        if self._prefixes is not None:
            self._prefixes.reuse(lead, request.compute_limit(lead), request.params.cache_salt)
            self._tables.release_out_of_window(lead)

    def _within_windows(self, num_blocks: int, num_sequences: int) -> int:
        """Of so many blocks, those that the sequences can hold at once."""
        most = self._tables.most_held(num_sequences, self._step_tokens)
        return num_blocks if most is None else min(num_blocks, most)

    def _worst_case(self, request: Request) -> int:
        return self.worst_case_blocks(len(request.prompt_token_ids), request.params)

    def _watermark_blocks(self) -> int:
        return math.ceil(self._pool.num_blocks * WATERMARK)

    def _blocks_held_by_others(self, request: Request) -> int:
        """Prefix hits on held blocks cost nothing; a hit on a cached one takes it out of what is available."""
        if self._prefixes is None or request.swapped_out:
            return 0
        lead = request.alive_sequences()[0]
        match = self._prefixes.match(lead, request.fork_at, request.params.cache_salt)
        return sum(not self._pool.is_cached(block_id) for block_id in match.block_ids)

    def _blocks_to_run(self, request: Request) -> int:
        """Blocks for everything the request has to compute before its next new token."""
        if request.swapped_out:
            limits = [(sequence, request.compute_limit(sequence)) for sequence in request.active_sequences()]
            return self._swapper.blocks_needed(limits)
        alive = request.alive_sequences()
        shared = request.fork_at // self._pool.block_size
        if all(sequence.num_tokens == request.fork_at for sequence in alive):
            return self._pool.blocks_for(request.fork_at)
        return shared + sum(self._pool.blocks_for(sequence.num_tokens) - shared for sequence in alive)
