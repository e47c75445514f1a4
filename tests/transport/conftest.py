"""A small engine that is only a stream, and what is needed to serve it over real sockets."""

import copy
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvscope.events import types as ev
from kvscope.events.audit import Auditor
from kvscope.events.state import Breakpoints, EngineState, FullState
from kvscope.events.types import Batch, Event, Phase, SamplingParams
from kvscope.transport.client import EngineClient
from kvscope.transport.control import ControlServer
from kvscope.transport.endpoints import Endpoints, directory_endpoints
from kvscope.transport.keys import ServerKeys
from kvscope.transport.publisher import Publisher
from kvscope.transport.requests import ControlRefused
from kvscope.transport.source import Status, View

BLOCK_SIZE, NUM_BLOCKS = 4, 12


def wait_until(condition: Callable[[], object], what: str = "", timeout_s: float = 20.0) -> None:
    """Poll until the condition holds; the time-out only ends a test that would fail anyway."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting: {what or condition}"
        time.sleep(0.002)


class Stream:
    """Random but valid batches: submit, allocate, write, share, copy on write, release. Audits itself."""

    def __init__(self, seed: int = 0, *, epoch: bytes | None = None) -> None:
        self._random = random.Random(seed)
        self.epoch = epoch if epoch is not None else self._random.randbytes(16)
        self.auditor = Auditor()
        self.batches: list[Batch] = []
        self._num_requests = 0

    @property
    def state(self) -> EngineState:
        return self.auditor.state

    def take(self, num_batches: int) -> list[Batch]:
        return [self.next() for _ in range(num_batches)]

    def next(self) -> Batch:
        number = len(self.batches)
        if number == 0:
            return self._emit("life", [ev.EngineStarted(wall_time_ns=10**18, schema_version=1, info=self._info())])
        if number % 8 == 1:
            return self._emit("control", [self._submit()])
        return self._emit("plan", self._plan()) if number % 2 == 0 else self._emit("commit", self._commit())

    def stop(self) -> Batch:
        return self._emit("life", [ev.EngineStopped(reason="over")])

    def full_state(self, num_dropped: int) -> Batch:
        """What an engine sends after a drop: the state instead of what happened."""
        events: tuple[Event, ...] = (
            ev.BatchesDropped(num_batches=num_dropped),
            FullState(state=copy.deepcopy(self.state)),
        )
        return self._emit("plan", list(events))

    def _emit(self, phase: Phase, events: list[Event]) -> Batch:
        number = len(self.batches)
        batch = Batch(
            epoch=self.epoch, step=number // 2, phase=phase, time_ns=number * 10_000_000, events=tuple(events)
        )
        if phase != "plan" or not any(isinstance(event, FullState) for event in events):
            assert self.auditor.observe(copy.deepcopy(batch)) == []
        self.batches.append(batch)
        return batch

    def _info(self) -> ev.EngineInfo:
        return ev.EngineInfo(
            name="lab", model="tiny", device="cpu", dtype="float32", attention_backend="torch",
            block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, bytes_per_block=64, num_layers=1, num_kv_heads=1,
            head_size=8, vocab_size=512, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, seed=0,
            kvscope_version="0.1.0",
        )  # fmt: skip

    def _submit(self) -> Event:
        self._num_requests += 1
        length = self._random.randint(1, 9)
        return ev.RequestSubmitted(
            request_id=f"r{self._num_requests}",
            prompt="p" * length,
            prompt_token_ids=list(range(length)),
            prompt_pieces=["p"] * length,
            params=SamplingParams(n=self._random.choice((1, 2, 3))),
        )

    def _free(self) -> list[int]:
        free = [block for block, count in enumerate(self.state.ref_counts) if count == 0]
        self._random.shuffle(free)
        return free

    def _plan(self) -> list[Event]:
        free, events = self._free(), list[Event]()
        ref_counts = list(self.state.ref_counts)
        for request in self.state.requests.values():
            if request.status == "waiting":
                num_needed = -(-len(request.prompt_token_ids) // BLOCK_SIZE)
                if num_needed > len(free):
                    continue
                blocks = [free.pop() for _ in range(num_needed)]
                events.append(ev.RequestAdmitted(request_id=request.request_id))
                events.append(
                    ev.BlocksAllocated(sequence_id=f"{request.request_id}.0", first_logical_block=0, block_ids=blocks)
                )
            elif request.status == "running":
                for sequence in request.sequences:
                    logical, slot = divmod(sequence.num_written, BLOCK_SIZE)
                    if not sequence.num_written or not free:
                        continue
                    if logical == len(sequence.block_table):
                        events.append(
                            ev.BlocksAllocated(
                                sequence_id=sequence.sequence_id,
                                first_logical_block=logical,
                                block_ids=[free.pop()],
                            )
                        )
                    elif ref_counts[source := sequence.block_table[logical]] > 1:
                        ref_counts[source] -= 1
                        events.append(
                            ev.BlockCopied(
                                sequence_id=sequence.sequence_id,
                                logical_block=logical,
                                source_block=source,
                                target_block=free.pop(),
                                num_slots=slot,
                            )
                        )
        return events

    def _commit(self) -> list[Event]:
        events: list[Event] = []
        ref_counts = list(self.state.ref_counts)
        for request in self.state.requests.values():
            if request.status != "running":
                continue
            first = request.sequences[0]
            if first.num_written == 0:
                events += self._prefill(first.sequence_id, len(request.prompt_token_ids), request.sequences)
                continue
            is_over = self._random.random() < 0.25
            for sequence in request.sequences:
                logical = sequence.num_written // BLOCK_SIZE
                writable = (
                    logical < len(sequence.block_table) and self.state.ref_counts[sequence.block_table[logical]] == 1
                )
                if writable and not is_over:
                    start = sequence.num_written
                    events.append(ev.SlotsWritten(sequence_id=sequence.sequence_id, start=start, stop=start + 1))
                    events.append(
                        ev.TokensGenerated(sequence_id=sequence.sequence_id, token_ids=[7], pieces=[" a"], text=" a")
                    )
                elif not writable:
                    is_over = is_over or not self._free()
            if is_over and not any(getattr(event, "sequence_id", "") == first.sequence_id for event in events):
                for sequence in request.sequences:
                    freed = []
                    for block in sequence.block_table:
                        ref_counts[block] -= 1
                        freed += [block] if ref_counts[block] == 0 else []
                    events.append(ev.SequenceFinished(sequence_id=sequence.sequence_id, reason="length"))
                    events.append(
                        ev.BlocksReleased(
                            sequence_id=sequence.sequence_id,
                            block_ids=list(sequence.block_table),
                            freed_block_ids=freed,
                        )
                    )
                events.append(ev.RequestFinished(request_id=request.request_id))
        return events

    def _prefill(self, sequence_id: str, length: int, sequences: list[object]) -> list[Event]:
        table = list(self.state.sequence(sequence_id).block_table)
        events: list[Event] = [ev.SlotsWritten(sequence_id=sequence_id, start=0, stop=length)]
        request_id = sequence_id.rpartition(".")[0]
        events += [
            ev.BlocksShared(sequence_id=f"{request_id}.{index}", from_sequence_id=sequence_id, block_ids=table)
            for index in range(1, len(sequences))
        ]
        return events


class FakeEngine:
    """A control handler that writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def submit(self, prompt: str, params: SamplingParams, request_id: str | None) -> str:
        if prompt == "refuse":
            raise ControlRefused("no room\nfor this")
        if prompt == "break":
            raise ZeroDivisionError("a bug")
        self.calls.append(("submit", prompt, params, request_id))
        return request_id or "r1"

    def cancel(self, request_id: str) -> None:
        self.calls.append(("cancel", request_id))

    def pause(self) -> None:
        self.calls.append(("pause",))

    def resume(self) -> None:
        self.calls.append(("resume",))

    def step(self, num_steps: int) -> None:
        self.calls.append(("step", num_steps))

    def set_breakpoints(self, wanted: Breakpoints) -> None:
        self.calls.append(("break", wanted))

    def stats(self) -> dict[str, object]:
        return {"steps": 3}


class Served:
    """A stream behind a publisher and a control server, as an engine would run it."""

    def __init__(
        self,
        endpoints: Endpoints,
        stream: Stream,
        *,
        keys: ServerKeys | None = None,
        read_only: bool = False,
        **options: object,
    ) -> None:
        self.stream = stream
        self.engine = FakeEngine()
        self.endpoints = endpoints
        self.publisher = Publisher(endpoints.events, keys=keys, **options)  # type: ignore[arg-type]
        self.control = ControlServer(endpoints.control, self.publisher, self.engine, read_only=read_only, keys=keys)
        self._num_accepted = 0

    def publish_batch(self, batch: Batch) -> bool:
        is_accepted = self.publisher.publish(batch)
        self._num_accepted += is_accepted
        return is_accepted

    def publish(self, num_batches: int = 1) -> None:
        """Like an engine: after a drop the full state goes out instead."""
        for _ in range(num_batches):
            batch = self.stream.next()
            num_dropped = self.publisher.take_dropped()
            if num_dropped or self.publisher.needs_full_state:
                batch = self.stream.full_state(num_dropped)
            self.publish_batch(batch)

    def drain(self) -> None:
        """Until the publisher has taken everything."""
        wait_until(lambda: self.publisher.last_seq == self._num_accepted - 1, "the publisher")

    def close(self) -> None:
        self.control.close()
        self.publisher.close()


class Lab:
    """Makes engines and clients, and closes them all."""

    wait_until = staticmethod(wait_until)
    Stream = Stream
    FakeEngine = FakeEngine

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.endpoints = directory_endpoints(directory, "lab")
        self._open: list[Served | EngineClient] = []

    def serve(self, stream: Stream | None = None, endpoints: Endpoints | None = None, **options: object) -> Served:
        served = Served(endpoints or self.endpoints, stream or Stream(), **options)
        self._open.append(served)
        return served

    def attach(self, endpoints: Endpoints | None = None, view: View | None = None) -> EngineClient:
        client = EngineClient(endpoints or self.endpoints, view)
        client.start()
        self._open.append(client)
        return client

    def wait_live(self, client: EngineClient, served: Served | None = None) -> None:
        """LIVE, and the whole stream seen."""
        wait_until(lambda: client.view.status is Status.LIVE, "LIVE")
        if served is not None:
            served.drain()
            wait_until(
                lambda: client.view.status is Status.LIVE and client.view.last_seq == served.publisher.last_seq,
                "the last batch",
            )

    def close(self) -> None:
        for thing in reversed(self._open):
            thing.close()


@pytest.fixture(scope="session")
def make_stream() -> type[Stream]:
    return Stream


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.close()
