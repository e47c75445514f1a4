"""What became of every request: outcome, tokens, waiting time by reason, time to the first token."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from kvscope.analysis.walk import Observer
from kvscope.events import types as ev
from kvscope.events.state import EngineState, RequestState
from kvscope.events.types import Event, SamplingParams

Outcome = Literal["finished", "cancelled", "unfinished"]
QUEUED, PREEMPTED = "queued", "preempted"  # waiting before the scheduler has given a reason


@dataclass(slots=True)
class RequestRecord:
    """One request, from its submission to its end or the recording's. Times in nanoseconds of the engine's clock."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    submitted_ns: int
    outcome: Outcome = "unfinished"
    first_token_ns: int | None = None
    finished_ns: int | None = None
    num_preemptions: int = 0
    num_copies: int = 0
    token_ids: list[list[int]] = field(default_factory=list)  # generated, by sequence
    waited_ns: Counter[str] = field(default_factory=Counter)  # by reason
    waiting_since: tuple[int, str] | None = None  # (time, reason)

    def stop_waiting(self, now_ns: int) -> None:
        if self.waiting_since is not None:
            since_ns, reason = self.waiting_since
            self.waited_ns[reason] += max(now_ns - since_ns, 0)
            self.waiting_since = None

    def wait(self, now_ns: int, reason: str) -> None:
        """From now on, or still, it waits for this reason."""
        self.stop_waiting(now_ns)
        self.waiting_since = (now_ns, reason)

    def take_over(self, request: RequestState) -> None:
        """What the state knows and events would have to be added up for."""
        self.first_token_ns, self.finished_ns = request.first_token_ns, request.finished_ns
        self.num_preemptions = request.num_preemptions
        self.num_copies = sum(sequence.num_copies for sequence in request.sequences)
        self.token_ids = [list(sequence.token_ids) for sequence in request.sequences]
        if request.status == "finished":
            reasons = {sequence.finish_reason for sequence in request.sequences}
            self.outcome = "cancelled" if "cancelled" in reasons else "finished"


class RequestLog(Observer):
    """`records` in the order of submission; `finish` must be called with the last state."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.num_refused = 0
        self.tokens_lost = 0  # written positions given up in preemptions
        self.busy_ns = 0  # time in which some request was not finished
        self._open: dict[str, RequestRecord] = {}
        self._last_ns: int | None = None

    def on_state(self, state: EngineState) -> None:
        for request_id in [request_id for request_id in self._open if request_id not in state.requests]:
            self._open.pop(request_id).stop_waiting(state.time_ns)  # it ended unseen
        for request in state.requests.values():
            if request.request_id in self._open:
                self._follow(request, state.time_ns)
            elif request.status != "finished":
                self._open_record(request, state.time_ns)
        self._last_ns = state.time_ns

    def after_event(self, state: EngineState, event: Event) -> None:
        match event:
            case ev.RequestSubmitted(request_id=request_id):
                self._open_record(state.request(request_id), state.time_ns)
            case ev.RequestRefused():
                self.num_refused += 1
            case ev.RequestWaiting(request_id=request_id) if request_id in self._open:
                self._open[request_id].wait(state.time_ns, event.kind)
            case ev.RequestAdmitted(request_id=request_id) if request_id in self._open:
                self._open[request_id].stop_waiting(state.time_ns)
            case ev.RequestPreempted(request_id=request_id):
                self.tokens_lost += event.tokens_lost
                if request_id in self._open:
                    self._open[request_id].wait(state.time_ns, PREEMPTED)
            case ev.RequestFinished(request_id=request_id) if request_id in self._open:
                self._follow(state.request(request_id), state.time_ns)

    def before_event(self, state: EngineState, event: Event) -> None:
        if self._open and self._last_ns is not None:
            self.busy_ns += max(state.time_ns - self._last_ns, 0)
        self._last_ns = state.time_ns

    def finish(self, state: EngineState) -> None:
        """Close what is still open at the recording's end."""
        for request_id, record in self._open.items():
            record.stop_waiting(state.time_ns)
            if request_id in state.requests:
                record.take_over(state.requests[request_id])
        self._open.clear()

    def _open_record(self, request: RequestState, now_ns: int) -> None:
        record = RequestRecord(
            request.request_id, list(request.prompt_token_ids), request.params, submitted_ns=request.submitted_ns
        )
        if request.status != "running":
            record.waiting_since = (now_ns, request.waiting.kind if request.waiting is not None else QUEUED)
        self.records.append(record)
        self._open[request.request_id] = record

    def _follow(self, request: RequestState, now_ns: int) -> None:
        """Take over what a request has become, and close it if it has ended."""
        record = self._open[request.request_id]
        record.take_over(request)
        if request.status in ("running", "finished"):
            record.stop_waiting(now_ns)
        if request.status == "finished":
            del self._open[request.request_id]
