"""A few threads that share out the work of one call. They sleep between calls and need no lock of Python's.

numba's own would be a second OpenMP beside torch's, compile three times as long, and share out evenly by number instead
of by length. An executor's futures cost 40 us a call, as much as a layer's whole attention over a short context.
"""

import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue

import torch

# Called as (number of the worker, first, last) for work[first:last].
WorkOff = Callable[[int, int, int], object]


class _Worker:
    """One thread, one task at a time."""

    def __init__(self, number: int) -> None:
        self._tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=f"kvscope-worker-{number}", daemon=True).start()

    def start(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)

    def wait(self) -> BaseException | None:
        """What the task ended with; it has ended then."""
        return self._done.get()

    def _serve(self) -> None:
        while True:
            error: BaseException | None = None
            try:
                self._tasks.get()()
            except BaseException as raised:  # the caller raises it
                error = raised
            self._done.put(error)


_workers: list[_Worker] = []
_lock = threading.Lock()  # one call at a time has the workers; a second one does without
os.register_at_fork(after_in_child=_workers.clear)  # a child has this list and none of its threads


def share_out(work_off: WorkOff, stretches: Sequence[tuple[int, int]]) -> None:
    """Call `work_off(worker, first, last)` for each stretch, the first in this thread, the others beside it."""
    if len(stretches) == 1 or not _lock.acquire(blocking=False):
        for first, last in stretches:
            work_off(0, first, last)
        return
    try:
        while len(_workers) < len(stretches) - 1:
            _workers.append(_Worker(len(_workers) + 1))
        started = _workers[: len(stretches) - 1]
        for number, (worker, (first, last)) in enumerate(zip(started, stretches[1:], strict=True), start=1):
            worker.start(lambda number=number, first=first, last=last: work_off(number, first, last))  # type: ignore[misc]
        try:
            work_off(0, *stretches[0])
        finally:
            errors = [worker.wait() for worker in started]
    finally:
        _lock.release()
    for error in errors:
        if error is not None:
            raise error


def even_stretches(count: int, min_per_thread: int) -> list[tuple[int, int]]:
    """`count` items in stretches of equal length, one per thread of torch's, but none below the minimum."""
    num_threads = max(min(torch.get_num_threads(), count // max(min_per_thread, 1)), 1)
    bounds = [count * i // num_threads for i in range(num_threads + 1)]
    return list(pairwise(bounds))
