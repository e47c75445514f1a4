"""Steps the real engine through a trace: only the model is missing, and the time is virtual.

Requests arrive between steps. Those beyond `max_waiting` stay outside until there is room in the queue, so that a
trace far beyond what the pool can serve does not fill the memory with waiting prompts; they wait all the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from kvscope.engine.block_tables import BlockCopy, Extent
from kvscope.engine.choice import Choice
from kvscope.engine.engine import Engine
from kvscope.engine.intake import RequestRefusedError
from kvscope.engine.simulation.cost import StepCost, VirtualClock
from kvscope.engine.simulation.meter import Meter
from kvscope.engine.simulation.trace import GENERATED_TOKEN, Trace
from kvscope.events.types import EngineInfo, SamplingParams
from kvscope.transport.publisher import EventSink

_CHOICE = Choice(GENERATED_TOKEN, 0.0)


class SimulatedRunner:
    """Computes nothing, and takes its time on the virtual clock.

    `ends` are sequences that will end before they have all the tokens they ask for: how long each is just before.
    """

    num_graph_steps = 0

    def __init__(self, clock: VirtualClock, cost: StepCost, end_token: int) -> None:
        self._clock, self._cost = clock, cost
        self._end = Choice(end_token, 0.0)
        self.ends: dict[str, int] = {}

    def swap(self, to_host: Sequence[BlockCopy], from_host: Sequence[BlockCopy]) -> None:
        self._clock.advance(self._cost.of_swap(len(to_host) + len(from_host)))

    def run(self, extents: Sequence[Extent], copies: Sequence[BlockCopy]) -> dict[str, Any]:
        self._clock.advance(self._cost.of(extents))
        return {
            sequence.sequence_id: self._end if self._ends_at(sequence.sequence_id, stop) else _CHOICE
            for sequence, _, stop in extents
            if stop == sequence.num_tokens
        }

    def _ends_at(self, sequence_id: str, length: int) -> bool:
        """Forgets who ends."""
        if self.ends.get(sequence_id) != length:
            return False
        del self.ends[sequence_id]
        return True


class SimulatedTokenizer:
    """Tokens are numbers without a meaning; a generated one is a dot."""

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(["." if token_id == GENERATED_TOKEN else f" {token_id}" for token_id in token_ids])

    def convert_ids_to_tokens(self, token_id: int) -> None:
        return None


class Simulation:
    """An engine on a virtual clock, and who arrives when."""

    def __init__(
        self,
        trace: Trace,
        info: EngineInfo,
        sink: EventSink,
        cost: StepCost,
        max_waiting: int,
        *,
        max_tokens: int | None = None,
    ) -> None:
        """Every request asks for `max_tokens`, unless None, and ends as in the trace if that is sooner."""
        self.trace, self._max_waiting, self._max_tokens = trace, max_waiting, max_tokens
        self._clock = VirtualClock()
        self._num_arrived = 0
        self.meter = Meter(sink)
        self._runner = SimulatedRunner(self._clock, cost, trace.end_token)
        self.engine = Engine(
            info,
            self._runner,
            SimulatedTokenizer(),
            self.meter,
            choose=lambda draws: [draw.logits for draw in draws],  # the runner's word is final
            eos_token_ids=frozenset({trace.end_token}),
            clock_ns=self._clock,
            check_when_idle=False,  # O(pool), and a simulation may be idle between any two requests
        )
        self.meter.watch(self.engine)

    @property
    def elapsed_ns(self) -> int:
        """Virtual time so far."""
        return self._clock.now_ns

    def steps(self) -> Iterator[int]:
        """Step until the last request has ended; after each step, how many have."""
        while True:
            self._submit_due()
            if self.engine.has_work():
                self.engine.step()
                yield self.meter.num_ended
            elif self._num_arrived < len(self.trace):
                self._clock.advance_to(int(self.trace.arrivals_ns[self._num_arrived]))
            else:
                return

    def _submit_due(self) -> None:
        """Everybody who is here by now, as long as the queue has room."""
        trace, waiting = self.trace, self.engine.scheduler.waiting
        while (
            self._num_arrived < len(trace)
            and trace.arrivals_ns[self._num_arrived] <= self._clock.now_ns
            and len(waiting) < self._max_waiting
        ):
            self._submit(self._num_arrived)
            self._num_arrived += 1

    def _submit(self, number: int) -> None:
        token_ids, request_id = self.trace.prompt_token_ids(number), f"r{number + 1}"
        num_output = self.trace.num_output_tokens(number)
        params = SamplingParams(
            max_tokens=self._max_tokens or num_output, temperature=0.0, ignore_eos=self._max_tokens is None, seed=0
        )
        try:
            request = self.engine.submit(f"{len(token_ids)} tokens", params, request_id, token_ids)
        except RequestRefusedError as error:
            self.meter.refused(str(error))
        else:
            self.meter.submitted(request, int(self.trace.arrivals_ns[number]))
            if num_output < params.max_tokens:
                self._runner.ends[f"{request_id}.0"] = len(token_ids) + num_output - 1
