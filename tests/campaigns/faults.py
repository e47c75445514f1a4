#!/usr/bin/env python3
"""Injects faults between an engine and a viewer, and prints one table.

    python tests/campaigns/faults.py [--scale 1.0] [--workers 2] [--seed N]

Both are processes of their own; the engine has scheduler, tables and pool but no model, at 2,000 events/s. After every
fault the viewer must call a picture LIVE that is as new as the engine's was when the fault ended; the time that takes
is `converged`. At the end every state that the viewer has shown is compared with the engine's own state, taken from
its live structures, after the same batch: `diverged` is how many differ. `lost` counts batches that the viewer never
showed although they were still in the engine's replay window, for the faults that a replay can heal; the others end in
a snapshot. On a machine so busy that the viewer trails by more than 2 s it says so and skips to the present, as it
should: `skipped` counts these, and nothing is lost in them. The link goes down in a network namespace of its own, over
TCP with CURVE keys; left out where that is not allowed. Exit code 1: a divergence, a loss, p99 above 2 s, or ended
early.
"""

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from lab import PATIENCE_S, Child, ClientLog, EngineLog, Interrupted, Lab, clean_up_when_ended, wait_until

from kvscope.transport.keys import create_keys

RING = 400  # batches: one second of the engine's pace
ENGINE_OPTIONS = ("--ring", str(RING), "--queue", "64")


class Kind(NamedTuple):
    """A fault, how often it is injected at scale 1, and whether a replay must heal it without a loss."""

    inject: Callable[[Lab, random.Random], None]
    count: int
    heals_by_replay: bool


def _disturb(lab: Lab, what: str, chance: float, seconds: float) -> None:
    """Let the proxy do its worst for so long; if chance has spared every message, the next one is hurt."""
    before = lab.proxy.num_hurt
    setattr(lab.proxy, what, chance)
    time.sleep(seconds)
    if lab.proxy.num_hurt == before:
        setattr(lab.proxy, what, 1.0)
        wait_until(lambda: lab.proxy.num_hurt > before, "a message hurt")
    lab.proxy.calm()


def drop(lab: Lab, chances: random.Random) -> None:
    _disturb(lab, "loss", 10 ** chances.uniform(-3, -0.301), chances.uniform(0.1, 0.4))  # 0.1 to 50 %


def duplicate(lab: Lab, chances: random.Random) -> None:
    _disturb(lab, "copies", chances.uniform(0.01, 0.5), chances.uniform(0.1, 0.4))


def reorder(lab: Lab, chances: random.Random) -> None:
    _disturb(lab, "swaps", chances.uniform(0.01, 0.5), chances.uniform(0.1, 0.4))


def stop_engine(lab: Lab, chances: random.Random) -> None:
    lab.engine.send(signal.SIGSTOP)
    time.sleep(chances.uniform(0.1, 3))
    lab.engine.send(signal.SIGCONT)


def stop_viewer(lab: Lab, chances: random.Random) -> None:
    lab.client.send(signal.SIGSTOP)
    time.sleep(chances.uniform(0.1, 4))
    lab.client.send(signal.SIGCONT)


def slow_viewer(lab: Lab, chances: random.Random) -> None:
    lab.client.send(signal.SIGUSR1)
    time.sleep(chances.uniform(0.5, 4))
    lab.client.send(signal.SIGUSR2)


def overrun_ring(lab: Lab, chances: random.Random) -> None:
    """Nothing arrives until what was missed has left the replay window."""
    lab.engine_log.read()
    before = len(lab.engine_log.order)
    lab.proxy.loss = 1.0

    def is_over() -> bool:
        lab.engine_log.read()
        return len(lab.engine_log.order) > before + RING + chances.randint(20, 100)

    wait_until(is_over, "the ring's end")
    lab.proxy.calm()


def overflow_queue(lab: Lab, chances: random.Random) -> None:
    """The engine makes more steps than its publisher can send: batches are dropped, and announced."""
    lab.engine.send(signal.SIGUSR1)
    assert lab.engine.read_line() == "full"


def kill_engine(lab: Lab, chances: random.Random) -> None:
    lab.engine.kill()
    epoch, _ = lab.engine_log.newest()
    time.sleep(chances.uniform(0, 0.3))
    lab.start_engine()
    wait_until(lambda: lab.engine_log.newest()[0] != epoch, "the new engine's first step")


def overtaking_engine(lab: Lab, chances: random.Random) -> None:
    """Its numbers are beyond those of the life before, by the time the viewer hears of it."""
    lab.engine_log.read()
    epoch = lab.engine_log.order[-1][0]
    num_sent = sum(1 for key in lab.engine_log.order[-20_000:] if key[0] == epoch)
    lab.engine.kill()
    lab.start_engine("--hurry", str(num_sent + chances.randint(1, 50)))


KINDS: dict[str, Kind] = {
    "drop 0.1-50 %": Kind(drop, 250, heals_by_replay=True),
    "duplicate": Kind(duplicate, 170, heals_by_replay=True),
    "reorder": Kind(reorder, 170, heals_by_replay=True),
    "engine SIGSTOP": Kind(stop_engine, 60, heals_by_replay=True),
    "viewer SIGSTOP": Kind(stop_viewer, 60, heals_by_replay=False),
    "slow viewer": Kind(slow_viewer, 50, heals_by_replay=False),
    "ring overrun": Kind(overrun_ring, 60, heals_by_replay=False),
    "queue overflow": Kind(overflow_queue, 60, heals_by_replay=False),
    "kill -9, restart": Kind(kill_engine, 60, heals_by_replay=False),
    "... overtaking": Kind(overtaking_engine, 40, heals_by_replay=False),
}
LINK_DOWN, NUM_LINK_DOWN = "link down", 40


class Outcome(NamedTuple):
    kind: str
    converged_s: float
    num_lost: int
    has_skipped: bool = False  # was behind for other reasons than the fault, said so, and took a snapshot


def wait_until_following(lab: Lab) -> None:
    goal = lab.engine_log.newest()
    wait_until(lambda: lab.has_caught_up(goal), "a viewer that follows")
    lab.engine_log.read()  # what the engine did meanwhile, as while the viewer joined, is no part of the fault


def not_converged(name: str, error: TimeoutError) -> Outcome:
    print(f"{name}: {error}", file=sys.stderr, flush=True)
    return Outcome(name, PATIENCE_S, 0)


def run_fault(lab: Lab, name: str, chances: random.Random) -> Outcome:
    """One fault on a viewer that follows; what came of it."""
    try:
        wait_until_following(lab)
        first, num_skips = len(lab.engine_log.order), lab.client_log.num_skips
        KINDS[name].inject(lab, chances)
        ended_ns, goal = time.monotonic_ns(), lab.engine_log.newest()
        wait_until(lambda: lab.has_caught_up(goal), f"convergence after {name}")
    except TimeoutError as error:
        return not_converged(name, error)
    converged_s = max(lab.client_log.status_at_ns - ended_ns, 0) / 1e9
    lost = 0
    has_skipped = KINDS[name].heals_by_replay and lab.client_log.num_skips > num_skips
    if KINDS[name].heals_by_replay and not has_skipped:
        due = lab.engine_log.order[first : lab.engine_log.order.index(goal)]
        lost = sum(1 for key in due if key not in lab.client_log.shown)
    return Outcome(name, converged_s, lost, has_skipped)


def count_divergences(engine: EngineLog, client: ClientLog) -> tuple[int, int]:
    """How many states were compared, and how many of them differ."""
    engine.read()
    client.read()
    both = client.shown.keys() & engine.digests.keys()
    return len(both), sum(1 for key in both if client.shown[key] != engine.digests[key])


def work(directory: Path, plan: list[str], seed: int) -> tuple[list[Outcome], int, int]:
    """All faults of one plan, on one lab."""
    chances = random.Random(seed)
    lab = Lab(directory, seed, *ENGINE_OPTIONS)
    try:
        outcomes = until_ended(run_fault(lab, name, chances) for name in plan)
        return outcomes, *count_divergences(lab.engine_log, lab.client_log)
    finally:
        lab.close()


def until_ended(faults: Iterator[Outcome]) -> list[Outcome]:
    """All of them, or those that were over when somebody ended the campaign."""
    outcomes: list[Outcome] = []
    with contextlib.suppress(Interrupted):
        for outcome in faults:
            outcomes.append(outcome)
            if len(outcomes) % 50 == 0:
                print(f"{len(outcomes)} faults by this worker", file=sys.stderr, flush=True)
    return outcomes


class NamespaceError(Exception):
    """No network namespaces here."""


class Namespace:
    """A network namespace of ours at the end of a link; raises NamespaceError where that is not allowed."""

    HERE, THERE = "10.213.7.1", "10.213.7.2"

    def __init__(self) -> None:
        self.name = f"kvscope-{random.SystemRandom().randrange(1 << 32):08x}"
        self._link = f"kv{self.name[-8:]}"
        self.prefix = ("ip", "netns", "exec", self.name)
        self._ip("netns", "add", self.name)
        try:
            self._make_link()
        except BaseException:
            self.close()
            raise

    def _make_link(self) -> None:
        self._ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        self._ip("addr", "add", f"{self.HERE}/24", "dev", self._link)
        self._ip("link", "set", self._link, "up")
        for command in (("addr", "add", f"{self.THERE}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            self._ip("-n", self.name, *command)

    def set_link(self, state: str) -> None:
        self._ip("link", "set", self._link, state)

    def close(self) -> None:
        self._ip("netns", "del", self.name)

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NamespaceError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class LinkLab(Lab):
    """The engine in a namespace, with keys; no proxy."""

    def __init__(self, directory: Path, namespace: Namespace, seed: int) -> None:
        directory.mkdir()
        keys = directory / "keys"
        keys.mkdir()
        for name in ("engine", "client"):
            create_keys(name, keys)
        address = f"tcp://{namespace.THERE}:7000"
        options = ("--listen", address, "--keys", str(keys), "--digests", str(directory / "engine.log"))
        self.engine = Child("lab_engine.py", str(directory), *options, "--seed", str(seed), prefix=namespace.prefix)
        assert self.engine.read_line() == "ready"
        path = directory / "client.log"
        control = f"tcp://{namespace.THERE}:7001"
        self.client = Child("lab_client.py", address, control, str(path), str(keys))
        self.engine_log, self.client_log = EngineLog(directory / "engine.log"), ClientLog(path)

    def close(self) -> None:
        self.client.kill()
        self.engine.kill()


def cut_link(lab: LinkLab, namespace: Namespace, chances: random.Random) -> Outcome:
    """As `run_fault`, of the link."""
    try:
        wait_until_following(lab)
        namespace.set_link("down")
        time.sleep(chances.uniform(0.1, 4))
        namespace.set_link("up")
        ended_ns, goal = time.monotonic_ns(), lab.engine_log.newest()
        wait_until(lambda: lab.has_caught_up(goal), f"convergence after {LINK_DOWN}")
    except TimeoutError as error:
        return not_converged(LINK_DOWN, error)
    return Outcome(LINK_DOWN, max(lab.client_log.status_at_ns - ended_ns, 0) / 1e9, 0)


def work_on_link(directory: Path, count: int, seed: int) -> tuple[list[Outcome], int, int]:
    chances = random.Random(seed)
    with contextlib.ExitStack() as stack:
        namespace = Namespace()
        stack.callback(namespace.close)
        lab = LinkLab(directory, namespace, seed)
        stack.callback(lab.close)
        outcomes = until_ended(cut_link(lab, namespace, chances) for _ in range(count))
        return outcomes, *count_divergences(lab.engine_log, lab.client_log)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def make_plans(scale: float, num_workers: int, chances: random.Random) -> list[list[str]]:
    faults = [name for name, kind in KINDS.items() for _ in range(max(round(kind.count * scale), 1))]
    chances.shuffle(faults)
    return [faults[index::num_workers] for index in range(num_workers)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="1: about 1,000 faults")
    parser.add_argument("--workers", type=int, default=2, help="labs side by side")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    args = parser.parse_args()
    clean_up_when_ended()
    plans = make_plans(args.scale, args.workers, random.Random(args.seed))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvf") as name, ThreadPoolExecutor(args.workers + 1) as pool:
        jobs = [pool.submit(work, Path(name) / str(n), plan, args.seed + n) for n, plan in enumerate(plans)]
        link = pool.submit(work_on_link, Path(name) / "link", max(round(NUM_LINK_DOWN * args.scale), 1), args.seed)
        with contextlib.suppress(SystemExit):  # ended early: what is done so far is still told
            wait([*jobs, link])
        results = [job.result() for job in jobs]
        try:
            results.append(link.result())
        except NamespaceError as error:
            print(f"link down: skipped, no network namespaces here ({error})")
    outcomes = [outcome for done, _, _ in results for outcome in done]
    is_whole = len(outcomes) >= sum(map(len, plans))
    print(f"{'fault':<18}{'injected':>9}{'lost':>6}{'skipped':>9}{'converged p50':>15}{'p99':>8}{'max':>8}")
    for kind in (*KINDS, LINK_DOWN):
        _print_row(kind, [outcome for outcome in outcomes if outcome.kind == kind], KINDS)
    _print_row("all", outcomes, KINDS)
    compared, diverged = (sum(result[column] for result in results) for column in (1, 2))
    print(f"{compared:,} states compared with the engine's own at the same batch, {diverged} diverged")
    print(f"seed {args.seed}; {time.monotonic() - started:.0f} s; threads left {threading.active_count() - 1}")
    p99 = percentile([outcome.converged_s for outcome in outcomes], 0.99)
    return 0 if is_whole and p99 <= 2 and not diverged and not any(outcome.num_lost for outcome in outcomes) else 1


def _print_row(name: str, outcomes: list[Outcome], kinds: dict[str, Kind]) -> None:
    if not outcomes:
        return
    times = [outcome.converged_s for outcome in outcomes]
    heals = name == "all" or (name in kinds and kinds[name].heals_by_replay)
    lost = str(sum(outcome.num_lost for outcome in outcomes)) if heals else "-"
    skipped = sum(outcome.has_skipped for outcome in outcomes)
    middle, late = (f"{percentile(times, share):.3f} s" for share in (0.5, 0.99))
    print(f"{name:<18}{len(outcomes):>9,}{lost:>6}{skipped:>9}{middle:>15}{late:>8}{max(times):>6.2f} s")


if __name__ == "__main__":
    sys.exit(main())
