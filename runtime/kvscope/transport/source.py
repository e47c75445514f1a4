"""What a viewer reads from: a live engine, a recording, or a list. One reader thread writes, anyone may look.

A source folds batches into a `View` under its lock. The dashboard looks at fixed intervals, and only when `revision`
has moved. Nothing here knows about sockets or files.
"""

import threading
import time
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from kvscope.events.audit import Auditor, Finding, keep_first
from kvscope.events.describe import describe
from kvscope.events.fold import apply_event, begin_batch
from kvscope.events.state import Breakpoints, EngineState
from kvscope.events.types import Batch, Event
from kvscope.transport.tail import Tail

MAX_LOG_ENTRIES = 5_000
MAX_CHANGED_NAMES = 10_000


class Status(Enum):
    """The states of a viewer's connection.

    CONNECTING -> SYNCING -> LIVE; LIVE -> GAP -> LIVE (healed by replay or snapshot);
    LIVE -> STALE (no heartbeat) -> SYNCING; ENDED: the engine said goodbye, or the recording is over.
    REPLAY: the picture comes from a file. HISTORY: from the past of a live engine, which goes on unseen.
    """

    CONNECTING = "CONNECTING"
    SYNCING = "SYNCING"
    LIVE = "LIVE"
    GAP = "GAP"
    STALE = "STALE"
    ENDED = "ENDED"
    REPLAY = "REPLAY"
    HISTORY = "HISTORY"


class LogEntry(NamedTuple):
    """One event as the ticker shows it."""

    seq: int
    step: int
    phase: str
    time_ns: int
    event: Event
    sentence: str


class Keeper(Protocol):
    """Remembers what a view has shown. Called with the view's lock held."""

    def restart(self, state: EngineState, seq: int | None) -> None: ...
    def append(self, seq: int, batch: Batch, state: EngineState, payload: bytes | None) -> None: ...


class View:
    """Everything a viewer may draw. Hold `lock` while reading `state` or `findings`, or several of these."""

    def __init__(self, *keepers: Keeper) -> None:
        self.lock = threading.Lock()
        self.revision = 0
        self.status = Status.CONNECTING
        self.status_detail = ""
        self.status_since = time.monotonic()
        self.state = EngineState()
        self.state.trace()
        self.last_seq: int | None = None
        self.log: Tail[LogEntry] = Tail(max_length=MAX_LOG_ENTRIES)
        self.findings: list[Finding] = []
        self.num_gaps = 0
        self.num_refused_events = 0
        self.engine_warning = ""
        self.changed_names: set[str | None] | None = None
        self._auditor = Auditor(self.state)
        self._keepers = keepers

    def watch_requests(self) -> set[str | None]:
        """Begin to look, with `lock` held: a set of one's own, to which requests and sequences are added by name when
        something happens to them. Where `changed_names` is another one by the next look, anything may have changed.
        """
        self.changed_names = set()
        return self.changed_names

    def _note_changes(self, batch: Batch) -> None:
        names = self.changed_names
        if names is not None:
            names.update(map(_subject, batch.events))
            if len(names) > MAX_CHANGED_NAMES:  # nobody looks any more
                self.changed_names = None

    def set_status(self, status: Status, detail: str = "") -> None:
        """Change the connection's state; a no-op when nothing changes."""
        with self.lock:
            if (status, detail) == (self.status, self.status_detail):
                return
            if status is not self.status:
                self.status_since = time.monotonic()
            self.status, self.status_detail = status, detail
            self.revision += 1

    def warn(self, text: str) -> None:
        """What the engine wants its viewers to know, such as that its recording has stopped; empty: nothing."""
        if text != self.engine_warning:
            with self.lock:
                self.engine_warning = text
                self.revision += 1

    def replace_state(self, state: EngineState, seq: int | None) -> None:
        """Start over from a snapshot taken at `seq`; a state of another life clears the log."""
        with self.lock:
            if state.epoch != self.state.epoch:
                self.log = Tail(max_length=MAX_LOG_ENTRIES)
                self.findings.clear()
            state.trace()
            self.state, self.last_seq, self.changed_names = state, seq, None
            self._auditor = Auditor(state)
            for keeper in self._keepers:
                keeper.restart(state, seq)
            self.revision += 1

    def apply(self, seq: int, batch: Batch, num_refused_events: int = 0, payload: bytes | None = None) -> None:
        """Check, fold and log one batch; `payload` is what came over the wire.

        Raises:
            FoldError: it does not fit; the caller must fetch a snapshot.
        """
        with self.lock:
            self.num_refused_events += num_refused_events
            self._fold(seq, batch)
            self.last_seq = seq
            for keeper in self._keepers:
                keeper.append(seq, batch, self.state, payload)
            self.revision += 1

    def advance(self, seq: int, batch: Batch, first: int, stop: int) -> None:
        """Fold and log events `first:stop` of a batch of the past; who plays it back brings the findings.

        Raises:
            FoldError: it does not fit; the state is then unusable.
        """
        with self.lock:
            begin_batch(self.state, batch)
            self._note_changes(batch)
            self.state, entries = tell(self.state, seq, batch, first, stop)
            self.log = self.log.followed_by(entries)
            self.last_seq = seq
            self.revision += 1

    def show_moment(self, state: EngineState, seq: int | None, log: Sequence[LogEntry]) -> None:
        """Show another moment of the past: state and log at once."""
        with self.lock:
            if not state.traces:
                state.trace()
            self.state, self.last_seq, self.changed_names = state, seq, None
            self.log = Tail(log, max_length=MAX_LOG_ENTRIES)
            self.revision += 1

    def show_findings(self, findings: Sequence[Finding]) -> None:
        """What the auditor has found up to the moment on show."""
        with self.lock:
            self.findings = list(findings)
            self.revision += 1

    def show_refusals(self, num_refused_events: int) -> None:
        """How many events of the past could not be read, as far as it has been looked at."""
        with self.lock:
            if num_refused_events != self.num_refused_events:
                self.num_refused_events = num_refused_events
                self.revision += 1

    def _fold(self, seq: int, batch: Batch) -> None:
        begin_batch(self.state, batch)
        self._note_changes(batch)
        entries = []
        for event in batch.events:
            # The sentence of an event needs the state right after it, so events are observed one by one.
            if found := self._auditor.observe_event(event):
                keep_first(self.findings, found)
            sentence = describe(event, self._auditor.state)
            if sentence is not None:
                entries.append(LogEntry(seq, batch.step, batch.phase, batch.time_ns, event, sentence))
        keep_first(self.findings, self._auditor.finish_batch())
        self.state = self._auditor.state
        self.log = self.log.followed_by(entries)


def _subject(event: Event) -> str | None:
    """The only sequence or request that the event changes."""
    return getattr(event, "sequence_id", None) or getattr(event, "request_id", None)


def tell(
    state: EngineState, seq: int, batch: Batch, first: int = 0, stop: int | None = None
) -> tuple[EngineState, list[LogEntry]]:
    """Fold events `first:stop` of a batch: the state after them, and their lines for the log."""
    entries = []
    for event in batch.events[first:stop]:
        state = apply_event(state, event)
        sentence = describe(event, state)
        if sentence is not None:
            entries.append(LogEntry(seq, batch.step, batch.phase, batch.time_ns, event, sentence))
    return state, entries


class Reply(NamedTuple):
    """An engine's answer to a control request; `error` is one line for the user."""

    ok: bool
    error: str = ""
    request_id: str = ""


class Control(Protocol):
    """What a viewer may ask of an engine. Calls return at once; the answer arrives in the callback's thread."""

    def submit(self, prompt: str, options: dict[str, object]) -> "PendingReply": ...
    def cancel(self, request_id: str) -> "PendingReply": ...
    def pause(self) -> "PendingReply": ...
    def resume(self) -> "PendingReply": ...
    def step(self, num_steps: int = 1) -> "PendingReply": ...
    def set_breakpoints(self, wanted: Breakpoints) -> "PendingReply": ...


class PendingReply(Protocol):
    """A future; `concurrent.futures.Future[Reply]` fits."""

    def result(self, timeout: float | None = None) -> Reply: ...
    def done(self) -> bool: ...


class Source(Protocol):
    """A live engine, a recording, or a list of batches."""

    @property
    def view(self) -> View: ...
    @property
    def control(self) -> Control | None: ...
    def start(self) -> None: ...
    def close(self) -> None: ...


class ListSource:
    """A source for tests: batches from a list, fed by hand."""

    control: Control | None = None

    def __init__(self, batches: Sequence[Batch] = ()) -> None:
        self.view = View()
        self._batches = list(batches)
        self._next_seq = 0

    def start(self) -> None:
        self.feed(self._batches)
        self.view.set_status(Status.LIVE)

    def feed(self, batches: Sequence[Batch]) -> None:
        """Apply more batches, as if they had just arrived."""
        for batch in batches:
            self.view.apply(self._next_seq, batch)
            self._next_seq += 1

    def close(self) -> None:
        """Nothing to release."""
