"""The engine: one step is schedule, run, commit; every phase ends in one batch of events.

Not thread-safe: one thread owns an engine. `EngineService` puts one behind a queue of commands.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvscope.engine.beam_search import BeamSearch
from kvscope.engine.block_tables import BlockCopy, Extent
from kvscope.engine.breakpoints import BreakpointWatch
from kvscope.engine.choice import ChooseTokens, RankTokens
from kvscope.engine.export import export_state
from kvscope.engine.generation import Generation
from kvscope.engine.intake import Intake, RequestRefusedError
from kvscope.engine.memory import build_memory
from kvscope.engine.outputs import Outputs
from kvscope.engine.request import Request, RequestStatus
from kvscope.engine.request import Sequence as SequenceOfRequest
from kvscope.engine.scheduler import Limits, Scheduler, StepPlan
from kvscope.events import types as ev
from kvscope.events.fold import MAX_FINISHED_REQUESTS
from kvscope.events.state import Breakpoints, Counters, EngineState, FullState
from kvscope.events.types import Batch, EngineInfo, EngineStatus, Event, Phase, SamplingParams
from kvscope.transport.publisher import EventSink


class Runner(Protocol):
    """Computes KV and logits: the model runner, a simulated one, or a fake in tests."""

    @property
    def num_graph_steps(self) -> int:
        """Steps so far that were replayed: as CUDA graphs, or as tapes of a CPU."""
        ...

    def run(self, extents: Sequence[Extent], copies: Sequence[BlockCopy]) -> dict[str, Any]: ...

    def swap(self, to_host: Sequence[BlockCopy], from_host: Sequence[BlockCopy]) -> None:
        """Move blocks between device and host, first out, then in; before the step's `run`."""
        ...


class Engine:
    """Requests in, tokens and events out."""

    def __init__(
        self,
        info: EngineInfo,
        runner: Runner,
        tokenizer: Any,
        sink: EventSink,
        *,
        choose: ChooseTokens,
        rank: RankTokens | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        free_order: Sequence[int] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        check_when_idle: bool = True,
    ) -> None:
        self.info = info
        self.epoch = secrets.token_bytes(16)
        self.step_number = 0
        self.status: EngineStatus = "running"
        self.pause_reason = ""
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        self.finished_order: list[str] = []
        self.step_elapsed_ns = 0
        self.phase: Phase = "life"
        self._events: list[Event] = []
        memory = build_memory(info, self._events, free_order)
        self._pool, self._tables, self._prefixes, self._swapper, admission = memory
        self.breakpoints = BreakpointWatch(self._pool)
        limits = Limits(info.max_num_batched_tokens, info.max_num_seqs, info.preemption)
        self.scheduler = Scheduler(self._tables, limits, self._events, admission, self._swapper)
        self._runner = runner
        self.intake = Intake(info, tokenizer, admission, eos_token_ids=eos_token_ids, ranks_beams=rank is not None)
        self._outputs = Outputs(tokenizer, eos_token_ids, info.max_model_len)
        self._generation = Generation(
            memory, self._outputs, self._events, self.counters, choose=choose, rank=rank, seed=info.seed
        )
        self._sink = sink
        self._clock_ns = clock_ns
        self._check_when_idle = check_when_idle
        self._start_ns = clock_ns()
        self.wall_time_ns = time.time_ns()
        self.now_ns = 0
        self._begin("life")
        self._events.append(
            ev.EngineStarted(wall_time_ns=self.wall_time_ns, schema_version=ev.SCHEMA_VERSION, info=info)
        )
        self._publish()

    # --- requests -------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: str, params: SamplingParams, request_id: str, prompt_token_ids: list[int] | None = None
    ) -> Request:
        """Queue a request.

        Raises:
            RequestRefusedError: it can never run; a RequestRefused event says so too.
        """
        self._begin("control")
        try:
            token_ids = prompt_token_ids if prompt_token_ids is not None else self.intake.encode(prompt)
            self._check_new(request_id, token_ids, params)
        except RequestRefusedError as error:
            self.counters.refusals += 1
            self._events.append(ev.RequestRefused(request_id=request_id, reason=str(error)))
            self._publish()
            raise
        request = self._new_request(prompt, params, request_id, token_ids)
        self._publish()
        return request

    def _check_new(self, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
        if request_id in self.requests:
            raise RequestRefusedError(f"a request {request_id} exists already")
        self.intake.check(token_ids, params)

    def cancel(self, request_id: str) -> None:
        """End a request now; every block it holds goes back. Unknown or ended requests are left alone."""
        request = self.requests.get(request_id)
        if request is None or request.status is RequestStatus.FINISHED:
            return
        self._begin("control")
        for sequence in request.alive_sequences():
            self._generation.finish(sequence, "cancelled")
        self._finish_request(request)
        self._publish()

    # --- steps ----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    @property
    def num_graph_steps(self) -> int:
        return self._runner.num_graph_steps

    def step(self) -> None:
        """One iteration: schedule, run, commit."""
        started_ns = self._clock_ns()
        self.step_number += 1
        plan = self._schedule()
        if plan.swap_out or plan.swap_in:
            self._runner.swap(plan.swap_out, plan.swap_in)
        logits = self._runner.run(plan.extents, plan.copies)
        self._commit(plan, logits, started_ns)

    def heal(self) -> None:
        """After a loss, send the full state even if nothing else happens. Costs nothing otherwise."""
        if self._sink.needs_full_state:
            self._begin("control")
            self._publish()

    def pause(self, reason: str = "") -> None:
        """With a reason also when paused already: steps that were asked for have led to a breakpoint."""
        if self.status == "running" or (reason and self.status == "paused"):
            self._change_status("paused", ev.EnginePaused(reason=reason), reason)

    def resume(self) -> None:
        if self.status == "paused":
            self._change_status("running", ev.EngineResumed())

    def set_breakpoints(self, wanted: Breakpoints) -> None:
        """Replace what `breakpoints` looks for; whoever steps asks it, and pauses."""
        self._begin("control")
        self.breakpoints.change(wanted)
        self._events.append(ev.BreakpointsChanged(events=list(wanted.events), free_below=wanted.free_below))
        self._publish()

    def stop(self, reason: str) -> None:
        """Say goodbye; nothing may be called afterwards."""
        self._begin("life")
        self.status = "stopped"
        self._events.append(ev.EngineStopped(reason=reason))
        self._publish()

    def state(self) -> EngineState:
        """The engine's own account of itself; equal to the fold of every event so far."""
        return export_state(self, self._pool, self._swapper.host_pool)

    def check_integrity(self) -> list[str]:
        """Invariants 1 and 7 on the live structures; empty when all is well."""
        return [finding.message for finding in self._find_problems()]

    def _find_problems(self) -> list[ev.AuditFinding]:
        sequences = [sequence for request in self.requests.values() for sequence in request.sequences]
        messages = self._tables.check_integrity(sequences)
        messages += self._swapper.host_pool.check_integrity(sequence.host_table for sequence in sequences)
        problems = [ev.AuditFinding(rule=1, message=text) for text in messages]
        num_held = self._pool.num_blocks - self._pool.num_available_blocks
        if not self.scheduler.running and num_held:
            problems.append(ev.AuditFinding(rule=7, message=f"nothing runs, yet {num_held} blocks are held"))
        return problems

    def _schedule(self) -> StepPlan:
        self._begin("plan")
        if self._prefixes is not None:
            self._prefixes.step = self.step_number
        plan = self.scheduler.schedule()
        self.counters.blocks_swapped_out += len(plan.swap_out)
        self.counters.blocks_swapped_in += len(plan.swap_in)
        for event in self._events:
            if isinstance(event, ev.BlockCopied):
                self.counters.copies += 1
            elif isinstance(event, ev.RequestPreempted):
                self.counters.preemptions += 1
            elif isinstance(event, ev.BlocksEvicted):
                self.counters.evictions += len(event.block_ids)
            elif isinstance(event, ev.PrefixLookup):
                self.counters.prefix_lookup_tokens += event.num_tokens
                self.counters.prefix_hit_tokens += event.num_hit_tokens
        self._publish()
        return plan

    def _commit(self, plan: StepPlan, logits: dict[str, Any], started_ns: int) -> None:
        self._begin("commit")
        for sequence, start, stop in plan.extents:
            sequence.num_computed = stop
            self._events.append(ev.SlotsWritten(sequence_id=sequence.sequence_id, start=start, stop=stop))
            if self._prefixes is not None:
                self._prefixes.index_written(sequence, self._request_of(sequence).params.cache_salt)
            self._tables.release_out_of_window(sequence)
        ends = [sequence for sequence, _, _ in plan.extents if sequence.sequence_id in logits]
        self._generation.choose([(self._request_of(end), end, logits[end.sequence_id]) for end in ends])
        for sequence, _, _ in plan.extents:
            request = self._request_of(sequence)
            self._generation.go_on(request, sequence, logits.get(sequence.sequence_id), self.now_ns)
            if not request.alive_sequences():
                self._finish_request(request)
        self.step_elapsed_ns = self._clock_ns() - started_ns
        self.counters.computed_tokens += plan.num_tokens
        self._events.append(ev.StepCompleted(elapsed_ns=self.step_elapsed_ns, num_tokens=plan.num_tokens))
        if self._check_when_idle and not self.has_work():
            self._report_problems()
        self._publish()

    def _finish_request(self, request: Request) -> None:
        self.scheduler.remove(request)
        request.status, request.waiting, request.finished_ns = RequestStatus.FINISHED, None, self.now_ns
        self._events.append(ev.RequestFinished(request_id=request.request_id))
        self.finished_order.append(request.request_id)
        if len(self.finished_order) > MAX_FINISHED_REQUESTS:
            del self.requests[self.finished_order.pop(0)]

    def _new_request(self, prompt: str, params: SamplingParams, request_id: str, token_ids: list[int]) -> Request:
        sequences = [
            SequenceOfRequest(f"{request_id}.{index}", index, token_ids) for index in range(params.num_sequences)
        ]
        for sequence in sequences:
            self._outputs.begin(sequence)
        pieces = self._outputs.pieces(token_ids)
        request = Request(request_id, prompt, token_ids, pieces, params, sequences, submitted_ns=self.now_ns)
        if params.beam_width > 1:
            request.search = BeamSearch(params.beam_width, params.length_penalty)
        self.requests[request_id] = request
        self.scheduler.waiting.append(request)
        self._events.append(
            ev.RequestSubmitted(
                request_id=request_id,
                prompt=prompt,
                prompt_token_ids=token_ids,
                prompt_pieces=pieces,
                params=params,
            )
        )
        return request

    def _request_of(self, sequence: SequenceOfRequest) -> Request:
        return self.requests[sequence.sequence_id.rpartition(".")[0]]

    def _change_status(self, status: EngineStatus, event: Event, reason: str = "") -> None:
        self._begin("control")
        self.status, self.pause_reason = status, reason
        self._events.append(event)
        self._publish()

    def _report_problems(self) -> None:
        problems = self._find_problems()
        self.counters.audit_findings += len(problems)
        self._events += problems

    # --- publishing -----------------------------------------------------------------------------------------------

    def _begin(self, phase: Phase) -> None:
        """Start a batch: its time is the time of everything in it."""
        self.phase = phase
        self.now_ns = self._clock_ns() - self._start_ns

    def _publish(self) -> None:
        """Hand this phase's events over. Never waits; after a loss, the full state goes out instead."""
        events = tuple(self._events)
        self._events.clear()
        self.breakpoints.look(events, self.step_number)
        num_dropped = self._sink.take_dropped()
        if num_dropped or self._sink.needs_full_state:
            self.counters.dropped_batches += num_dropped
            announced = (ev.BatchesDropped(num_batches=num_dropped),) if num_dropped else ()
            events = (*announced, FullState(state=self.state()))
        sent = self._sink.publish(
            Batch(epoch=self.epoch, step=self.step_number, phase=self.phase, time_ns=self.now_ns, events=events)
        )
        if not sent:
            self.counters.dropped_batches -= num_dropped  # the sink counts them again
