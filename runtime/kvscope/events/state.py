"""What a viewer knows of an engine at one moment: plain records, made by a fold over events (`fold`)."""

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from kvscope.events.columns import Column
from kvscope.events.traces import Traces
from kvscope.events.types import EngineInfo, Event, SamplingParams


class FoldError(Exception):
    """The event cannot be applied to this state: a gap, or a broken publisher."""


class WaitingReason(msgspec.Struct, frozen=True):
    kind: str
    needed: int
    available: int


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    """A way to end that beam search has found; `score` is length-normalised."""

    token_ids: list[int]
    pieces: list[str]
    text: str
    score: float
    finish_reason: str


class SequenceState(msgspec.Struct, kw_only=True):
    """One candidate of a request. `block_table[i]` is the physical block of logical block `num_released + i`."""

    sequence_id: str
    block_table: list[int] = []
    num_written: int = 0  # positions 0:num_written have KV
    token_ids: list[int] = []  # generated only
    pieces: list[str] = []
    text: str = ""
    num_copies: int = 0
    finish_reason: str | None = None
    host_table: list[int] = []  # where its KV is while swapped out
    score: float | None = None  # beam search: log-probability; of an ended one, its hypothesis' score
    num_released: int = 0  # logical blocks 0:num_released fell out of every layer's sliding window

    def blocks(self, start: int, stop: int) -> list[int]:
        """The physical blocks of logical blocks `start:stop`, as far as it has them."""
        return self.block_table[max(start - self.num_released, 0) : max(stop - self.num_released, 0)]


class RequestState(msgspec.Struct, kw_only=True):
    """States: waiting -> running -> finished; running -> preempted -> running."""

    request_id: str
    prompt: str
    prompt_token_ids: Sequence[int]
    prompt_pieces: Sequence[str]
    params: SamplingParams
    sequences: list[SequenceState]
    status: str = "waiting"
    waiting: WaitingReason | None = None
    num_preemptions: int = 0
    submitted_ns: int = 0
    first_token_ns: int | None = None
    finished_ns: int | None = None
    hypotheses: list[Hypothesis] = []  # beam search: the best ways to end so far, best first


class Counters(msgspec.Struct, kw_only=True):
    """Totals over the engine's life."""

    copies: int = 0
    preemptions: int = 0
    refusals: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    dropped_batches: int = 0
    audit_findings: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    evictions: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0


class Breakpoints(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine pauses at: these events, and fewer than `free_below` blocks that are free or cached."""

    events: tuple[str, ...] = ()
    free_below: int | None = None


class EngineState(msgspec.Struct, kw_only=True):
    """Everything a viewer shows. `ref_counts[b]` and `written_slots[b]` are indexed by physical block id.

    A block is held (ref count >= 1), cached (ref count 0, written slots kept) or free (ref count 0, nothing written).
    """

    epoch: bytes = b""
    step: int = 0
    phase: str = "life"
    time_ns: int = 0
    status: str = "starting"  # starting -> running <-> paused -> stopped
    wall_time_ns: int = 0
    schema_version: int = 0  # the engine's; newer than ours: some of its events may be unknown here
    info: EngineInfo | None = None
    ref_counts: Column = msgspec.field(default_factory=Column)
    written_slots: Column = msgspec.field(default_factory=Column)
    requests: dict[str, RequestState] = {}
    finished_order: list[str] = []
    counters: Counters = msgspec.field(default_factory=Counters)
    step_elapsed_ns: int = 0
    host_ref_counts: list[int] = []  # by host block; a fold replaces the list, so that keyframes may share it
    pause_reason: str = ""  # the breakpoint's, while paused at one
    breakpoints: Breakpoints = Breakpoints()
    traces: Traces | msgspec.UnsetType = msgspec.UNSET  # a viewer's own: what is not set is not on the wire

    def sequence(self, sequence_id: str) -> SequenceState:
        """Raises FoldError for a sequence nobody announced."""
        return self.find(sequence_id)[1]

    def find(self, sequence_id: str) -> tuple[RequestState, SequenceState]:
        """The same, with its request."""
        try:
            request_id, index = _split(sequence_id)
            request = self.requests[request_id]
            return request, request.sequences[index]
        except (KeyError, ValueError, IndexError):
            raise FoldError(f"unknown sequence {sequence_id!r}") from None

    def request(self, request_id: str) -> RequestState:
        """Raises FoldError for a request nobody announced."""
        try:
            return self.requests[request_id]
        except KeyError:
            raise FoldError(f"unknown request {request_id!r}") from None

    def trace(self) -> None:
        """Remember from here on what happens to each block."""
        self.traces = Traces(len(self.ref_counts), self.step)

    def num_free_blocks(self) -> int:
        """Blocks that nobody holds and that keep nothing."""
        return len(self.ref_counts) - int(np.count_nonzero(self.ref_counts.numbers)) - self.num_cached_blocks()

    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds, with content kept for the prefix cache."""
        return int(np.count_nonzero((self.ref_counts.numbers == 0) & (self.written_slots.numbers != 0)))

    def holders(self, block_id: int) -> list[tuple[str, int]]:
        """`(sequence_id, logical_block)` of every table entry that points at the block."""
        return [holder for request in self.requests.values() for holder in holders_in(request, block_id)]


@lru_cache(1 << 10)
def _split(sequence_id: str) -> tuple[str, int]:
    """The request's id, and which of its sequences. Raises ValueError. A few hundred are asked for all the time."""
    request_id, _, index = sequence_id.rpartition(".")
    return request_id, int(index)


def holders_in(request: RequestState, block_id: int) -> list[tuple[str, int]]:
    """`(sequence_id, logical_block)` of every table entry of one request that points at the block."""
    return [
        (sequence.sequence_id, logical)
        for sequence in request.sequences
        if block_id in sequence.block_table  # at C speed; most tables do not have it
        for logical, held in enumerate(sequence.block_table, sequence.num_released)
        if held == block_id
    ]


class FullState(Event, frozen=True):
    """The engine's own state, sent after dropped batches; it replaces whatever the receiver had."""

    state: EngineState
