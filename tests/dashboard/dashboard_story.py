"""A pocket engine for tests and for looking at the dashboard: real block bookkeeping, made-up tokens.

It shares, copies on write, makes requests wait and preempts, so its batches pass the auditor; what it says is random.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType

from kvscope.events import types as ev
from kvscope.events.options import OptionError, make_params
from kvscope.events.state import Breakpoints
from kvscope.events.types import Batch, EngineInfo, SamplingParams
from kvscope.transport.source import ListSource, Reply, Status

EPOCH = b"story-epoch-0001"
WORDS = [
    "",
    "the",
    "king",
    "was",
    "a",
    "good",
    "lord",
    "and",
    "he",
    "said",
    "to",
    "her,",
    "come",
    "away",
    "now.\n",
    "my",
    "night",
    "sleep",
    "love",
    "death",
    "time",
    "生",
    "🌙",
    "thou",
]


def engine_info(
    num_blocks: int, block_size: int, *, model: str = "tiny-shakespeare", num_host_blocks: int = 0
) -> EngineInfo:
    return EngineInfo(
        name="story", model=model, device="cpu", dtype="float32", attention_backend="torch", block_size=block_size,
        num_blocks=num_blocks, bytes_per_block=block_size * 1024, num_layers=4, num_kv_heads=2, head_size=16,
        vocab_size=1024, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512, seed=0, kvscope_version="0",
        num_host_blocks=num_host_blocks,
    )  # fmt: skip


@dataclass
class _Sequence:
    name: str
    pieces: list[str]
    table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)
    num_written: int = 0
    num_generated: int = 0
    done: bool = False


@dataclass
class _Request:
    name: str
    params: SamplingParams
    num_prompt: int
    sequences: list[_Sequence]
    forked: bool = False
    waiting: tuple[int, int] | None = None

    @property
    def open(self) -> list[_Sequence]:
        return [seq for seq in self.sequences if not seq.done]


class StoryEngine:
    """`submit` and `step` return batches in the order a real engine would publish them."""

    def __init__(
        self,
        num_blocks: int = 6,
        block_size: int = 4,
        *,
        free: Sequence[int] | None = None,
        seed: int = 1,
        num_host_blocks: int = 0,
    ):
        self.block_size, self.num_blocks, self.num_host_blocks = block_size, num_blocks, num_host_blocks
        self.free_on_host = list(range(num_host_blocks))
        self.free = list(free) if free is not None else list(range(num_blocks))
        self.refs = [0] * num_blocks
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []
        self.step_number, self.time_ns, self.num_submitted = 0, 0, 0
        self.random = random.Random(seed)
        self.events: list[ev.Event] = []
        self.name_prefix = "r"

    def start(self, **info: str) -> list[Batch]:
        told = engine_info(self.num_blocks, self.block_size, num_host_blocks=self.num_host_blocks, **info)
        return [self.batch("life", ev.EngineStarted(wall_time_ns=1, schema_version=1, info=told))]

    def batch(self, phase: ev.Phase, *events: ev.Event) -> Batch:
        self.time_ns += 20_000_000
        return Batch(epoch=EPOCH, step=self.step_number, phase=phase, time_ns=self.time_ns, events=tuple(events))

    def submit(
        self, prompt: str, *, pieces: Sequence[str] | None = None, n: int = 1, max_tokens: int = 16
    ) -> list[Batch]:
        self.num_submitted += 1
        name = f"{self.name_prefix}{self.num_submitted}"
        texts = list(pieces) if pieces is not None else re.findall(r"\s*\S{1,6}|\s+", prompt)
        params = SamplingParams(n=n, max_tokens=max_tokens)
        sequences = [_Sequence(f"{name}.{index}", list(texts)) for index in range(n)]
        self.waiting.append(_Request(name, params, len(texts), sequences))
        return [
            self.batch(
                "control",
                ev.RequestSubmitted(
                    request_id=name,
                    prompt=prompt,
                    prompt_token_ids=list(range(len(texts))),
                    prompt_pieces=texts,
                    params=params,
                ),
            )
        ]

    def cancel(self, name: str) -> list[Batch]:
        for request in [*self.running, *self.waiting]:
            if request.name == name:
                for seq in request.open:
                    self._finish(seq, "cancelled")
                (self.running if request in self.running else self.waiting).remove(request)
                self.events.append(ev.RequestFinished(request_id=name))
        return self._flush("control")

    def step(self, words: dict[str, str] | None = None) -> list[Batch]:
        """One plan batch and one commit batch; `words` fixes the next token of some sequences."""
        self.step_number += 1
        self._grow()
        self._admit()
        work = [
            (seq, len(seq.pieces) - seq.num_written) for request in self.running for seq in self._computing(request)
        ]
        self.events.append(
            ev.StepScheduled(
                sequence_ids=[seq.name for seq, _ in work], num_scheduled_tokens=[count for _, count in work],
            )
        )  # fmt: skip
        batches = self._flush("plan")
        for request in list(self.running):
            self._commit(request, words or {})
        self.events.append(ev.StepCompleted(elapsed_ns=9_000_000, num_tokens=sum(count for _, count in work)))
        return batches + self._flush("commit")

    def run(self, num_steps: int) -> list[Batch]:
        return [batch for _ in range(num_steps) for batch in self.step()]

    def _flush(self, phase: ev.Phase) -> list[Batch]:
        events, self.events = self.events, []
        return [self.batch(phase, *events)] if events else []

    def _computing(self, request: _Request) -> list[_Sequence]:
        return request.open if request.forked else request.sequences[:1]

    def _grow(self) -> None:
        for request in list(self.running):
            for seq in request.open:
                while request in self.running and not self._make_room(request, seq):
                    pass

    def _make_room(self, request: _Request, seq: _Sequence) -> bool:
        logical = seq.num_written // self.block_size
        shared = logical < len(seq.table) and self.refs[seq.table[logical]] > 1
        if logical < len(seq.table) and not shared:
            return True
        if not self.free:
            self._preempt(self.running[-1], request)
            return False
        block_id = self._take()
        if shared:
            source = seq.table[logical]
            self.refs[source] -= 1
            seq.table[logical] = block_id
            self.events.append(
                ev.BlockCopied(
                    sequence_id=seq.name, logical_block=logical, source_block=source, target_block=block_id,
                    num_slots=seq.num_written % self.block_size,
                )
            )  # fmt: skip
        else:
            self.events.append(
                ev.BlocksAllocated(sequence_id=seq.name, first_logical_block=len(seq.table), block_ids=[block_id])
            )
            seq.table.append(block_id)
        return True

    def _preempt(self, victim: _Request, needy: _Request) -> None:
        before, lost = len(self.free), sum(seq.num_written for seq in victim.open)
        moved = {block_id for seq in victim.open for block_id in self._written(seq)}
        swaps = 0 < len(moved) <= len(self.free_on_host)
        host_ids = {block_id: self.free_on_host.pop(0) for block_id in sorted(moved)} if swaps else {}
        for seq in victim.open:
            self._release(seq, host_ids)
        self.running.remove(victim)
        self.waiting.insert(0, victim)
        self.events.append(
            ev.RequestPreempted(
                request_id=victim.name, for_request_id=needy.name, blocks_needed=1,
                blocks_gained=len(self.free) - before, tokens_lost=0 if swaps else lost,
                mode="swap" if swaps else "recompute",
            )
        )  # fmt: skip

    def _written(self, seq: _Sequence) -> list[int]:
        return seq.table[: -(-seq.num_written // self.block_size)]

    def _swap_in(self, request: _Request) -> None:
        block_ids: dict[int, int] = {}
        for seq in request.open:
            for host_id in seq.host_table:
                if host_id in block_ids:
                    self.refs[block_ids[host_id]] += 1
                else:
                    block_ids[host_id] = self._take()
            seq.table = [block_ids[host_id] for host_id in seq.host_table]
            self.events.append(
                ev.BlocksSwappedIn(sequence_id=seq.name, host_block_ids=list(seq.host_table), block_ids=list(seq.table))
            )
            seq.host_table = []
        self.free_on_host += block_ids
        for seq in request.open:
            self._make_room(request, seq)

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            seqs = self._computing(request)
            needs = [-(-len(seq.pieces) // self.block_size) for seq in seqs]
            if sum(needs) > len(self.free):
                reason = (sum(needs), len(self.free))
                if request.waiting != reason:
                    request.waiting = reason
                    self.events.append(
                        ev.RequestWaiting(request_id=request.name, kind="blocks", needed=reason[0], available=reason[1])
                    )
                return
            self.waiting.pop(0)
            self.running.append(request)
            self.events.append(ev.RequestAdmitted(request_id=request.name))
            if any(seq.host_table for seq in seqs):
                self._swap_in(request)
                continue
            for seq, need in zip(seqs, needs, strict=True):
                seq.table = [self._take() for _ in range(need)]
                self.events.append(
                    ev.BlocksAllocated(sequence_id=seq.name, first_logical_block=0, block_ids=list(seq.table))
                )

    def _commit(self, request: _Request, words: dict[str, str]) -> None:
        for seq in self._computing(request):
            self.events.append(ev.SlotsWritten(sequence_id=seq.name, start=seq.num_written, stop=len(seq.pieces)))
            seq.num_written = len(seq.pieces)
        if not request.forked:
            self._fork(request)
        for seq in request.open:
            piece = words.get(seq.name) or " " + self.random.choice(WORDS)
            seq.pieces.append(piece)
            seq.num_generated += 1
            self.events.append(ev.TokensGenerated(sequence_id=seq.name, token_ids=[7], pieces=[piece], text=piece))
            if seq.num_generated >= request.params.max_tokens:
                self._finish(seq, "length")
        if not request.open:
            self.running.remove(request)
            self.events.append(ev.RequestFinished(request_id=request.name))

    def _fork(self, request: _Request) -> None:
        request.forked = True
        first, *others = request.sequences
        for seq in others:
            seq.table, seq.num_written = list(first.table), first.num_written
            for block_id in seq.table:
                self.refs[block_id] += 1
            self.events.append(
                ev.BlocksShared(sequence_id=seq.name, from_sequence_id=first.name, block_ids=list(seq.table))
            )

    def _finish(self, seq: _Sequence, reason: ev.FinishReason) -> None:
        self._release(seq)
        seq.done = True
        self.events.append(ev.SequenceFinished(sequence_id=seq.name, reason=reason))

    def _release(self, seq: _Sequence, host_ids: Mapping[int, int] = MappingProxyType({})) -> None:
        """Give up the table; where host blocks are named, its written blocks move there."""
        if seq.host_table:
            self.free_on_host += sorted(set(seq.host_table))
            self.events.append(ev.HostBlocksReleased(sequence_id=seq.name, host_block_ids=list(seq.host_table)))
            seq.host_table, seq.num_written = [], 0
        if not seq.table:
            return
        freed = [block_id for block_id in seq.table if self.refs[block_id] == 1]
        for block_id in seq.table:
            self.refs[block_id] -= 1
        self.free += freed
        table, seq.table = seq.table, []
        if host_ids:
            seq.host_table = [host_ids[block_id] for block_id in table[: -(-seq.num_written // self.block_size)]]
            self.events.append(
                ev.BlocksSwappedOut(
                    sequence_id=seq.name, block_ids=table, host_block_ids=list(seq.host_table), freed_block_ids=freed
                )
            )
        else:
            self.events.append(ev.BlocksReleased(sequence_id=seq.name, block_ids=table, freed_block_ids=freed))
            seq.num_written = 0

    def _take(self) -> int:
        block_id = self.free.pop(0)
        self.refs[block_id] = 1
        return block_id


def article_batches() -> list[Batch]:
    """B (6 positions) and C (6) in six blocks of four: B at P3 P0, C at P1 P4, as in the article's figure 2."""
    engine = StoryEngine(6, 4, free=[3, 0, 1, 4, 5, 2])
    batches = engine.start()
    batches += engine.submit(
        "Now is the winter of our", pieces=["Now", " is", " the", " winter", " of", " our"], max_tokens=9
    )
    batches += engine.submit("To be or not to be", pieces=["To", " be", " or", " not", " to", " be"], max_tokens=9)
    return batches + engine.step({"r1.0": " discontent", "r2.0": ":"})


def candidates_batches(num_steps: int = 2) -> list[Batch]:
    """Two candidates of one prompt of six tokens, block size four: after step 2, r1.0 has copied P1 to P2."""
    engine = StoryEngine(6, 4)
    batches = engine.start()
    pieces = ["p0", " p1", " p2", " p3", " p4", " p5"]
    batches += engine.submit("p0 p1 p2 p3 p4 p5", pieces=pieces, n=2, max_tokens=8)
    batches += engine.step({"r1.0": " a0", "r1.1": " b0"})
    for _ in range(num_steps - 1):
        batches += engine.step({"r1.0": " a1", "r1.1": " b1"})
    return batches


def crowded_engine() -> tuple[StoryEngine, list[Batch]]:
    """A pool too small for its three requests: one preempted, one waiting with its reason."""
    engine = StoryEngine(8, 4)
    batches = engine.start()
    batches += engine.submit("Once upon a time there was a king", n=2, max_tokens=30)
    batches += engine.submit("The moon shone on the water that night", max_tokens=30)
    batches += engine.submit("A third request, far too long for what is left of this pool of blocks", max_tokens=4)
    return engine, batches


def swapping_engine() -> tuple[StoryEngine, list[Batch]]:
    """Two candidates whose blocks are on the host after step 7, because another request grows."""
    engine = StoryEngine(8, 4, num_host_blocks=12)
    batches = engine.start()
    batches += engine.submit("The moon shone on the water that night", max_tokens=20)
    batches += engine.submit("Once upon a time there was a king", n=2, max_tokens=10)
    return engine, batches


def settled(value: Reply) -> Future[Reply]:
    future: Future[Reply] = Future()
    future.set_result(value)
    return future


class StoryControl:
    """Records what was asked, and answers as an engine would."""

    def __init__(self, source: StorySource) -> None:
        self._source = source
        self.calls: list[tuple[str, object]] = []
        self.answer: Reply | None = None

    def submit(self, prompt: str, options: dict[str, object]) -> Future[Reply]:
        self.calls.append(("submit", (prompt, options)))
        if self.answer is not None:
            return settled(self.answer)
        try:
            params = make_params(options)
        except OptionError as error:
            return settled(Reply(ok=False, error=str(error)))
        self._source.act(lambda engine: engine.submit(prompt, n=params.n, max_tokens=params.max_tokens))
        return settled(Reply(ok=True, request_id="r?"))

    def cancel(self, request_id: str) -> Future[Reply]:
        self.calls.append(("cancel", request_id))
        self._source.act(lambda engine: engine.cancel(request_id))
        return settled(self.answer or Reply(ok=True))

    def pause(self) -> Future[Reply]:
        self.calls.append(("pause", None))
        self._source.paused = True
        self._source.act(lambda engine: [engine.batch("life", ev.EnginePaused())])
        return settled(Reply(ok=True))

    def resume(self) -> Future[Reply]:
        self.calls.append(("resume", None))
        self._source.paused = False
        self._source.act(lambda engine: [engine.batch("life", ev.EngineResumed())])
        return settled(Reply(ok=True))

    def set_breakpoints(self, wanted: Breakpoints) -> Future[Reply]:
        self.calls.append(("break", wanted))
        changed = ev.BreakpointsChanged(events=list(wanted.events), free_below=wanted.free_below)
        self._source.act(lambda engine: [engine.batch("control", changed)])
        return settled(Reply(ok=True))

    def step(self, num_steps: int = 1) -> Future[Reply]:
        self.calls.append(("step", num_steps))
        self._source.act(lambda engine: engine.run(num_steps))
        return settled(Reply(ok=True))


class StorySource(ListSource):
    """A live pocket engine behind a control channel. It steps by itself only when `interval_s` is given."""

    def __init__(self, engine: StoryEngine, batches: Sequence[Batch] = (), *, interval_s: float | None = None) -> None:
        super().__init__(batches or engine.start())
        self.engine, self.control = engine, StoryControl(self)
        self.paused = False
        self._interval_s = interval_s
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        super().start()
        if self._interval_s is not None:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def act(self, do: object) -> None:
        with self._lock:
            self.feed(do(self.engine))

    def set_status(self, status: Status, detail: str = "") -> None:
        self.view.set_status(status, detail)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            if not self.paused and (self.engine.running or self.engine.waiting):
                self.act(lambda engine: engine.step())
