"""A few threads that share out the work of one call. They need no lock of Python's.

numba's own would be a second OpenMP beside torch's, compile three times as long, and share out evenly by number instead
of by length. An executor's futures cost 40 us a call, as much as a layer's whole attention over a short context; waking
a thread costs as much. So they stay awake from one layer to the next, but not from one step to the next, and give way
to whoever wants the core meanwhile.
Nobody waits for a thread that has not begun: on a busy machine the caller then does all of the work itself.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_int64
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvscope.kernels.numba_sharing import LINE, MAX_THREADS, NUM_WORDS, sharing_functions

PATIENCE_US = 200  # awake without work: longer than what lies between two layers' multiplications


class _Worker:
    """One thread that works for the calls on the board."""

    def __init__(self, board: int, number: int) -> None:
        self._board, self._number = board, number
        self._functions = sharing_functions()
        self._woken = threading.Semaphore(0)
        threading.Thread(target=self._serve, name=f"kvscope-worker-{number}", daemon=True).start()

    def wake(self) -> None:
        """At least once for each time that it went to sleep."""
        self._woken.release()

    def _serve(self) -> None:
        while True:
            self._functions.serve(self._board, self._number, PATIENCE_US)
            self._woken.acquire()


_workers: list[_Worker] = []
_recording = threading.local()
_lock = threading.Lock()  # one call at a time has the workers; a second one does without


@cache
def _board() -> tuple[int, NDArray[np.int64]]:
    """The address of words that begin at a cache line, and their memory."""
    words = np.zeros(NUM_WORDS + LINE, np.int64)
    return words.ctypes.data + -words.ctypes.data % (LINE * words.itemsize), words


def _forget_workers() -> None:
    """In a child process, which has the list and none of the threads."""
    _workers.clear()
    _board.cache_clear()


os.register_at_fork(after_in_child=_forget_workers)


@contextmanager
def _workers_for(num_threads: int) -> Iterator[tuple[int, list[_Worker]] | None]:
    """The board's address, and so many threads less the caller's; None if another call has them.

    Nothing that was posted is left behind, whatever is raised inside: others are at work on the caller's memory.
    """
    if not _lock.acquire(blocking=False):
        yield None
        return
    try:
        board = _board()[0]
        try:
            while len(_workers) < num_threads - 1:
                _workers.append(_Worker(board, len(_workers) + 1))
            yield board, _workers[: num_threads - 1]
        except BaseException:  # perhaps one that was to be woken, and that nobody would wake later
            for worker in _workers:
                worker.wake()
            raise
        finally:
            sharing_functions().finish(board)
    finally:
        _lock.release()


class Call(NamedTuple):
    """One call of `share_out`, to be done again."""

    function: Any
    arguments: Any  # words that may be changed
    num_items: int
    grain: int
    num_threads: int
    keep: Any  # what its arguments point at


class Program:
    """Calls that follow each other, done again without Python between them. Serves one thread."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = list(calls)
        self._max_threads = max(call.num_threads for call in calls)
        rows = [(call.function.address, addressof(call.arguments), *call[2:5]) for call in calls]
        self._table, self._asleep = np.array(rows, np.int64), np.zeros(1, np.int64)

    def run(self) -> None:
        """Do all of them, in order."""
        count, asleep, table = len(self._table), self._asleep, self._table.ctypes.data
        with _workers_for(self._max_threads) as found:
            board, workers = found or (0, [])
            run = sharing_functions().run
            following = run(board, table, 0, count, False, found is None, asleep.ctypes.data)
            while following < count:
                _wake(workers, int(asleep[0]))
                following = run(board, table, following, count, True, False, asleep.ctypes.data)


@contextmanager
def recorded(note: Callable[[Call], object]) -> Iterator[None]:
    """Also tell of each call of `share_out` in this thread."""
    _recording.note = note
    try:
        yield
    finally:
        del _recording.note


def share_out(
    function: Any, arguments: Sequence[int], num_items: int, grain: int, num_threads: int, keep: Any = None
) -> None:
    """Call a compiled `function(worker, first, last, address of arguments)` for all items, in this thread and others.

    Each goes through its part of the items in order, up to `grain` at a time, then takes over what others have left.
    What the arguments point at, and nobody else keeps, is to be given as well, for who records.
    """
    words = (c_int64 * len(arguments))(*arguments)
    num_threads = max(min(num_threads, num_items, MAX_THREADS), 1)
    note = getattr(_recording, "note", None)
    if note is not None:
        note(Call(function, words, num_items, grain, num_threads, keep))
    if num_threads == 1:
        function.ctypes(0, 0, num_items, addressof(words))
        return
    with _workers_for(num_threads) as found:
        if found is None:
            function.ctypes(0, 0, num_items, addressof(words))
            return
        board, workers = found
        post = sharing_functions().post
        _wake(workers, post(board, function.address, addressof(words), num_items, grain, num_threads))


def _wake(workers: Sequence[_Worker], asleep: int) -> None:
    """Those whose bits are set."""
    for number, worker in enumerate(workers, 1) if asleep else ():
        if asleep >> number & 1:
            worker.wake()
