"""Sinks that need no socket: where a headless run and the tests hand their batches."""

from collections.abc import Sequence

from kvscope.events.audit import Auditor
from kvscope.events.types import Batch
from kvscope.transport.publisher import EventSink


class AuditSink:
    """Checks and folds every batch in the caller's thread; keeps the batches if asked to."""

    needs_full_state = False

    def __init__(self, *, keep: bool = False) -> None:
        self.auditor = Auditor()
        self.batches: list[Batch] = []
        self._keep = keep

    def keep_no_more(self) -> None:
        """Forget the batches kept so far, and keep none from now on."""
        self._keep = False
        self.batches.clear()

    def publish(self, batch: Batch) -> bool:
        self.auditor.observe(batch)
        if self._keep:
            self.batches.append(batch)
        return True

    def take_dropped(self) -> int:
        return 0


class TeeSink:
    """Hands every batch to several sinks; a loss in one is a loss."""

    def __init__(self, sinks: Sequence[EventSink]) -> None:
        self._sinks = list(sinks)

    def add(self, sink: EventSink, earlier: Sequence[Batch]) -> None:
        """One sink more, which first gets what the others have had already."""
        for batch in earlier:
            sink.publish(batch)
        self._sinks.append(sink)

    @property
    def needs_full_state(self) -> bool:
        return any(sink.needs_full_state for sink in self._sinks)

    def publish(self, batch: Batch) -> bool:
        sent = [sink.publish(batch) for sink in self._sinks]
        return all(sent)

    def take_dropped(self) -> int:
        return sum(sink.take_dropped() for sink in self._sinks)
