"""What a simulation is asked for at its end, counted as it runs; two numbers per request are all that grows."""

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from kvscope.engine.engine import Engine
from kvscope.engine.request import Request
from kvscope.events import types as ev
from kvscope.events.types import Batch
from kvscope.transport.publisher import EventSink

QUEUED, PREEMPTED = "queued", "preempted"  # waiting before the scheduler has given a reason; as in `stats`


class _Waiting(NamedTuple):
    since_ns: int
    reason: str


class _Live:
    """A request that has not ended."""

    __slots__ = ("arrival_ns", "request", "wait_ns", "waiting")

    def __init__(self, request: Request, arrival_ns: int) -> None:
        self.request, self.arrival_ns = request, arrival_ns
        self.wait_ns = 0
        self.waiting: _Waiting | None = _Waiting(arrival_ns, QUEUED)


class Meter:
    """A sink in front of another one. What events do not say it reads off the pool when a batch of events comes by."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._engine: Engine | None = None
        self._live: dict[str, _Live] = {}
        self.num_finished = self.num_refused = self.num_events = self.num_sequence_steps = self.tokens_lost = 0
        self.first_refusal: str | None = None
        self.peak_held = self.sum_held = self.peak_cached = 0
        self.peak_unwritten = self.sum_unwritten = 0
        self.sum_unwritten_share = self.peak_unwritten_share = 0.0
        self.waited_ns: Counter[str] = Counter()  # all requests together, by reason
        self.wait_ns, self.first_token_ns = array("q"), array("q")  # of each request that ended, from its arrival
        self._handlers: dict[type[ev.Event], Callable[[Any, int], None]] = {
            ev.RequestWaiting: self._on_waiting,
            ev.RequestAdmitted: self._on_admitted,
            ev.RequestPreempted: self._on_preempted,
            ev.RequestFinished: self._on_finished,
            ev.StepScheduled: self._on_scheduled,
        }

    def watch(self, engine: Engine) -> None:
        """Whose events these are."""
        self._engine = engine

    def submitted(self, request: Request, arrival_ns: int) -> None:
        """The request entered the engine's queue, perhaps after waiting outside."""
        self._live[request.request_id] = _Live(request, arrival_ns)

    def refused(self, reason: str) -> None:
        self.num_refused += 1
        self.first_refusal = self.first_refusal or reason

    @property
    def num_ended(self) -> int:
        return self.num_finished + self.num_refused

    # --- as a sink ------------------------------------------------------------------------------------------------

    @property
    def needs_full_state(self) -> bool:
        return self._sink.needs_full_state

    def take_dropped(self) -> int:
        return self._sink.take_dropped()

    def publish(self, batch: Batch) -> bool:
        handlers = self._handlers
        for event in batch.events:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event, batch.time_ns)
        self.num_events += len(batch.events)
        if self._engine is not None:
            self._look_at_pool(self._engine, batch.phase)
        return self._sink.publish(batch)

    def _look_at_pool(self, engine: Engine, phase: str) -> None:
        """Peaks after every batch, means after every step, as `stats` has them."""
        pool = engine.scheduler.pool
        held = pool.num_blocks - pool.num_available_blocks
        self.peak_held = max(self.peak_held, held)
        self.peak_cached = max(self.peak_cached, pool.num_cached_blocks)
        if phase != "commit":
            return
        # Blocks that are shared are full, so nothing unwritten is counted twice.
        unwritten = sum(
            sequence.num_logical_blocks * pool.block_size - sequence.num_computed
            for request in engine.scheduler.running
            for sequence in request.sequences
        )
        self.sum_held += held
        self.sum_unwritten += unwritten
        self.peak_unwritten = max(self.peak_unwritten, unwritten)
        share = unwritten / (held * pool.block_size) if held else 0.0
        self.sum_unwritten_share += share
        self.peak_unwritten_share = max(self.peak_unwritten_share, share)

    # --- events ---------------------------------------------------------------------------------------------------

    def _on_scheduled(self, event: ev.StepScheduled, _: int) -> None:
        self.num_sequence_steps += len(event.sequence_ids)

    def _on_waiting(self, event: ev.RequestWaiting, now_ns: int) -> None:
        self._wait(event.request_id, now_ns, event.kind)

    def _on_admitted(self, event: ev.RequestAdmitted, now_ns: int) -> None:
        self._wait(event.request_id, now_ns, None)

    def _on_preempted(self, event: ev.RequestPreempted, now_ns: int) -> None:
        self.tokens_lost += event.tokens_lost
        self._wait(event.request_id, now_ns, PREEMPTED)

    def _wait(self, request_id: str, now_ns: int, reason: str | None) -> None:
        """From now on it waits for this reason; None: no more."""
        live = self._live[request_id]
        if live.waiting is not None:
            elapsed_ns = now_ns - live.waiting.since_ns
            self.waited_ns[live.waiting.reason] += elapsed_ns
            live.wait_ns += elapsed_ns
        live.waiting = _Waiting(now_ns, reason) if reason is not None else None

    def _on_finished(self, event: ev.RequestFinished, _: int) -> None:
        live = self._live.pop(event.request_id)
        self.num_finished += 1
        self.wait_ns.append(live.wait_ns)
        if live.request.first_token_ns is not None:
            self.first_token_ns.append(live.request.first_token_ns - live.arrival_ns)
