"""Continuous batching: what one step computes, who is admitted, who must give way. Plain Python, no torch.

One step has a budget of tokens and a cap on sequences. Running requests come first, in the order of their admission;
then waiting ones, first come first served, as long as the pool has what the admission asks for. When a running
request cannot grow, the most recently admitted one gives up all its blocks, all its sequences together, and is
recomputed or swapped in later. So the oldest is never a victim, and always advances.
"""

from collections import deque
from dataclasses import dataclass, field

from kvscope.engine.admission import Admission
from kvscope.engine.block_pool import BlockPool
from kvscope.engine.block_tables import BlockCopy, BlockTables, Extent
from kvscope.engine.preemption import choose_mode
from kvscope.engine.request import Request, RequestStatus
from kvscope.engine.swapping import Swapper
from kvscope.events import types as ev
from kvscope.events.state import WaitingReason
from kvscope.events.types import Event


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens per step and sequences at once; what happens to who must give way."""

    max_num_batched_tokens: int
    max_num_seqs: int
    preemption: str = "recompute"  # see choose_mode


@dataclass(slots=True)
class StepPlan:
    """One step, in this order: blocks to the host, blocks from there, copies, a forward pass over all extents."""

    extents: list[Extent] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for _, start, stop in self.extents)


class Scheduler:
    """Owns the queues. `running` is ordered by admission, `waiting` by arrival (preempted ones in front)."""

    def __init__(
        self,
        tables: BlockTables,
        limits: Limits,
        events: list[Event],
        admission: Admission,
        swapper: Swapper,
    ) -> None:
        self.tables = tables
        self.admission = admission
        self.swapper = swapper
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
                self._preempt(victim, request, needed, plan)
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
            self.running.append(request)
            self._events.append(ev.RequestAdmitted(request_id=request.request_id))
            plan.swap_in += self.admission.reserve(request)
            self._carry_out(self._extents(request, self._budget(plan)), plan)

    def _obstacle(self, request: Request, plan: StepPlan) -> WaitingReason | None:
        """Why the request cannot be admitted in this step, with the two numbers; None if it can."""
        num_seats = len(request.alive_sequences())
        free_seats = self.limits.max_num_seqs - sum(len(running.alive_sequences()) for running in self.running)
        if num_seats > free_seats:
            return WaitingReason("sequence_cap", num_seats, free_seats)
        if self._budget(plan) == 0:
            return WaitingReason("token_budget", 1, 0)
        return self.admission.obstacle(request, self.running)

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

    def _preempt(self, victim: Request, growing: Request, needed: int, plan: StepPlan) -> None:
        place, available = len(self._events), self.pool.num_available_blocks
        host_needed = self.swapper.host_blocks_needed(victim.sequences)
        host_available = self.swapper.host_pool.num_available_blocks
        fork_at = victim.common_positions()
        tokens_lost = count_written_positions(victim, fork_at)
        decision = choose_mode(
            self.limits.preemption,
            host_blocks_needed=host_needed,
            host_blocks_available=host_available,
            tokens_lost=tokens_lost,
            tokens_per_step=self.limits.max_num_batched_tokens,
        )
        if decision.mode == "swap":
            plan.swap_out += self.swapper.swap_out(victim.sequences)
        else:
            self._forget_computed(victim, fork_at)
        self._events.insert(
            place,
            ev.RequestPreempted(
                request_id=victim.request_id,
                for_request_id=growing.request_id,
                blocks_needed=needed,
                blocks_gained=self.pool.num_available_blocks - available,
                tokens_lost=tokens_lost if decision.mode == "recompute" else 0,
                mode=decision.mode,
                reason=decision.reason,
                host_blocks_needed=host_needed,
                host_blocks_available=host_available,
            ),
        )
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _forget_computed(self, victim: Request, fork_at: int) -> None:
        """Give up every block; later everything is computed from position 0, once as far as it is common.

        Beams that have offered their candidates in this search step offer them again, before those that have not.
        """
        victim.fork_at = fork_at
        for sequence in victim.sequences:
            self.tables.release(sequence)


def count_written_positions(request: Request, num_common: int) -> int:
    """Positions with KV over all sequences; the first `num_common` count once."""
    holders = [sequence for sequence in request.sequences if sequence.block_table]
    return min(num_common, max((s.num_computed for s in holders), default=0)) + sum(
        max(sequence.num_computed - num_common, 0) for sequence in holders
    )
