#!/usr/bin/env python3
"""What a stopped dashboard costs an engine; prints one table.

    python benchmarks/frozen_subscriber.py [--minutes 10] [--steps-per-second 100] [--seed 0]

Two engines in one process, alike to the last request, make their steps in turns, 20 at a time: a subscriber of the
first one is stopped (SIGSTOP) all the time, the second one has nobody. So whatever else the machine does hits both.
A turn ends when the engine's publisher has sent everything: what its thread takes from the interpreter is taken from
its own engine, never from the other one. A step is scheduler, tables, pool and the hand-over of its batches, without a
model, which would only dilute the difference. The hand-over is `publish` on the engine's thread; encoding happens on
the publisher's. Left out, and counted, are steps in the midst of which the kernel gave the core to somebody else (an
involuntary context switch of the engine's thread): on a busy machine they are the whole p99, and say nothing of us.
"""

import argparse
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "campaigns"))

from lab import Child, clean_up_when_ended, wait_until
from lab_engine import Instantly, Load, Words, make_info

from kvscope.engine.choice import Choice
from kvscope.engine.engine import Engine
from kvscope.engine.service import EngineService
from kvscope.events.types import Batch
from kvscope.transport.control import ControlServer
from kvscope.transport.endpoints import directory_endpoints
from kvscope.transport.publisher import Publisher

WARM_UP_TURNS = 25
STEPS_PER_TURN = 20


class Measured:
    """An engine with its sockets, and how long its steps and hand-overs take."""

    def __init__(self, directory: Path, seed: int) -> None:
        directory.mkdir()
        self.endpoints = directory_endpoints(directory)
        self.publisher = Publisher(self.endpoints.events)
        self.num_batches = self.num_interrupted = 0
        self.hand_overs_ns: list[int] = []
        self.steps_ns: list[int] = []
        self.engine = Engine(
            make_info(256), Instantly(), Words(), self, choose=lambda draws: [Choice(7, 0.0)] * len(draws)
        )
        self.control = ControlServer(self.endpoints.control, self.publisher, EngineService(self.engine))
        self._load = Load(self.engine, seed)

    def publish(self, batch: Batch) -> bool:
        started = time.perf_counter_ns()
        is_taken = self.publisher.publish(batch)
        self.hand_overs_ns.append(time.perf_counter_ns() - started)
        self.num_batches += 1
        return is_taken

    @property
    def needs_full_state(self) -> bool:
        return self.publisher.needs_full_state

    def take_dropped(self) -> int:
        return self.publisher.take_dropped()

    def turn(self) -> None:
        """Some steps, and the wait for the publisher, which is not counted."""
        for _ in range(STEPS_PER_TURN):
            switches, started = num_switches(), time.perf_counter_ns()
            self._load.step()
            elapsed_ns = time.perf_counter_ns() - started
            if num_switches() == switches:
                self.steps_ns.append(elapsed_ns)
            else:
                self.num_interrupted += 1
        while self.publisher.last_seq != self.num_batches - 1:
            time.sleep(0.0005)

    def forget(self) -> None:
        self.hand_overs_ns.clear()
        self.steps_ns.clear()
        self.num_interrupted = 0

    def close(self) -> None:
        self.control.close()
        self.publisher.close()


def num_switches() -> int:
    """How often this thread lost its core without having waited for anything."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def turns(minutes: float, turns_per_second: float) -> Iterator[int]:
    """Numbers, at that pace."""
    started = time.monotonic()
    number = 0
    while (now := time.monotonic()) < started + 60 * minutes:
        if (wait_s := started + number / turns_per_second - now) > 0:
            time.sleep(wait_s)
        yield number
        number += 1


def percentile_us(values: list[int], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--steps-per-second", type=float, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    clean_up_when_ended()
    with tempfile.TemporaryDirectory(prefix="kvz") as name:
        frozen, alone = (Measured(Path(name) / which, args.seed) for which in ("frozen", "alone"))
        log = Path(name) / "client.log"
        viewer = Child("lab_client.py", frozen.endpoints.events, frozen.endpoints.control, str(log), "")
        try:
            for engine in (frozen, alone) * WARM_UP_TURNS:
                engine.turn()
            wait_until(lambda: log.exists() and "LIVE" in log.read_text(), "a viewer that follows")
            viewer.send(signal.SIGSTOP)
            frozen.forget()
            alone.forget()
            for number in turns(args.minutes, args.steps_per_second / STEPS_PER_TURN):
                for engine in (frozen, alone) if number % 2 else (alone, frozen):
                    engine.turn()
        finally:
            viewer.kill()
            frozen.close()
            alone.close()
    print(f"{'':<24}{'steps':>8}{'left out':>10}{'step p50':>11}{'p99':>10}{'hand-over p50':>15}{'p99':>10}")
    for label, engine in (("subscriber stopped", frozen), ("no subscriber", alone)):
        step, batch = engine.steps_ns, engine.hand_overs_ns
        columns = (
            percentile_us(step, 0.5),
            percentile_us(step, 0.99),
            percentile_us(batch, 0.5),
            percentile_us(batch, 0.99),
        )
        print(f"{label:<24}{len(step):>8,}{engine.num_interrupted:>10,}", end="")
        print("{:>8.1f} us{:>7.1f} us{:>12.2f} us{:>7.2f} us".format(*columns))
    change = [percentile_us(frozen.steps_ns, share) / percentile_us(alone.steps_ns, share) - 1 for share in (0.5, 0.99)]
    hand_over = max(percentile_us(engine.hand_overs_ns, 0.99) for engine in (frozen, alone))
    print(f"step p50 {change[0]:+.2%} (limit 1 %), p99 {change[1]:+.2%} (limit 5 %)", end="; ")
    print(f"hand-over p99 {hand_over:.2f} us (limit 5)")
    return 0 if change[0] <= 0.01 and change[1] <= 0.05 and hand_over <= 5 else 1


if __name__ == "__main__":
    sys.exit(main())
