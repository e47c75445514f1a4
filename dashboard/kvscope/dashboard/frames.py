"""One picture's worth of facts: frozen values copied out of a `View`, so that drawing never touches live state.

Under the lock columns are copied whole, blocks counted only where they were touched, and sequences copied only when
they have changed; the pool is coloured after the lock is released.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvscope.analysis.ledger import Bookkeeper, Ledger
from kvscope.dashboard.copies import HOST, RequestCopies, RequestFrame, SequenceFrame
from kvscope.dashboard.owners import NOBODY, SEVERAL, OwnerCodes
from kvscope.dashboard.pool_frame import (
    EMPTY_HOST_POOL,
    EMPTY_POOL,
    PoolCopy,
    PoolFrame,
    TracesFrame,
    build_host_pool,
    build_pool,
)
from kvscope.events.audit import Finding
from kvscope.events.state import Counters, EngineState
from kvscope.events.types import EngineInfo
from kvscope.transport.source import LogEntry, Status, View

RATE_WINDOW_NS = 3_000_000_000
MIN_RATE_NS = 1_000_000_000  # so long without a token is a rate of zero; less may be half a step
CHEAP_S = 0.002  # a waste ledger that takes no longer comes with every frame


class Behind(NamedTuple):
    """How far a picture of the past is behind the engine, in its own time; None when another engine has begun."""

    elapsed_ns: int | None
    num_batches: int | None
    live_status: Status


class Frame(NamedTuple):
    """Everything the dashboard draws. `status_since` is on the monotonic clock."""

    revision: int
    status: Status
    status_detail: str
    status_since: float
    seq: int | None
    num_gaps: int
    num_refused_events: int
    info: EngineInfo | None
    engine_status: str
    step: int
    phase: str
    time_ns: int
    tokens_per_s: float | None
    counters: Counters
    pool: PoolFrame
    requests: tuple[RequestFrame, ...]
    places: Mapping[str, int]  # where in `requests` an id is
    log: Sequence[LogEntry]
    findings: tuple[Finding, ...]
    step_elapsed_ns: int = 0
    ledger: Ledger | None = None  # while somebody looks at it
    host: PoolFrame = EMPTY_HOST_POOL  # where swapped-out requests are; of no blocks where there is none
    behind: Behind | None = None  # only for the past of a live engine
    pause_reason: str = ""  # a breakpoint's
    epoch: bytes = b""  # of the engine's life
    engine_warning: str = ""

    def request(self, request_id: str) -> RequestFrame | None:
        place = self.places.get(request_id)
        return self.requests[place] if place is not None else None

    def sequence(self, sequence_id: str) -> SequenceFrame | None:
        request = self.request(sequence_id.rpartition(".")[0])
        sequences = request.sequences if request is not None else ()
        return next((sequence for sequence in sequences if sequence.sequence_id == sequence_id), None)

    def holders(self, block_id: int, pool: PoolFrame | None = None) -> list[tuple[str, int]]:
        """`(sequence_id, logical_block)` of every table entry that points at the block, of the device unless told.

        The last to come are asked first, since they have just written, and while no invariant is known to be broken,
        nobody once there are as many as the ref count says: a long table has thousands of entries.
        """
        pool = pool or self.pool
        found: list[tuple[str, int]] = []
        for request in reversed(self.requests if 0 <= block_id < pool.num_blocks else ()):
            if len(found) >= pool.refs[block_id] and not self.findings:
                break
            found += [
                (sequence.sequence_id, sequence.num_released + table.index(block_id))
                for sequence in reversed(request.sequences)
                if block_id in (table := sequence.table_in(pool.letter))
            ]
        return found[::-1]

    def owner_of(self, holders: Sequence[tuple[str, int]]) -> int:
        """The colour of a block with these holders: see owners.py."""
        owners = {name.rpartition(".")[0] for name, _ in holders}
        request = self.request(owners.pop()) if len(owners) == 1 else None
        return request.owner if request is not None else SEVERAL if owners else NOBODY


class RateMeter:
    """Generated tokens per second of event time, over the last few seconds; None until two instants are known."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque()
        self._epoch = b""

    def observe(self, epoch: bytes, time_ns: int, num_tokens: int) -> float | None:
        """Add one sample; time that runs backwards (a rewound recording, a new engine) starts over."""
        samples = self._samples
        if epoch != self._epoch or (samples and (time_ns < samples[-1][0] or num_tokens < samples[-1][1])):
            samples.clear()
            self._epoch = epoch
        if not samples or time_ns > samples[-1][0]:
            samples.append((time_ns, num_tokens))
        while len(samples) > 2 and time_ns - samples[1][0] >= RATE_WINDOW_NS:
            samples.popleft()
        elapsed_ns = samples[-1][0] - samples[0][0]
        num_new = samples[-1][1] - samples[0][1]
        return num_new * 1e9 / elapsed_ns if elapsed_ns >= MIN_RATE_NS or (elapsed_ns and num_new) else None

    @property
    def length(self) -> int:
        """Samples at hand."""
        return len(self._samples)

    def forget(self) -> None:
        """Nothing runs: a silence is no slow work, and the next samples are not measured against the last."""
        self._samples.clear()


class FrameBuilder:
    """What is remembered from one frame to the next: the token rate's samples, sequences, colours, keys of blocks."""

    def __init__(self) -> None:
        self.meter, self.owners, self.bookkeeper = RateMeter(), OwnerCodes(), Bookkeeper()
        self.host_owners = OwnerCodes(HOST)
        self._host_refs: tuple[list[int], NDArray[np.int32]] = ([], np.zeros(0, np.int32))
        self.copies, self.pool = RequestCopies(), PoolCopy()
        self._state: EngineState | None = None
        self._names: set[str | None] | None = None  # to which the view adds what changes
        self.wants_ledger = self.wants_traces = False
        self.owes_ledger = False  # the latest frame has an older one
        self._ledger: Ledger | None = None
        self._next_ledger_s = 0.0

    def account(self, state: EngineState) -> Ledger | None:
        """The waste ledger, if somebody looks. Of a large pool now and then: a twentieth of the time at most."""
        started_s = time.monotonic()
        self.owes_ledger = self.wants_ledger and started_s < self._next_ledger_s
        if self.wants_ledger and not self.owes_ledger:
            self._ledger = self.bookkeeper.draw_up(state)
            cost_s = time.monotonic() - started_s
            self._next_ledger_s = started_s + (20 * cost_s if cost_s > CHEAP_S else 0)
        return self._ledger if self.wants_ledger else None

    def traces(self, state: EngineState) -> TracesFrame | None:
        """Copies of what was seen of each block, if somebody looks."""
        traces = state.traces
        if not traces or not self.wants_traces:
            return None
        writes, hits = traces.writes.numbers.copy(), traces.hits.numbers.copy()
        return TracesFrame(writes, hits, traces.stamp(state.step), traces.since_step)

    def changed_requests(self, view: View) -> set[str | None] | None:
        """Of the state as it was at the last look; None: it is another one, or others have looked."""
        names, is_known = view.changed_names, view.state is self._state and view.changed_names is self._names
        self._state, self._names = view.state, view.watch_requests()
        return names | {name.rpartition(".")[0] for name in names if name} if is_known and names is not None else None

    def host_refs(self, state: EngineState) -> NDArray[np.int32]:
        """The ref counts of host blocks as a column: a new one when the fold has replaced the list."""
        if state.host_ref_counts is not self._host_refs[0]:
            self._host_refs = state.host_ref_counts, np.array(state.host_ref_counts, np.int32)
        return self._host_refs[1]


def build_frame(view: View, builder: FrameBuilder) -> Frame:
    """Copy what is drawn out of the view. Takes and releases the view's lock; mutates only the builder."""
    with view.lock:
        state = view.state
        builder.pool.update(state.ref_counts, state.written_slots)
        traces = builder.traces(state)
        requests = builder.copies.copy(state.requests, builder.changed_requests(view))
        frame = Frame(
            revision=view.revision,
            status=view.status,
            status_detail=view.status_detail,
            status_since=view.status_since,
            seq=view.last_seq,
            num_gaps=view.num_gaps,
            num_refused_events=view.num_refused_events,
            engine_warning=view.engine_warning,
            info=state.info,
            epoch=state.epoch,
            engine_status=state.status,
            step=state.step,
            phase=state.phase,
            time_ns=state.time_ns,
            tokens_per_s=_rate(state, builder.meter),
            counters=msgspec.structs.replace(state.counters),
            pool=EMPTY_POOL,
            requests=requests,
            places=builder.copies.places,
            log=view.log,
            findings=tuple(view.findings),
            step_elapsed_ns=state.step_elapsed_ns,
            ledger=builder.account(state),
            pause_reason=state.pause_reason,
        )
        host_refs = builder.host_refs(state)
    block_size, pool = frame.info.block_size if frame.info is not None else 1, builder.pool
    return frame._replace(
        pool=build_pool(block_size, pool.refs, pool.written, requests, builder.owners, totals=pool.totals)._replace(
            traces=traces, changes=pool.changes
        ),
        host=build_host_pool(block_size, host_refs, requests, builder.host_owners),
    )


def _rate(state: EngineState, meter: RateMeter) -> float | None:
    if not any(request.status == "running" for request in state.requests.values()):
        meter.forget()
        return None
    return meter.observe(state.epoch, state.time_ns, state.counters.generated_tokens)
