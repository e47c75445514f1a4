"""Synthetic sources for `terminal_bytes.py`: a thread that folds batches into a view at a steady pace."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lab_engine import Instantly, Words

from kvscope.engine.choice import Choice
from kvscope.engine.engine import Engine
from kvscope.events import types as ev
from kvscope.events.types import Batch, EngineInfo, SamplingParams
from kvscope.transport.source import Status, View

BLOCK_SIZE = 16


class Nobody:
    """A control that answers nothing, so that the prompt can be typed into."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise NotImplementedError(name)


class Paced:
    """Batches from an iterator, so many a second; a late one is never caught up with."""

    control: Any = Nobody()

    def __init__(self, batches: Iterable[Batch], per_second: float, at_once: int = 0) -> None:
        self.view = View()
        self._batches, self._interval_s, self._next_seq = iter(batches), 1 / per_second, at_once
        for seq in range(at_once):
            self.view.apply(seq, next(self._batches))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.view.set_status(Status.LIVE)
        self._thread.start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        due = time.monotonic()
        for seq, batch in enumerate(self._batches, start=self._next_seq):
            self.view.apply(seq, batch)
            due = max(due + self._interval_s, time.monotonic() - self._interval_s)
            if self._over.wait(max(due - time.monotonic(), 0)):
                return


def make_info(num_blocks: int) -> EngineInfo:
    return EngineInfo(
        name="bench", model="none", device="none", dtype="float32", attention_backend="none", block_size=BLOCK_SIZE,
        num_blocks=num_blocks, bytes_per_block=64, num_layers=1, num_kv_heads=1, head_size=8, vocab_size=50,
        max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1 << 20, seed=0, kvscope_version="0",
    )  # fmt: skip


class Kept:
    """A sink that keeps what the engine hands over."""

    needs_full_state = False

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()

    def publish(self, batch: Batch) -> bool:
        self.batches.append(batch)
        return True

    def take_dropped(self) -> int:
        return 0


def decode_batches() -> Iterator[Batch]:
    """Eight sequences of a real engine that decode without an end, on 1,024 blocks."""
    sink, rng = Kept(), random.Random(1)
    engine = Engine(
        make_info(1024),
        Instantly(),
        Words(),
        sink,
        choose=lambda draws: [Choice(rng.randrange(50), 0.0) for _ in draws],
    )
    for number in range(1, 1 << 20):
        while len(engine.requests) - len(engine.finished_order) < 8:
            name = f"r{number}.{len(engine.requests)}"
            params = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True, seed=0)
            engine.submit("a prompt", params, name.replace(".", "x"), [rng.randrange(50) for _ in range(40)])
        engine.step()
        while sink.batches:
            yield sink.batches.popleft()


def churn_batches(
    num_blocks: int, num_sequences: int, blocks_each: int, blocks_per_step: int, growing: int
) -> Iterator[Batch]:
    """Sequences that grow, `blocks_per_step` between them, and leave whole, oldest first, on a scattered free list."""
    free = deque(random.Random(1).sample(range(num_blocks), num_blocks))
    tables: dict[str, list[int]] = {}
    step = count = 0

    def batch(phase: str, *events: ev.Event) -> Batch:
        return Batch(epoch=b"\1" * 16, step=step, phase=phase, time_ns=step * 20_000_000, events=events)

    def begin() -> list[ev.Event]:
        nonlocal count
        count += 1
        tables[f"r{count}.0"] = []
        about = {"prompt": "a long document", "prompt_token_ids": [1], "prompt_pieces": ["a"]}
        params = SamplingParams(max_tokens=1 << 20)
        submitted = ev.RequestSubmitted(request_id=f"r{count}", params=params, **about)  # type: ignore[arg-type]
        return [submitted, ev.RequestAdmitted(request_id=f"r{count}")]

    def grow(name: str, num: int) -> list[ev.Event]:
        table, new = tables[name], [free.popleft() for _ in range(num)]
        start = len(table) * BLOCK_SIZE
        table.extend(new)
        return [
            ev.BlocksAllocated(sequence_id=name, first_logical_block=len(table) - num, block_ids=new),
            ev.SlotsWritten(sequence_id=name, start=start, stop=len(table) * BLOCK_SIZE),
        ]

    def end(name: str) -> list[ev.Event]:
        table = tables.pop(name)
        free.extend(table)
        return [
            ev.SequenceFinished(sequence_id=name, reason="length"),
            ev.BlocksReleased(sequence_id=name, block_ids=table, freed_block_ids=table),
            ev.RequestFinished(request_id=name.removesuffix(".0")),
        ]

    yield batch("life", ev.EngineStarted(wall_time_ns=0, schema_version=ev.SCHEMA_VERSION, info=make_info(num_blocks)))
    for step in range(1, num_sequences + 1):
        yield batch("plan", *begin(), *grow(f"r{step}.0", blocks_each))
    while True:
        step += 1
        events: list[ev.Event] = []
        short = [name for name in list(tables)[-2 * growing :] if len(tables[name]) < blocks_each][:growing]
        while len(short) < growing:
            events += end(next(iter(tables))) + begin()
            short.append(f"r{count}.0")
        share = blocks_per_step // growing
        for name in short:
            events += grow(name, min(share, blocks_each - len(tables[name])))
        yield batch("commit", *events, ev.StepCompleted(elapsed_ns=20_000_000, num_tokens=growing))


FEEDS: dict[str, Callable[[], Paced]] = {
    "decode": lambda: Paced(decode_batches(), 60),  # two batches a step
    "million": lambda: Paced(churn_batches(1_000_000, 400, 2_000, 133, 4), 50, at_once=401),
    "storm": lambda: Paced(churn_batches(8_000, 64, 100, 800, 8), 50, at_once=65),
}
