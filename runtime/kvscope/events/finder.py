"""Whom a sequence id means, remembered from event to event: a decode step names all that run, the next step again."""

from kvscope.events import types as ev
from kvscope.events.state import EngineState, RequestState, SequenceState
from kvscope.events.types import Event

COMINGS_AND_GOINGS = frozenset({ev.RequestSubmitted, ev.RequestFinished})  # after these an id may mean another


class Finder(dict[str, tuple[RequestState, SequenceState]]):
    """`finder[sequence_id]` is `state.find(sequence_id)`, as long as it hears of every event before it is folded."""

    def __init__(self, state: EngineState) -> None:
        self.state = state

    def __missing__(self, sequence_id: str) -> tuple[RequestState, SequenceState]:
        """Raises FoldError for a sequence nobody announced."""
        found = self.state.find(sequence_id)
        if found[1].sequence_id == sequence_id:  # not one of the other ways to write it, as "r1.00"
            self[sequence_id] = found
        return found

    def before(self, event: Event) -> None:
        """One of `COMINGS_AND_GOINGS` will be folded: a request comes anew, or the one that ended first leaves."""
        if isinstance(event, ev.RequestSubmitted):
            self._forget(event.request_id)
        elif self.state.finished_order:
            self._forget(self.state.finished_order[0])

    def follow(self, state: EngineState) -> None:
        """That is the state from now on; when it is another one, nothing is known of it."""
        if state is not self.state:
            self.clear()
            self.state = state

    def _forget(self, request_id: str) -> None:
        request = self.state.requests.get(request_id)
        for sequence in request.sequences if request is not None else ():
            self.pop(sequence.sequence_id, None)
