#!/usr/bin/env python3
"""An engine process for the campaigns: real scheduler, tables, pool, publisher and control server, and no model.

It keeps its queue filled with random requests, several candidates each, and writes the digest of its own state, taken
from its live structures and not from events, for every batch that it hands over: `EPOCH TIME_NS DIGEST`.

SIGUSR1: steps while the publisher sends nothing, until its queue is full and a batch was dropped.
SIGTERM: finish what runs, check that the pool is free, leave.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab import digest

from kvscope.engine.choice import Choice
from kvscope.engine.engine import Engine
from kvscope.engine.service import EngineService
from kvscope.events.types import Batch, EngineInfo, SamplingParams
from kvscope.transport.control import ControlServer
from kvscope.transport.endpoints import Endpoints, directory_endpoints, parse_listen
from kvscope.transport.keys import ServerKeys, read_allowed, read_pair
from kvscope.transport.publisher import Publisher

PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 24, 24, 50


class Words:
    """A tokenizer of numbers."""

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(f" {token_id}" for token_id in token_ids)

    def convert_ids_to_tokens(self, token_id: int) -> None:
        return None


class Instantly:
    """A model runner that computes nothing."""

    num_graph_steps = 0

    def run(self, extents: Sequence[Any], copies: Sequence[Any]) -> dict[str, Any]:
        return {sequence.sequence_id: True for sequence, _, stop in extents if stop == sequence.num_tokens}


class Witness:
    """Writes down what the engine's state is each time the engine hands over a batch."""

    def __init__(self, publisher: Publisher, path: Path | None) -> None:
        self._publisher = publisher
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if path is not None else None
        self.engine: Engine | None = None
        self.num_events = self.num_refused = 0

    def publish(self, batch: Batch) -> bool:
        self.num_events += len(batch.events)
        if self.engine is not None and self._file is not None:
            line = f"{batch.epoch.hex()} {batch.time_ns} {digest(self.engine.state())}\n"
            os.write(self._file, line.encode())  # in the page cache at once: kill -9 loses nothing
        is_taken = self._publisher.publish(batch)
        self.num_refused += not is_taken
        return is_taken

    def overflow(self, step: Callable[[], None]) -> None:
        """Step until a batch was dropped, whatever the machine's other work lets the publisher's thread do."""
        before = self.num_refused
        with self._publisher._mirror_lock:  # the thread waits for it before it sends
            while self.num_refused == before:
                step()

    @property
    def needs_full_state(self) -> bool:
        return self._publisher.needs_full_state

    def take_dropped(self) -> int:
        return self._publisher.take_dropped()


def make_info(num_blocks: int) -> EngineInfo:
    return EngineInfo(
        name="lab", model="none", device="none", dtype="float32", attention_backend="none", block_size=4,
        num_blocks=num_blocks, bytes_per_block=64, num_layers=1, num_kv_heads=1, head_size=8, vocab_size=VOCABULARY,
        max_num_seqs=12, max_num_batched_tokens=64, max_model_len=128, seed=0, kvscope_version="0",
        prefix_caching=True,
    )  # fmt: skip


class Load:
    """Keeps an engine busy with random requests."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._random, self._count = engine, random.Random(seed), 0

    def step(self) -> None:
        while len(self._engine.scheduler.waiting) < 3:
            self._count += 1
            prefix = [1, 2, 3, 4] * self._random.randrange(3)
            rest = [self._random.randrange(VOCABULARY) for _ in range(self._random.randint(1, PROMPT_TOKENS))]
            params = SamplingParams(
                n=self._random.choice((1, 1, 2, 3)), max_tokens=self._random.randint(1, NEW_TOKENS), temperature=0.0,
                ignore_eos=True, seed=0,
            )  # fmt: skip
            self._engine.submit("lab", params, f"r{self._count}", prefix + rest)
        self._engine.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--listen")
    parser.add_argument("--keys", type=Path, help="a folder with engine.key_secret and client.key")
    parser.add_argument("--digests", type=Path)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--events-per-second", type=float, default=2_000)
    parser.add_argument("--ring", type=int, default=10_000)
    parser.add_argument("--queue", type=int, default=4_096)
    parser.add_argument("--hurry", type=int, default=0, help="batches to send before anybody can follow")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    endpoints: Endpoints = directory_endpoints(args.directory)
    keys = None
    if args.listen:
        endpoints = parse_listen(args.listen, has_keys=args.keys is not None)
        if args.keys is not None:
            public = args.keys / "engine.key"
            allowed = read_allowed([args.keys / "client.key"])
            keys = ServerKeys(read_pair(args.keys / "engine.key_secret"), allowed, public)
    with contextlib.ExitStack() as stack:
        publisher = Publisher(endpoints.events, ring_batches=args.ring, max_queue=args.queue, keys=keys)
        stack.callback(publisher.close)
        witness = Witness(publisher, args.digests)
        engine = Engine(
            make_info(args.blocks), Instantly(), Words(), witness, choose=lambda draws: [Choice(7, 0.0)] * len(draws)
        )
        witness.engine = engine
        load = Load(engine, args.seed)
        control = ControlServer(endpoints.control, publisher, EngineService(engine), keys=keys)
        stack.callback(control.close)
        while (publisher.last_seq or 0) < args.hurry:
            load.step()
        print("ready", flush=True)
        _run(load, witness, signals, args.events_per_second)
        return _finish(engine)


def _run(load: Load, witness: Witness, signals: list[int], events_per_second: float) -> None:
    started, before = time.monotonic(), witness.num_events
    while signal.SIGTERM not in signals:
        if signal.SIGUSR1 in signals:
            signals.remove(signal.SIGUSR1)
            witness.overflow(load.step)
            print("full", flush=True)
            started, before = time.monotonic(), witness.num_events
        load.step()
        due = started + (witness.num_events - before) / events_per_second
        if (wait_s := due - time.monotonic()) > 0:
            time.sleep(wait_s)
        else:  # never catch up in a burst: a stopped engine goes on at its pace
            started, before = time.monotonic(), witness.num_events


def _finish(engine: Engine) -> int:
    """Whether every block is free or cached once nothing runs any more."""
    while engine.has_work():
        engine.step()
    state, problems = engine.state(), engine.check_integrity()
    engine.stop("over")
    held = sum(1 for count in state.ref_counts if count)
    print(f"end {held} blocks held, {len(problems)} problems", flush=True)
    return 1 if held or problems else 0


if __name__ == "__main__":
    sys.exit(main())
