"""The engine: one step is schedule, run, commit; every phase ends in one batch of events.

Not thread-safe: one thread owns an engine. `EngineService` puts one behind a queue of commands.
"""

import copy
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvscope.engine.beam_search import BeamSearch, num_candidates
from kvscope.engine.beams import Beams
from kvscope.engine.block_tables import BlockCopy, Extent
from kvscope.engine.breakpoints import BreakpointWatch
from kvscope.engine.choice import ChooseToken, RankTokens, draw_seed
from kvscope.engine.export import export_state
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

MAX_CHARACTERS_PER_TOKEN = 128  # the longest tokens of real vocabularies are runs of this many spaces


class RequestRefusedError(ValueError):
    """The request can never run here. One line, with the numbers."""


class Runner(Protocol):
    """Computes KV and logits: the model runner, a simulated one, or a fake in tests."""

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
        choose: ChooseToken,
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
        self._choose = choose
        self._rank = rank
        self._encoder = copy.deepcopy(tokenizer)  # a tokenizer must not be used by two threads at once
        self._encoder_lock = threading.Lock()
        self._outputs = Outputs(tokenizer, eos_token_ids, info.max_model_len)
        self._beams = Beams(self._tables, self._outputs, self._events)
        self._eos_token_ids = eos_token_ids
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

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, special tokens added as the tokenizer does by default. Any thread may call this.

        Raises:
            RequestRefusedError: too long for any tokenizer to make it fit, or not text at all.
        """
        longest = MAX_CHARACTERS_PER_TOKEN * self.info.max_model_len
        if len(prompt) > longest:
            raise RequestRefusedError(
                f"the prompt has {len(prompt)} characters; more than {longest} cannot fit in --max-model-len "
                f"{self.info.max_model_len}"
            )
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise RequestRefusedError("the prompt is not valid UTF-8")
        with self._encoder_lock:
            return list(self._encoder(prompt).input_ids)

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestRefusedError when no state of the pool could ever serve the request. Does not mutate."""
        info, num_prompt = self.info, len(prompt_token_ids)
        if num_prompt == 0:
            raise RequestRefusedError("the prompt is empty")
        if num_prompt >= info.max_model_len:
            raise RequestRefusedError(
                f"the prompt has {num_prompt} tokens; with --max-model-len {info.max_model_len} at most "
                f"{info.max_model_len - 1} fit, since one more must be generated"
            )
        if max(prompt_token_ids) >= info.vocab_size:
            raise RequestRefusedError(
                f"the prompt holds token {max(prompt_token_ids)}, which the tokenizer knows and the model does not: "
                f"it has {info.vocab_size} tokens"
            )
        wish = f"beam_width={params.beam_width}" if params.beam_width > 1 else f"n={params.n}"
        if params.num_sequences > info.max_num_seqs:
            raise RequestRefusedError(
                f"{wish} needs {params.num_sequences} sequence seats; --max-num-seqs is {info.max_num_seqs}"
            )
        if params.beam_width > 1 and info.allocator == "contiguous":
            raise RequestRefusedError(f"{wish} needs --allocator paged: beams share the blocks of their history")
        if params.beam_width > 1 and self._rank is None:
            raise RequestRefusedError("this engine has no model to compare beams by")
        if params.beam_width > 1 and num_candidates(params.beam_width, self._eos_token_ids) > info.vocab_size:
            raise RequestRefusedError(f"{wish} is too much for a vocabulary of {info.vocab_size} tokens")
        needed = self.scheduler.admission.worst_case_blocks(num_prompt, params)
        if needed > info.num_blocks:
            raise RequestRefusedError(
                f"{num_prompt} prompt tokens with {wish} max_tokens={params.max_tokens} can need "
                f"{needed} blocks; the pool has {info.num_blocks} of {info.block_size} slots"
            )

    def submit(
        self, prompt: str, params: SamplingParams, request_id: str, prompt_token_ids: list[int] | None = None
    ) -> Request:
        """Queue a request.

        Raises:
            RequestRefusedError: it can never run; a RequestRefused event says so too.
        """
        self._begin("control")
        try:
            token_ids = prompt_token_ids if prompt_token_ids is not None else self.encode(prompt)
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
        self.check_request(token_ids, params)

    def cancel(self, request_id: str) -> None:
        """End a request now; every block it holds goes back. Unknown or ended requests are left alone."""
        request = self.requests.get(request_id)
        if request is None or request.status is RequestStatus.FINISHED:
            return
        self._begin("control")
        for sequence in request.alive_sequences():
            self._finish_sequence(sequence, "cancelled")
        self._finish_request(request)
        self._publish()

    # --- steps ----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return self.scheduler.has_work()

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
        for sequence, _, _ in plan.extents:
            request = self._request_of(sequence)
            self._choose_next(request, sequence, logits.get(sequence.sequence_id))
            if not request.alive_sequences():
                self._finish_request(request)
        self.step_elapsed_ns = self._clock_ns() - started_ns
        self.counters.computed_tokens += plan.num_tokens
        self._events.append(ev.StepCompleted(elapsed_ns=self.step_elapsed_ns, num_tokens=plan.num_tokens))
        if self._check_when_idle and not self.has_work():
            self._report_problems()
        self._publish()

    def _choose_next(self, request: Request, sequence: SequenceOfRequest, logits: Any | None) -> None:
        """What follows from a sequence's new KV: forks, and from its logits, if it reached its end, a next token."""
        if request.search is None:
            for candidate in self._fork_if_ready(request, sequence):
                if logits is not None:
                    self._append_token(request, candidate, logits)
            return
        if request.search.started:
            self._fork_if_ready(request, sequence)
        if logits is not None:
            self._offer_beam(request, request.search, sequence, logits)

    def _offer_beam(self, request: Request, search: BeamSearch, sequence: SequenceOfRequest, logits: Any) -> None:
        assert self._rank is not None  # else the request was refused
        count = num_candidates(search.width, self._outputs.end_tokens(request))
        self.counters.generated_tokens += len(self._beams.offer(request, sequence, self._rank(logits, count)))
        if request.first_token_ns is None and (search.started or search.hypotheses):
            request.first_token_ns = self.now_ns
        if search.decided:
            for beam, hypothesis in zip(request.sequences, search.hypotheses, strict=True):
                self._finish_sequence(beam, hypothesis.finish_reason)
            request.search = None

    def _fork_if_ready(self, request: Request, sequence: SequenceOfRequest) -> list[SequenceOfRequest]:
        """The sequences that choose from this one's logits: itself, or all of them once the prompt is written."""
        if request.forked or sequence.num_computed < request.fork_at:
            return [sequence]
        request.forked = True
        others = [other for other in request.alive_sequences() if other is not sequence]
        for other in others:
            self._tables.fork(sequence, other)
        return [sequence, *others]

    def _append_token(self, request: Request, sequence: SequenceOfRequest, logits: Any) -> None:
        noise_key = (self._seed(request), sequence.index, sequence.num_tokens)
        choice = self._choose(logits, request.params, noise_key)
        said = self._outputs.append(request, sequence, choice)
        if request.first_token_ns is None:
            request.first_token_ns = self.now_ns
        self.counters.generated_tokens += 1
        self._events.append(
            ev.TokensGenerated(
                sequence_id=sequence.sequence_id, token_ids=[choice.token_id], pieces=[said.piece], text=said.text
            )
        )
        if said.reason is not None:
            self._finish_sequence(sequence, said.reason)

    def _finish_sequence(self, sequence: SequenceOfRequest, reason: str) -> None:
        sequence.finish_reason = reason
        self._events.append(ev.SequenceFinished(sequence_id=sequence.sequence_id, reason=reason))
        self._tables.release(sequence)
        self._swapper.release(sequence)
        self._outputs.end(sequence)

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

    def _seed(self, request: Request) -> int:
        seed = request.params.seed
        return seed if seed is not None else draw_seed(self.info.seed, request.request_id)

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
