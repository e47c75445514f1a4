"""The facts an engine publishes: one frozen class per fact, discriminated by `type` on the wire.

Order inside a batch is the order in which things happened. Lists keep a long prefill one event instead of hundreds.
Positions are half-open intervals `start:stop` of token positions in one sequence; position p lives in logical block
`p // block_size`, slot `p % block_size`. Required fields never change; a new field must have a default.
"""

from typing import Annotated, Literal

import msgspec

SCHEMA_VERSION = 3
MAX_NUM_BLOCKS = 1 << 24  # what a viewer is ready to hold

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUM_BLOCKS)]

# What we say. On the wire these are plain strings, so that a later word costs a viewer nothing.
Phase = Literal["life", "control", "plan", "commit"]
EngineStatus = Literal["running", "paused", "stopped"]
FinishReason = Literal["stop", "length", "cancelled"]
MissKind = Literal["nothing_shared", "shorter_than_block", "evicted"]
WaitingKind = Literal[
    "blocks", "worst_case", "watermark", "reservation", "fragmentation", "token_budget", "sequence_cap", "order"
]
PreemptionMode = Literal["recompute", "swap"]
PreemptionReason = Literal["asked", "no_host_room", "one_step", "many_steps"]


def _snake_case(class_name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in class_name).lstrip("_")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=_snake_case, gc=False):
    """Base of every fact. Facts point at no facts: there is nothing for the collector to find, and many to look at."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's tokens are chosen; names and defaults as in vLLM's SamplingParams where both exist."""

    n: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    max_tokens: int = 64
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0
    seed: int | None = None  # None: drawn from the engine's seed and the request's id
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""  # requests share cached prefixes only with the same salt
    beam_width: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1  # above 1: beam search; nothing is drawn
    length_penalty: float = 1.0  # a hypothesis scores its log-probability / length ** length_penalty

    @property
    def num_sequences(self) -> int:
        """Block tables the request has: one per beam or per candidate."""
        return max(self.n, self.beam_width)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration a viewer needs to read the stream. Sizes are bytes, lengths are token positions."""

    name: str
    model: str
    device: str
    dtype: str
    attention_backend: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_NUM_BLOCKS)]
    bytes_per_block: Count  # K and V of all layers
    num_layers: Count
    num_kv_heads: Count
    head_size: Count
    vocab_size: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    max_model_len: Count
    seed: int
    kvscope_version: str
    prefix_caching: bool = False
    num_host_blocks: Annotated[int, msgspec.Meta(ge=0, le=MAX_NUM_BLOCKS)] = 0  # for swapped-out requests
    preemption: str = "recompute"  # recompute, swap or auto
    admission: str = "now"  # now, worst-case or watermark
    allocator: str = "paged"  # or contiguous: one run of blocks per sequence, for its maximum
    sliding_window: Annotated[int, msgspec.Meta(ge=1)] | None = None  # no layer looks back further; None: one does
    kv_cache_dtype: str = "auto"  # auto: as dtype
    cuda_graphs: bool = False  # decode steps are replayed

    @property
    def kv_dtype(self) -> str:
        """What keys and values are stored as."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


# --- the engine's life -------------------------------------------------------------------------------------------


class EngineStarted(Event, frozen=True):
    """First event of a life: the wall-clock anchor of `time_ns`, and everything a viewer must know."""

    wall_time_ns: Count
    schema_version: Count
    info: EngineInfo


class EngineStopped(Event, frozen=True):
    reason: str


class EnginePaused(Event, frozen=True):
    """No step runs until resumed or stepped. `reason` is a breakpoint's, empty where somebody asked for the pause."""

    reason: str = ""


class EngineResumed(Event, frozen=True):
    """Steps run freely again."""


class BreakpointsChanged(Event, frozen=True):
    """What the engine pauses at from now on, instead of what it did: events by name, and free blocks falling below."""

    events: list[str]  # names in `BREAKPOINTS`
    free_below: Count | None = None


class BatchesDropped(Event, frozen=True):
    """The hand-over queue was full; a full state follows in the same batch, so the hole is never silent."""

    num_batches: Count


class AuditFinding(Event, frozen=True):
    """The engine's own integrity check failed. `rule` is the number of the invariant in the documentation."""

    rule: int
    message: str


# --- requests ----------------------------------------------------------------------------------------------------


class RequestSubmitted(Event, frozen=True):
    """A prompt entered the waiting queue. Its sequences are `{request_id}.0` to `{request_id}.{n-1}`."""

    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    prompt_pieces: list[str]  # text of each token, for the slots
    params: SamplingParams


class RequestRefused(Event, frozen=True):
    """The request can never run; it does not enter the queue."""

    request_id: str
    reason: str


class RequestWaiting(Event, frozen=True):
    """Why a request was not admitted in this step. Sent only when the reason changes."""

    request_id: str
    kind: str  # WaitingKind
    needed: Count
    available: Count


class RequestAdmitted(Event, frozen=True):
    request_id: str


class RequestPreempted(Event, frozen=True):
    """A running request, the one admitted last, gave up every block.

    Its KV is recomputed later, or moved to host blocks (`mode`). `reason` says why this way: it was asked for; the
    host pool has no room; what is lost is one step's work, or more than that.
    """

    request_id: str
    for_request_id: str  # whose growth needed the room
    blocks_needed: Count
    blocks_gained: Count
    tokens_lost: Count  # written positions to compute again, over all its sequences; none when swapped
    mode: str = "recompute"  # PreemptionMode
    reason: str = "asked"  # PreemptionReason
    host_blocks_needed: Count = 0
    host_blocks_available: Count = 0


class RequestFinished(Event, frozen=True):
    """Every sequence of the request has ended."""

    request_id: str


class SequenceFinished(Event, frozen=True):
    sequence_id: str
    reason: str  # FinishReason


class SequenceForked(Event, frozen=True):
    """A beam died and another one's child took its place: it continues as a copy of the other's tokens.

    It holds no blocks at that moment; `BlocksShared` follows.
    """

    sequence_id: str
    from_sequence_id: str


class HypothesisFinished(Event, frozen=True):
    """A beam of this request could end here: its tokens and this one are a hypothesis, if among the best so far.

    `score` is the sum of log-probabilities over length ** length_penalty. The best `beam_width` are kept.
    """

    request_id: str
    from_sequence_id: str
    token_id: int
    piece: str
    text: str  # what the token adds to the beam's text
    score: float
    reason: str  # FinishReason


class BeamSearchFinished(Event, frozen=True):
    """Nothing can beat the hypotheses any more: sequence i of the request becomes the i-th best of them."""

    request_id: str


# --- memory ------------------------------------------------------------------------------------------------------


class BlocksAllocated(Event, frozen=True):
    """Free blocks were reserved: logical blocks `first_logical_block, ...` of the sequence, ref count 1, unwritten."""

    sequence_id: str
    first_logical_block: Count
    block_ids: list[BlockId]


class BlocksShared(Event, frozen=True):
    """A sequence without blocks now points at all of another one's: ref count +1 each, what is written in common."""

    sequence_id: str
    from_sequence_id: str
    block_ids: list[BlockId]


class BlockCopied(Event, frozen=True):
    """Copy-on-write: `target_block` (ref count 1) replaces `source_block` (ref count -1) in this table only."""

    sequence_id: str
    logical_block: Count
    source_block: BlockId
    target_block: BlockId
    num_slots: Count  # written slots preserved


class SlotsWritten(Event, frozen=True):
    """The forward pass that computes KV for positions `start:stop` has finished."""

    sequence_id: str
    start: Count
    stop: Count


class BlocksReused(Event, frozen=True):
    """A prefix-cache hit: the sequence's table begins with these full, written blocks; ref count +1 each."""

    sequence_id: str
    block_ids: list[BlockId]
    num_tokens: Count  # positions that need not be computed


class BlocksEvicted(Event, frozen=True):
    """Cached blocks give up their content, least recently used first, because a sequence needs room."""

    block_ids: list[BlockId]
    for_sequence_id: str


class PrefixLookup(Event, frozen=True):
    """What the prefix cache knew of a request at its admission, and why it did not know more.

    `miss` concerns the first block that was not hit: nothing cached begins like it, the common run of
    `num_common_tokens` is shorter than a block, or it was evicted at `evicted_at_step` for `evicted_for`.
    """

    request_id: str
    num_tokens: Count
    num_hit_tokens: Count
    miss: str | None  # MissKind
    num_common_tokens: Count
    evicted_at_step: Count | None = None
    evicted_for: str | None = None


class BlocksReleased(Event, frozen=True):
    """All blocks that the sequence still had are gone. `freed_block_ids` reached ref count 0 and are back in the pool.

    Of these, `cached_block_ids` keep their content for the prefix cache until they are evicted.
    """

    sequence_id: str
    block_ids: list[BlockId]
    freed_block_ids: list[BlockId]
    cached_block_ids: list[BlockId] = []


class BlocksOutOfWindow(Event, frozen=True):
    """No layer will read these again: the sequence gives up the first logical blocks that it still has.

    They are `first_logical_block, ...`; all others keep their logical numbers. Freed and cached as in `BlocksReleased`.
    """

    sequence_id: str
    first_logical_block: Count
    block_ids: list[BlockId]
    freed_block_ids: list[BlockId]
    cached_block_ids: list[BlockId] = []


class BlocksSwappedOut(Event, frozen=True):
    """A preempted sequence's written blocks moved to host blocks; its whole table is gone, its KV is not.

    Block i of the table, for as many as are written, is now in host block `host_block_ids[i]`. Of the device's blocks
    `freed_block_ids` reached ref count 0; of these, `cached_block_ids` keep their content for the prefix cache.
    """

    sequence_id: str
    block_ids: list[BlockId]
    host_block_ids: list[BlockId]
    freed_block_ids: list[BlockId]
    cached_block_ids: list[BlockId] = []


class BlocksSwappedIn(Event, frozen=True):
    """Host block `host_block_ids[i]` came back as `block_ids[i]`, block i of the sequence's table, KV and all.

    A block that another of the request's sequences has brought back already is shared.
    """

    sequence_id: str
    host_block_ids: list[BlockId]
    block_ids: list[BlockId]


class HostBlocksReleased(Event, frozen=True):
    """A swapped-out sequence has ended; its host blocks are given up."""

    sequence_id: str
    host_block_ids: list[BlockId]


# --- steps -------------------------------------------------------------------------------------------------------


class StepScheduled(Event, frozen=True):
    """What this step computes: `num_scheduled_tokens[i]` tokens of `sequence_ids[i]`."""

    sequence_ids: list[str]
    num_scheduled_tokens: list[int]


class TokensGenerated(Event, frozen=True):
    """Chosen tokens. Their KV is written when the next step processes them as input."""

    sequence_id: str
    token_ids: list[int]
    pieces: list[str]
    text: str  # what these tokens add to the sequence's text (complete characters only)
    score: float | None = None  # beam search: log-probability of all tokens generated so far


class StepCompleted(Event, frozen=True):
    elapsed_ns: Count
    num_tokens: Count


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of one phase of one step. `time_ns` is monotonic since engine start."""

    epoch: bytes  # 16 random bytes per engine life
    step: Count
    phase: str  # Phase
    time_ns: Count
    events: tuple[Event, ...]
