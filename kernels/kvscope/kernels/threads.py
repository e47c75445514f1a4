"""A few threads that share out the work of one call. They sleep between calls and need no lock of Python's.

numba's own would be a second OpenMP beside torch's, compile three times as long, and share out evenly by number instead
of by length. An executor's futures cost 40 us a call, as much as a layer's whole attention over a short context.
Nobody waits for a thread that has not begun: on a busy machine the caller then does all of the work itself.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue

import torch

# So many where they cost nothing: the fewer, the longer the first to end may have to wait for the last.
STRETCHES_PER_THREAD = 4
# Called as (number of the worker, first, last) for work[first:last].
WorkOff = Callable[[int, int, int], object]


class _Call:
    """The stretches of one call: whoever is free takes the next."""

    def __init__(self, work_off: WorkOff, stretches: Sequence[tuple[int, int]]) -> None:
        self._work_off = work_off
        self._left = deque(stretches)
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def work(self, worker: int) -> None:
        """Work off stretches until none is left."""
        while True:
            try:
                first, last = self._left.popleft()
            except IndexError:
                return
            error: BaseException | None = None
            try:
                self._work_off(worker, first, last)
            except BaseException as raised:  # the caller raises it
                error = raised
            self._ended.put(error)

    def wait(self, num_stretches: int) -> list[BaseException | None]:
        """What each stretch ended with; all have ended then."""
        return [self._ended.get() for _ in range(num_stretches)]


class _Worker:
    """One thread, one call at a time."""

    def __init__(self, number: int) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._number = number
        threading.Thread(target=self._serve, name=f"kvscope-worker-{number}", daemon=True).start()

    def start(self, call: _Call) -> None:
        self._calls.put(call)

    def _serve(self) -> None:
        while True:
            self._calls.get().work(self._number)


_workers: list[_Worker] = []
_lock = threading.Lock()  # one call at a time has the workers; a second one does without
os.register_at_fork(after_in_child=_workers.clear)  # a child has this list and none of its threads


def share_out(work_off: WorkOff, stretches: Sequence[tuple[int, int]], num_threads: int | None = None) -> None:
    """Call `work_off(worker, first, last)` for each stretch, in this thread and others: as many as there are stretches,
    unless told otherwise. They are begun in order."""
    num_threads = len(stretches) if num_threads is None else num_threads
    if num_threads == 1 or not _lock.acquire(blocking=False):
        for first, last in stretches:
            work_off(0, first, last)
        return
    try:
        while len(_workers) < num_threads - 1:
            _workers.append(_Worker(len(_workers) + 1))
        call = _Call(work_off, stretches)
        for worker in _workers[: num_threads - 1]:
            worker.start(call)
        call.work(0)
        errors = call.wait(len(stretches))
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
