"""What each request cost: blocks at its peak, steps, and reserved slots that stayed empty."""

from dataclasses import dataclass

from kvscope.analysis.pool_meter import block_size_of
from kvscope.analysis.walk import Observer
from kvscope.events import types as ev
from kvscope.events.state import EngineState, RequestState
from kvscope.events.types import Event


@dataclass(slots=True)
class RequestCost:
    """Over the request's recorded life. A block that several of its sequences share counts once."""

    peak_blocks: int = 0
    num_steps: int = 0  # in which it was computed
    num_looks: int = 0  # commits after which it held blocks
    sum_unwritten_slots: int = 0

    @property
    def mean_unwritten_slots(self) -> float:
        return self.sum_unwritten_slots / self.num_looks if self.num_looks else 0.0


class RequestMemory(Observer):
    """`costs[i]` is of the i-th request in the order of submission, as in a request log that watches beside it."""

    def __init__(self) -> None:
        self.costs: list[RequestCost] = []
        self._open: dict[str, RequestCost] = {}

    def on_state(self, state: EngineState) -> None:
        for request in state.requests.values():
            if request.request_id not in self._open and request.status != "finished":
                self._begin(request.request_id)

    def after_event(self, state: EngineState, event: Event) -> None:
        match event:
            case ev.RequestSubmitted(request_id=request_id):
                self._begin(request_id)
            case ev.RequestFinished(request_id=request_id):
                self._open.pop(request_id, None)
            case ev.StepScheduled(sequence_ids=sequence_ids):
                for request_id in {sequence_id.rpartition(".")[0] for sequence_id in sequence_ids}:
                    if request_id in self._open:
                        self._open[request_id].num_steps += 1

    def after_batch(self, seq: int, state: EngineState) -> None:
        for request_id, cost in self._open.items():
            request = state.requests.get(request_id)
            if request is not None and request.status == "running":
                _look(cost, request, state)

    def _begin(self, request_id: str) -> None:
        self._open[request_id] = RequestCost()
        self.costs.append(self._open[request_id])


def _look(cost: RequestCost, request: RequestState, state: EngineState) -> None:
    block_ids = {block_id for sequence in request.sequences for block_id in sequence.block_table}
    cost.peak_blocks = max(cost.peak_blocks, len(block_ids))
    if state.phase == "commit" and block_ids:
        block_size = block_size_of(state)
        cost.num_looks += 1
        cost.sum_unwritten_slots += sum(block_size - state.written_slots[block_id] for block_id in block_ids)
