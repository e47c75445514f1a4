"""Calls of compiled functions, shared out: each item once, whoever comes late, sleeps or never begins."""

import os
import threading
from collections import deque
from functools import cache

import numba
import numpy as np
import pytest
from numba import types

from kvscope.kernels import threads
from kvscope.kernels.numba_atomics import give_way, load, pause, pointer
from kvscope.kernels.numba_layers import at
from kvscope.kernels.numba_sharing import _RANGE, NUM_WORDS, _range, _take

n = types.int64


@numba.cfunc(types.void(n, n, n, n))
def count(worker, first, last, arguments):
    """Add one to the count of each item, and note who did it and how many at once. Some take longer than others."""
    counts, workers, sizes = numba.carray(pointer(arguments), (3,), np.int64)
    for item in range(first, last):
        for _ in range(item % 7 * 40):
            pause()
        at(pointer(counts), np.int64)[item] += 1
        at(pointer(workers), np.int64)[item] = worker
        at(pointer(sizes), np.int64)[item] = last - first


def shared(num_items, grain, num_threads):
    """Counts, workers and sizes of each item."""
    board = np.zeros((3, num_items), np.int64)
    addresses = [row.ctypes.data for row in board]
    threads.share_out(count, addresses, num_items, grain, num_threads)
    return board


@pytest.mark.parametrize("patience", [0, 50])
@pytest.mark.parametrize("num_threads", [1, 2, 5, 100])
def test_each_item_is_done_once(num_threads, patience, monkeypatch):
    """Calls follow each other so fast that threads come late for one and find the next, or are just going to sleep."""
    monkeypatch.setattr(threads, "PATIENCE_US", patience)
    for number in range(400):
        num_items, grain = 1 + number % 37, 1 + number % 3
        counts, workers, sizes = shared(num_items, grain, num_threads)
        assert (counts == 1).all()
        assert workers.max() < num_threads
        assert num_threads == 1 or sizes.max() <= grain


def test_who_comes_late_for_a_call_of_more_threads_takes_no_part():
    """What a function keeps for each thread is made for those of its own call."""
    for number in range(2000):
        for num_threads in (6, 2):
            assert shared(24, 1 + number % 2, num_threads)[1].max() < num_threads


def test_what_is_interrupted_is_done_first(monkeypatch):
    """Others work on the caller's memory, which goes when an exception does; and the next call finds an empty board."""
    noted = []

    def interrupt(workers, asleep):
        raise KeyboardInterrupt

    board = np.zeros((3, 400), np.int64)
    with threads.recorded(noted.append):
        threads.share_out(count, [row.ctypes.data for row in board], 400, 1, 3)
    program = threads.Program(noted)
    with monkeypatch.context() as patched:
        patched.setattr(threads, "_wake", interrupt)
        with pytest.raises(KeyboardInterrupt):
            threads.share_out(count, [row.ctypes.data for row in board], 400, 1, 3)
        assert (board[0] == 2).all()
        patched.setattr(threads, "PATIENCE_US", 0)
        with pytest.raises(KeyboardInterrupt):
            deque(iter(program.run, False), maxlen=0)  # until a thread has gone to sleep
        assert len(set(board[0])) == 1
    assert (shared(9, 1, 3)[0] == 1).all()


@numba.cfunc(types.void(n, n, n, n))
def meet(worker, first, last, arguments):
    """Begin, and end when the other of two items has begun; give up after so long that no machine is that busy."""
    begun, met = numba.carray(pointer(arguments), (2,), np.int64)
    at(pointer(begun), np.int64)[first] = 1
    for _ in range(1 << 24):
        if load(at(pointer(begun), np.int64), 1 - first):
            at(pointer(met), np.int64)[first] = 1
            return
        give_way()


@pytest.mark.parametrize("patience", [0, 50])
def test_a_thread_awake_or_asleep_takes_its_part(patience, monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE_US", patience)
    for _ in range(20):
        board = np.zeros((2, 2), np.int64)
        threads.share_out(meet, [row.ctypes.data for row in board], 2, 1, 2)
        assert board[1].tolist() == [1, 1]


@numba.njit(nogil=True)
def take_all(board, own, counts):
    """All that is left of the first range, while another thread does so too."""
    while True:
        first, last = _take(board, _RANGE, 3, 0, own)
        if first == last:
            return
        counts[first:last] += 1


def test_no_item_is_taken_twice():
    num_items = 100_000
    board, counts = np.zeros(NUM_WORDS, np.int64), np.zeros((2, num_items), np.int64)
    for number in range(2):
        take_all(board, number == 0, counts[number])  # compiles it
    board[_RANGE] = _range(2, 0, num_items)
    takers = [threading.Thread(target=take_all, args=(board, i == 0, counts[i])) for i in range(2)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert (counts.sum(0) == 1).all()


def test_nobody_waits_for_a_thread_that_does_not_begin(monkeypatch):
    monkeypatch.setattr(threads._Worker, "_serve", lambda worker: None)
    monkeypatch.setattr(threads, "_workers", [])
    monkeypatch.setattr(threads, "_board", cache(threads._board.__wrapped__))
    counts, workers, sizes = shared(9, 2, 2)
    assert counts.tolist() == [1] * 9
    assert not workers.any()
    assert sizes.tolist() == [2, 2, 2, 2, 1, 1, 1, 1, 1]  # the last of them from the back of the other's


def test_two_callers_at_once():
    found = []
    callers = [threading.Thread(target=lambda: found.extend(shared(30, 2, 2) for _ in range(50))) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 150
    assert all((counts == 1).all() for counts, _, _ in found)


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded: that is what this is about
def test_a_child_process_has_threads_of_its_own():
    shared(4, 1, 2)
    child = os.fork()
    if not child:
        os._exit(0 if (shared(4, 1, 2)[0] == 1).all() and len(threads._workers) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
