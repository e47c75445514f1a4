"""Continuous batching: what one step computes, who is admitted, who must give way. Plain Python, no torch.

One step has a budget of tokens and a cap on sequences. Running requests come first, in the order of their admission;
then waiting ones, first come first served, as long as blocks for their whole context are free now. When a running
request cannot grow, the most recently admitted one gives up all its blocks and is recomputed later, so the oldest
always advances.
"""

from collections import deque
from dataclasses import dataclass, field

from kvscope.engine.block_pool import BlockPool
from kvscope.engine.block_tables import BlockCopy, BlockTables, Extent
from kvscope.engine.prefixes import Prefixes
from kvscope.engine.request import Request, RequestStatus
from kvscope.events import types as ev
from kvscope.events.state import WaitingReason
from kvscope.events.types import Event


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens per step and sequences at once."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(slots=True)
class StepPlan:
    """One step: first the copies, then a forward pass over all extents, packed in this order."""

    extents: list[Extent] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for _, start, stop in self.extents)


class Scheduler:
    """Owns the queues. `running` is ordered by admission, `waiting` by arrival (preempted ones in front)."""

    def __init__(
        self, tables: BlockTables, limits: Limits, events: list[Event], prefixes: Prefixes | None = None
    ) -> None:
        self.tables = tables
        self._prefixes = prefixes
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._events = events

    @property
    def pool(self) -> BlockPool:
        return self.tables.pool

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> StepPlan:
        """Decide one step and reserve its blocks."""
        plan = StepPlan()
        preempted = self._schedule_running(plan)
        if not preempted:
            self._admit_waiting(plan)
        self._explain_waiting(plan)
        self._events.append(
            ev.StepScheduled(
                sequence_ids=[extent.sequence.sequence_id for extent in plan.extents],
                num_scheduled_tokens=[extent.stop - extent.start for extent in plan.extents],
            )
        )
        return plan

    def remove(self, request: Request) -> None:
        """Take a request out of either queue; its blocks must be released by the caller."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def worst_case_blocks(self, num_prompt_tokens: int, params: ev.SamplingParams) -> int:
        """Blocks a request holds when every candidate runs to its limit. The last token never gets KV."""
        num_positions = min(num_prompt_tokens + params.max_tokens, self.limits.max_model_len) - 1
        shared = num_prompt_tokens // self.pool.block_size if params.num_sequences > 1 else 0
        return shared + params.num_sequences * (self.pool.blocks_for(num_positions) - shared)

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Returns whether somebody was preempted."""
        preempted = False
        position = 0
        while position < len(self.running):
            request = self.running[position]
            extents = self._extents(request, self._budget(plan))
            needed = self.tables.blocks_needed(extents)
            while needed > self.pool.num_available_blocks:
                victim = self.running.pop()
                self._preempt(victim, request, needed)
                preempted = True
                if victim is request:
                    return True
            self._carry_out(extents, plan)
            position += 1
        return preempted

    def _admit_waiting(self, plan: StepPlan) -> None:
        while self.waiting and self._obstacle(self.waiting[0], plan) is None:
            request = self.waiting.popleft()
            request.status, request.waiting = RequestStatus.RUNNING, None
            request.forked = len(request.alive_sequences()) == 1  # nobody to share with: no fork to wait for
            self.running.append(request)
            self._events.append(ev.RequestAdmitted(request_id=request.request_id))
            (lead,) = request.active_sequences()
            limit = request.compute_limit(lead)
            if self._prefixes is not None:
                self._prefixes.reuse(lead, limit, request.params.cache_salt)
            self.tables.grow(lead, limit)
            self._carry_out(self._extents(request, self._budget(plan)), plan)

    def _obstacle(self, request: Request, plan: StepPlan) -> WaitingReason | None:
        """Why the request cannot be admitted in this step, with the two numbers; None if it can."""
        num_seats = len(request.alive_sequences())
        free_seats = self.limits.max_num_seqs - sum(len(running.alive_sequences()) for running in self.running)
        if num_seats > free_seats:
            return WaitingReason("sequence_cap", num_seats, free_seats)
        if self._budget(plan) == 0:
            return WaitingReason("token_budget", 1, 0)
        needed, available = self._blocks_to_run(request), self.pool.num_available_blocks
        if needed > available:
            needed -= self._blocks_held_by_others(request)
        return WaitingReason("blocks", needed, available) if needed > available else None

    def _blocks_held_by_others(self, request: Request) -> int:
        """Prefix hits on held blocks cost nothing; a hit on a cached one takes it out of what is available."""
        if self._prefixes is None:
            return 0
        alive = request.alive_sequences()
        limit = alive[0].num_tokens if len(alive) == 1 else request.fork_at
        match = self._prefixes.match(alive[0], limit, request.params.cache_salt)
        return sum(not self.pool.is_cached(block_id) for block_id in match.block_ids)

    def _blocks_to_run(self, request: Request) -> int:
        """Blocks for everything the request has to compute before its next new token."""
        alive = request.alive_sequences()
        shared = request.fork_at // self.pool.block_size if len(alive) > 1 else 0
        if all(sequence.num_tokens == request.fork_at for sequence in alive):
            return self.pool.blocks_for(request.fork_at)
        return shared + sum(self.pool.blocks_for(sequence.num_tokens) - shared for sequence in alive)

    def _explain_waiting(self, plan: StepPlan) -> None:
        """Tell the reason of every waiting request, when it changed. Only the first one's is a matter of numbers."""
        for place, request in enumerate(self.waiting):
            reason = WaitingReason("order", 0, 0) if place else self._obstacle(request, plan)
            if reason is None:  # it fits, but a request was preempted in this step and goes first
                reason = WaitingReason("order", 0, 0)
            if reason != request.waiting:
                request.waiting = reason
                self._events.append(
                    ev.RequestWaiting(
                        request_id=request.request_id,
                        kind=reason.kind,
                        needed=reason.needed,
                        available=reason.available,
                    )
                )

    def _extents(self, request: Request, budget: int) -> list[Extent]:
        """What the request computes in this step, within the budget."""
        extents = []
        for sequence in request.active_sequences():
            stop = min(request.compute_limit(sequence), sequence.num_computed + budget)
            if stop > sequence.num_computed:
                extents.append(Extent(sequence, sequence.num_computed, stop))
                budget -= stop - sequence.num_computed
        return extents

    def _carry_out(self, extents: list[Extent], plan: StepPlan) -> None:
        for extent in extents:
            plan.copies += self.tables.prepare(extent)
            plan.extents.append(extent)

    def _budget(self, plan: StepPlan) -> int:
        return self.limits.max_num_batched_tokens - plan.num_tokens

    def _preempt(self, victim: Request, growing: Request, needed: int) -> None:
        place = len(self._events)
        if len(victim.alive_sequences()) > 1:
            victim.move_fork()
        if victim.search is not None:
            victim.search.candidates.clear()
        tokens_lost = count_written_positions(victim)
        freed = [block for sequence in victim.sequences for block in self.tables.release(sequence)]
        self._events.insert(
            place,
            ev.RequestPreempted(
                request_id=victim.request_id,
                for_request_id=growing.request_id,
                blocks_needed=needed,
                blocks_gained=len(freed),
                tokens_lost=tokens_lost,
            ),
        )
        victim.status, victim.forked = RequestStatus.PREEMPTED, False
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)


def count_written_positions(request: Request) -> int:
    """Positions with KV over all sequences; what they have in common counts once."""
    if not request.forked:
        return max(sequence.num_computed for sequence in request.sequences)
    holders = [sequence for sequence in request.sequences if sequence.block_table]
    return min(request.fork_at, max((s.num_computed for s in holders), default=0)) + sum(
        max(sequence.num_computed - request.fork_at, 0) for sequence in holders
    )
