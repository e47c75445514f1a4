"""How threads share out one call among them, compiled: what they agree on, without Python, its lock or a system call.

A board of words, what each thread writes on a cache line of its own, so that none is slowed down by another's:

```
line 0       function   arguments   grain   threads   items   of the call, written while all ranges are empty
line 1       done                                             items of it that are done
line 2 + w   state      range                                 of worker w; 0 is who called
```

A range is the items that are left, first and end, and the call's number of threads, in one word. A thread takes from
the front of its own, so that it goes through memory in order, then one by one from the back of others'. Whoever has
taken items knows that the call is not over, so that its function and arguments are still there; a thread that comes
late finds nothing, or a later call, of which it takes nothing unless it is one of its threads.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from kvscope.kernels.numba_atomics import add, call, compare_and_set, exchange, give_way, load, pause, pointer, store
from kvscope.kernels.numba_layers import at

LINE = 8  # words
MAX_THREADS = 62  # one bit each in a word
NUM_WORDS = (2 + MAX_THREADS) * LINE  # all zeros: nothing to do
_AWAKE, _ASLEEP, _INVITED = 0, 1, 2  # states of a worker
_FUNCTION, _ARGUMENTS, _GRAIN, _THREADS, _ITEMS = range(5)
_DONE, _STATE, _RANGE = LINE, 2 * LINE, 2 * LINE + 1
_BITS = 28  # of a number of items, more than any step has; two of them and a number of threads are one word
_LOW = (1 << _BITS) - 1
_PAUSES = 32  # about a microsecond


@numba.njit
def _range(num_threads, first, end):
    return (((num_threads << _BITS) | first) << _BITS) | end


@numba.njit
def _take(board, place, grain, worker, own):
    """Items `first:last` of the range at `place`, empty if none are left for this worker."""
    left = load(board, place)
    while True:
        num_threads, first, end = left >> 2 * _BITS, (left >> _BITS) & _LOW, left & _LOW
        if first >= end or worker >= num_threads:
            return first, first
        if own:
            last = min(first - first % grain + grain, end)
            taken, rest = (first, last), _range(num_threads, last, end)
        else:
            taken, rest = (end - 1, end), _range(num_threads, first, end - 1)
        found = compare_and_set(board, place, left, rest)
        if found == left:
            return taken
        left = found


@numba.njit
def _work(board, worker):
    num_threads = load(board, _THREADS)
    for i in range(num_threads):
        place = _RANGE + (worker + i) % num_threads * LINE
        while True:
            first, last = _take(board, place, load(board, _GRAIN), worker, i == 0)
            if first == last:
                break
            call(load(board, _FUNCTION), worker, first, last, load(board, _ARGUMENTS))
            add(board, _DONE, last - first)


@numba.njit
def _await_change(board, place, known):
    """Look for another value for about a microsecond, then offer the core to others."""
    for _ in range(_PAUSES):
        if load(board, place) != known:
            return
        pause()
    give_way()


@numba.njit
def _post(words, function, arguments, num_items, grain, num_threads):
    asleep = 0
    store(words, _FUNCTION, function)
    store(words, _ARGUMENTS, arguments)
    store(words, _GRAIN, grain)
    store(words, _THREADS, num_threads)
    store(words, _ITEMS, num_items)
    store(words, _DONE, 0)
    for i in range(num_threads):
        first, end = num_items * i // num_threads, num_items * (i + 1) // num_threads
        store(words, _RANGE + i * LINE, _range(num_threads, first, end))
    for i in range(1, num_threads):
        if exchange(words, _STATE + i * LINE, _INVITED) == _ASLEEP:
            asleep |= 1 << i
    return asleep


@numba.njit
def _finish(words):
    _work(words, 0)
    num_items, done = load(words, _ITEMS), load(words, _DONE)
    while done != num_items:
        _await_change(words, _DONE, done)
        done = load(words, _DONE)


class SharingFunctions(NamedTuple):
    """Functions of the board's address and more. They hold no lock of Python's."""

    post: Callable[..., int]
    """(board, function, arguments, number of items, grain, number of threads) -> workers to be woken, a bit each."""
    finish: Callable[..., None]
    """(board): work until the call that was posted last is done, if it is not."""
    run: Callable[..., int]
    """(board, calls, first, number of calls, whether the first is posted, whether to be alone, asleep) -> the next one.

    Calls one after another, each (function, arguments, number of items, grain, number of threads). Where it ends early,
    the next one is posted, and workers are to be woken for it: the word at `asleep` has a bit for each.
    """
    serve: Callable[..., None]
    """(board, worker, microseconds): work for calls; it counts as asleep after so long without any."""


@lru_cache
def sharing_functions() -> SharingFunctions:
    """Compiled when first asked for, and kept on disk."""

    def post(board, function, arguments, num_items, grain, num_threads):
        return _post(at(pointer(board), np.int64), function, arguments, num_items, grain, num_threads)

    def finish(board):
        _finish(at(pointer(board), np.int64))

    def run(board, calls, first, count, posted, alone, asleep_at):
        words, table = at(pointer(board), np.int64), numba.carray(pointer(calls), (count, 5), np.int64)
        for i in range(first, count):
            function, arguments, num_items, grain, num_threads = table[i]
            if alone or num_threads == 1:
                call(function, 0, 0, num_items, arguments)
                continue
            asleep = 0 if posted else _post(words, function, arguments, num_items, grain, num_threads)
            if asleep:
                at(pointer(asleep_at), np.int64)[0] = asleep
                return i
            posted = 0
            _finish(words)
        return count

    def serve(board, worker, microseconds):
        words, place, waited = at(pointer(board), np.int64), _STATE + worker * LINE, 0
        while True:
            if load(words, place) != _AWAKE:
                store(words, place, _AWAKE)
                _work(words, worker)
                waited = 0
            elif waited < microseconds:
                _await_change(words, place, _AWAKE)
                waited += 1
            elif compare_and_set(words, place, _AWAKE, _ASLEEP) == _AWAKE:
                return

    n = types.int64
    return SharingFunctions(
        _compiled(post, n, n, n, n, n, n, n),
        _compiled(finish, types.void, n),
        _compiled(run, n, n, n, n, n, n, n, n),
        _compiled(serve, types.void, n, n, n),
    )


def _compiled(function: Callable[..., Any], result: Any, *arguments: Any) -> Any:
    return numba.cfunc(result(*arguments), cache=True, error_model="numpy")(function).ctypes
