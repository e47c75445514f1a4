#!/usr/bin/env python3
"""Lets an engine, two dashboards and faults go on for a while, and prints one table.

    python tests/campaigns/soak.py [--minutes 30] [--events-per-second 2000] [--seed N]

The engine has no model. Each dashboard is a viewer process with a client, behind a proxy that loses, repeats and swaps
messages now and then; one is stopped for a second now and then. Memory (resident) and file descriptors are taken every
two seconds. Warm-up ends when the engine's replay ring is full, by its count of batches: the last of what is bounded
and large. Growth is the median of the last fifth of what follows minus that of its first fifth. At the end the engine
finishes what runs, and every block must be free or cached. Exit code 1: growth of more than 2 MiB or of any descriptor,
a warm-up that did not end, a divergence, a block still held, or a viewer that did not come back.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from faults import count_divergences
from lab import Child, ClientLog, Lab, clean_up_when_ended, num_files, resident_bytes, wait_until

MAX_GROWTH_BYTES = 2 << 20
RING = 10_000  # batches: what `kvscope serve` keeps
INTERVAL_S = 2.0


class Samples:
    """Memory and descriptors of one process over time; `warm` is where the warm-up ended."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self._pid = name, pid
        self.memory: list[int] = []
        self.files: list[int] = []
        self.warm: int | None = None

    def take(self, *, is_warm: bool) -> None:
        if is_warm and self.warm is None:
            self.warm = len(self.memory)
        self.memory.append(resident_bytes(self._pid))
        self.files.append(num_files(self._pid))

    def growth(self, values: list[int]) -> float:
        after = values[self.warm or 0 :]
        fifth = max(len(after) // 5, 1)
        return statistics.median(after[-fifth:]) - statistics.median(after[:fifth])

    def row(self) -> str:
        memory, files = self.growth(self.memory), self.growth(self.files)
        middle = statistics.median(self.memory[self.warm or 0 :]) / 2**20
        return f"{self.name:<14}{middle:>10.1f} MiB{memory / 2**20:>+10.2f} MiB{self.files[-1]:>8}{files:>+8.0f}"

    @property
    def is_flat(self) -> bool:
        is_flat = self.growth(self.memory) <= MAX_GROWTH_BYTES and self.growth(self.files) <= 0
        return is_flat and self.warm is not None


class SoakLab(Lab):
    """With a second viewer, without a proxy."""

    def __init__(self, directory: Path, seed: int, *engine_options: str) -> None:
        super().__init__(directory, seed, *engine_options)
        path = directory / "second.log"
        events = f"ipc://{directory}/events.sock"
        self.second = Child("lab_client.py", events, self.endpoints.control, str(path), "")
        self.second_log = ClientLog(path)

    def close(self) -> None:
        self.second.kill()
        super().close()


def hurt(lab: SoakLab, chances: random.Random) -> None:
    """One fault that is over before the next sample."""
    what = chances.choice(("loss", "copies", "swaps", "stop"))
    victim = lab.second if what == "stop" else None
    if victim is not None:
        victim.send(signal.SIGSTOP)
    else:
        setattr(lab.proxy, what, chances.uniform(0.001, 0.3))
    time.sleep(chances.uniform(0.1, 1))
    lab.proxy.calm()
    if victim is not None:
        victim.send(signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--events-per-second", type=float, default=2_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    args = parser.parse_args()
    clean_up_when_ended()
    chances = random.Random(args.seed)
    options = ("--events-per-second", str(args.events_per_second), "--ring", str(RING))
    with tempfile.TemporaryDirectory(prefix="kvs") as name:
        lab = SoakLab(Path(name) / "lab", args.seed, *options)
        try:
            samples = [
                Samples(label, child.pid)
                for label, child in (("engine", lab.engine), ("dashboard 1", lab.client), ("dashboard 2", lab.second))
            ]
            num_faults, diverged, compared = 0, 0, 0
            end = time.monotonic() + 60 * args.minutes
            while (started := time.monotonic()) < end:
                if chances.random() < 0.5:
                    hurt(lab, chances)
                    num_faults += 1
                for one in samples:
                    one.take(is_warm=lab.engine_log.num_read >= RING)
                for log in (lab.client_log, lab.second_log):
                    checked = count_divergences(lab.engine_log, log)
                    compared, diverged = compared + checked[0], diverged + checked[1]
                    log.shown.clear()
                lab.engine_log.forget_all_but(20_000)
                time.sleep(max(started + INTERVAL_S - time.monotonic(), 0))
            goal = lab.engine_log.newest()
            wait_until(lambda: lab.has_caught_up(goal), "a first viewer that follows")
            lab.engine.send(signal.SIGTERM)
            last_words = lab.engine.read_line()
        finally:
            lab.close()
    print(f"{'process':<14}{'memory p50':>14}{'growth':>14}{'files':>8}{'growth':>8}")
    for one in samples:
        print(one.row())
    warm = samples[0].warm
    print("never warm" if warm is None else f"warm after {warm} of {len(samples[0].memory)} samples", end="; ")
    print(f"{num_faults} faults in {args.minutes} minutes at {args.events_per_second:,.0f} events/s; ", end="")
    print(f"{compared:,} states compared, {diverged} diverged; {last_words}; seed {args.seed}")
    is_clean = last_words == "end 0 blocks held, 0 problems"
    return 0 if is_clean and not diverged and all(one.is_flat for one in samples) else 1


if __name__ == "__main__":
    sys.exit(main())
