"""The clock of a playback: recorded time without its silences, run at a speed. Pure: the time comes in as a value."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

MIN_SPEED, MAX_SPEED = 0.1, 1000.0
MAX_GAP_S = 1.0  # longer silences are cut: nobody wants to watch an idle engine
MAX_LAG_S = 0.25  # a longer delay of the player is not made up for


class PlayClock:
    """Batch i is due once `_due_s[i]` seconds have been played; the first one at once."""

    def __init__(self, times_ns: Sequence[int]) -> None:
        gaps_s = np.diff(np.asarray(times_ns, np.int64)) / 1e9
        self._due_s = np.cumsum(np.clip(gaps_s, 0, MAX_GAP_S))  # of every batch but the first
        self.speed = 1.0
        self._played_s = self._read_at = 0.0

    @property
    def length_s(self) -> float:
        """From the first batch to the last at speed 1."""
        return float(self._due_s[-1]) if len(self._due_s) else 0.0

    def set(self, position: int, now: float) -> None:
        """What is on show now: so many batches."""
        self._played_s = self._due(position - 1)
        self._read_at = now

    def read(self, now: float) -> int:
        """How many batches are due by now."""
        self._played_s += min(max(now - self._read_at, 0.0), MAX_LAG_S) * self.speed
        self._read_at = now
        return bisect_right(self._due_s, self._played_s) + 1

    def wait_s(self, position: int) -> float:
        """How long until the batch after `position` others is due."""
        return max(self._due(position) - self._played_s, 0.0) / self.speed

    def _due(self, batch: int) -> float:
        return float(self._due_s[batch - 1]) if 0 < batch <= len(self._due_s) else 0.0
