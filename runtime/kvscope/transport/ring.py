"""The last batches that were sent, for clients that missed some."""

import itertools
import threading
from collections import deque
from typing import NamedTuple


class SentBatch(NamedTuple):
    seq: int
    payload: bytes


class ReplayRing:
    """Consecutive batches, bounded in number and bytes; the newest always stays."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._batches: deque[SentBatch] = deque()
        self._num_bytes = 0
        self._max_batches, self._max_bytes = max_batches, max_bytes

    def append(self, batch: SentBatch) -> None:
        with self._lock:
            self._batches.append(batch)
            self._num_bytes += len(batch.payload)
            while len(self._batches) > 1 and (
                len(self._batches) > self._max_batches or self._num_bytes > self._max_bytes
            ):
                self._num_bytes -= len(self._batches.popleft().payload)

    def clear(self) -> None:
        """Forget everything: the next batch does not follow the last one."""
        with self._lock:
            self._batches.clear()
            self._num_bytes = 0

    def chunk(self, seq: int, max_batches: int) -> list[SentBatch] | None:
        """Up to `max_batches` batches from `seq` on; None when `seq` has left the ring, or was never in it."""
        with self._lock:
            if not self._batches or seq < self._batches[0].seq:
                return None
            start = seq - self._batches[0].seq
            return list(itertools.islice(self._batches, start, start + max_batches))
