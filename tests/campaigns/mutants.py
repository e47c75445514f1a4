"""Breaks pool, tables and scheduler in every small way, one at a time, and asks the tests whether they notice.

    python tests/campaigns/mutants.py [--workers N] [--all-tests] [--sample N] [--seed N] [FILE ...]

A mutant (see mutate.py) is killed when a test fails, or takes three times as long as without it and 3 s. The tests are
collected once; each mutant is a fork of that process in which the code of the functions is replaced. Quick tests and
those that killed a mutant just before come first, and the first failure ends a mutant. The slowest tests are left out
unless asked for, as every survivor goes through all of them: so some that survive here die in the suite. Survivors are
printed as they are found, and a table at the end, or at Ctrl-C. Exit code 1: fewer than 95 % killed.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import resource
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from mutate import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "runtime" / "kvscope" / "engine"
FILES = ("block_pool.py", "free_queue.py", "lru_list.py", "block_tables.py", "prefix_cache.py", "prefixes.py",
         "free_runs.py", "contiguous.py", "admission.py", "scheduler.py", "preemption.py", "swapping.py",
         "host_blocks.py")  # fmt: skip
TESTS = ("test_scheduler.py", "test_swapping.py", "test_block_pool.py", "test_block_lists.py", "test_prefix_cache.py",
         "test_preemption.py", "test_article.py", "test_parallel_sampling.py", "test_memory_world.py",
         "test_contiguous.py", "test_random_operations.py", "test_sliding_window.py")  # fmt: skip
SLOW_TESTS = ("always_advances", "every_state_of_a_small_world_with", "a_model_comes_back", "searches_for_a_fault",
              "healed_and_counted", "fold_of_all_batches", "with_poisoned_free_blocks",
              *(f"any_operations[{chunk}]" for chunk in range(1, 20)))  # fmt: skip
GOAL = 0.95
SPARE_S, SPARE_BYTES = 3.0, 3 << 30  # of a test beyond three times its usual CPU time; of a mutant beyond this process
QUICK_S = 1.0  # a test that takes longer keeps its place


def replace_code(module: types.ModuleType, source: str) -> None:
    """Give the module's functions and methods the code they have in `source`; its classes stay the same objects."""
    new: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source, str(module.__file__), "exec"), new)
    for name, value in new.items():
        old = getattr(module, name, None)
        if isinstance(value, int) and value != old:
            _replace_constant(name, old, value)
        elif getattr(value, "__module__", None) == module.__name__:
            _replace_functions(old, value)


def _replace_constant(name: str, old: object, new: int) -> None:
    """Where it is defined, and where it has been imported."""
    for module in list(sys.modules.values()):
        if vars(module).get(name) is old:
            setattr(module, name, new)


def _replace_functions(old: Any, new: Any) -> None:
    if isinstance(new, type):
        for name, member in vars(new).items():
            before = vars(old).get(name)
            if isinstance(member, types.FunctionType) and isinstance(before, types.FunctionType):
                _replace_method(old, before, member)
            else:
                _replace_functions(before, member)
    elif isinstance(new, property):
        _replace_functions(old.fget, new.fget)
    elif hasattr(new, "__wrapped__"):  # lru_cache
        _replace_functions(old.__wrapped__, new.__wrapped__)
    elif isinstance(new, types.FunctionType) and old.__code__.co_freevars == new.__code__.co_freevars:
        old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


def _replace_method(owner: type, old: types.FunctionType, new: types.FunctionType) -> None:
    """A method that calls `super()` has the class in its closure: that of the old class."""
    if old.__code__.co_freevars == new.__code__.co_freevars:
        _replace_functions(old, new)
        return
    closure = tuple(types.CellType(owner) for _ in new.__code__.co_freevars)
    method = types.FunctionType(new.__code__, old.__globals__, old.__name__, new.__defaults__, closure)
    setattr(owner, old.__name__, method)


class Campaign:
    """A pytest plugin that runs the collected tests once per mutant instead of once."""

    def __init__(self, mutants: list[Mutant], left_out: tuple[str, ...], num_workers: int) -> None:
        self.mutants, self._left_out, self._num_workers = mutants, left_out, num_workers
        self.killers: dict[int, str | None] = {}  # of the mutants tried, by number
        self._usual_s: dict[str, float] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = [item for item in session.items if not any(word in item.nodeid for word in self._left_out)]
        self._usual_s = self._fork(items, lambda: None)
        if len(self._usual_s) < len(items):
            raise pytest.UsageError("the tests fail without any change")
        print(f"{len(items)} tests, {sum(self._usual_s.values()):.0f} s of CPU time", file=sys.stderr, flush=True)
        items.sort(key=lambda item: self._usual_s[item.nodeid])
        receiver, sender = os.pipe()
        for worker in range(self._num_workers):
            if os.fork() == 0:
                os.close(receiver)  # so that writing fails once the parent is gone
                self._work(range(worker, len(self.mutants), self._num_workers), items, sender)
        os.close(sender)
        started = time.monotonic()
        with os.fdopen(receiver) as stream, contextlib.suppress(KeyboardInterrupt):
            for line in stream:
                number, killer = json.loads(line)
                self.killers[number] = killer
                if killer is None:
                    print(f"survives  {self.mutants[number].describe()}", flush=True)
                if len(self.killers) % 20 == 0:
                    minutes = (time.monotonic() - started) / 60
                    print(f"{len(self.killers)} of {len(self.mutants)}, {minutes:.0f} min", file=sys.stderr, flush=True)
        return True

    def _work(self, numbers: range, items: list[pytest.Item], sender: int) -> None:
        """In a worker; never returns. Tells of each mutant which test killed it, if any."""
        try:
            for number in numbers:
                mutant = self.mutants[number]
                module = importlib.import_module(f"kvscope.engine.{mutant.file.removesuffix('.py')}")
                passed = self._fork(items, lambda module=module, mutant=mutant: replace_code(module, mutant.source))
                killer = items[len(passed)].nodeid if len(passed) < len(items) else None
                os.write(sender, f"{json.dumps([number, killer])}\n".encode())
                if killer is not None and self._usual_s[killer] < QUICK_S:
                    items.insert(0, items.pop(len(passed)))
        finally:  # also when the one that listens is gone
            os._exit(0)

    def _fork(self, items: list[pytest.Item], change: Callable[[], None]) -> dict[str, float]:
        """CPU seconds of the tests that pass before the first that fails."""
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receiver)
            _silence_and_limit()
            change()
            self._run(items, sender)
        os.close(sender)
        with os.fdopen(receiver) as stream:
            said = stream.read()
        os.waitpid(child, 0)
        return dict(json.loads(line) for line in said.splitlines())

    def _run(self, items: list[pytest.Item], sender: int) -> None:
        """In the child; never returns."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            usual_s = self._usual_s.get(item.nodeid, 600.0)
            signal.setitimer(signal.ITIMER_PROF, 3 * usual_s + SPARE_S)
            started = time.process_time()
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                break
            os.write(sender, f"{json.dumps([item.nodeid, time.process_time() - started])}\n".encode())
        os._exit(0)


def _silence_and_limit() -> None:
    """The timer's signal ends the process; so does memory beyond what the tests need."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    num_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes + SPARE_BYTES, resource.RLIM_INFINITY))


def print_table(campaign: Campaign) -> float:
    """Of the mutants tried; returns the share of those killed."""
    tried = [campaign.mutants[number].file for number in campaign.killers]
    killed = [campaign.mutants[number].file for number, killer in campaign.killers.items() if killer is not None]
    print(f"{'file':18} {'mutants':>8} {'tried':>8} {'killed':>7}")
    for name in dict.fromkeys(mutant.file for mutant in campaign.mutants):
        total = sum(mutant.file == name for mutant in campaign.mutants)
        print(f"{name:18} {total:>8} {tried.count(name):>8} {killed.count(name):>7}")
    share = len(killed) / (len(tried) or 1)
    print(f"{'all':18} {len(campaign.mutants):>8} {len(tried):>8} {len(killed):>7}  {share:.1%}")
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--all-tests", action="store_true", help="the slowest ones too")
    parser.add_argument("--sample", type=int, help="only this many, drawn at random")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mutants = [mutant for name in arguments.files for mutant in mutants_of(ENGINE / name)]
    if arguments.sample and arguments.sample < len(mutants):
        mutants = sorted(random.Random(arguments.seed).sample(mutants, arguments.sample))
    campaign = Campaign(mutants, () if arguments.all_tests else SLOW_TESTS, arguments.workers)
    tests = [str(ROOT / "tests" / "engine" / name) for name in TESTS]
    code = pytest.main(["-q", "-s", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *tests], plugins=[campaign])
    if code != 0:
        return 2
    return 0 if print_table(campaign) >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
