"""Where a walk may begin: copies of the state along a track, few enough to be kept in memory."""

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from kvscope.events.keyframe import Keyframe
from kvscope.events.state import EngineState
from kvscope.transport.timetravel.track import IndexedTrack

MAX_KEYFRAMES = 64  # and more of them, as long as they are small:
MAX_KEYFRAME_BYTES = 32 << 20
MIN_SPACING_EVENTS = 1024
TRAIL_EVENTS = (4096, 1024, 256, 64)  # how far before the end of a walk a copy is left, for the steps back from there


class Keyframes:
    """Spaced by events; when more than `max_count` take more than `max_bytes`, every second one goes.

    Any thread may offer or look; whoever folds along the track offers what passes by.
    """

    def __init__(
        self,
        events_before: Sequence[int],
        *,
        max_count: int | None = None,
        max_bytes: int | None = None,
        spacing: int | None = None,
        stored: IndexedTrack | None = None,
    ) -> None:
        """With `stored` ones no others are kept, but for the trail: they would each hold their own copy of the text."""
        self._events_before = events_before
        self._max_count = MAX_KEYFRAMES if max_count is None else max_count
        self._max_bytes = MAX_KEYFRAME_BYTES if max_bytes is None else max_bytes
        self._spacing = MIN_SPACING_EVENTS if spacing is None else spacing
        self._stored = stored if stored is not None and len(stored.columns.checkpoints) else None
        self._lock = threading.Lock()
        self._kept: dict[int, Keyframe] = {}
        self._positions: list[int] = []
        self._num_bytes = 0
        self._trail: list[tuple[int, Keyframe]] = []

    def __len__(self) -> int:
        return len(self._positions) + len(self._trail)

    def offer(self, position: int, state: EngineState) -> None:
        """Keep a copy of the state after `position` batches, if there is none near it."""
        if self._stored is not None or not self._is_wanted(position):
            return
        keyframe = Keyframe(state)
        with self._lock:
            if position not in self._kept:
                insort(self._positions, position)
                self._kept[position] = keyframe
                self._num_bytes += keyframe.num_bytes
            while len(self._positions) > self._max_count and self._num_bytes > self._max_bytes:
                self._positions = self._positions[::2]
                self._kept = {kept: self._kept[kept] for kept in self._positions}
                self._num_bytes = sum(kept.num_bytes for kept in self._kept.values())
                self._spacing *= 2

    def leave_trail(self, trail: list[tuple[int, Keyframe]], end: int) -> None:
        """Remember copies made shortly before `end`, instead of those left after it or long before."""
        oldest = self._events_before[end] - 2 * max(TRAIL_EVENTS)
        with self._lock:
            still = [kept for kept in self._trail if kept[0] < end and self._events_before[kept[0]] >= oldest]
            self._trail = [*still, *trail][-2 * len(TRAIL_EVENTS) :]

    def nearest(self, position: int) -> tuple[int, Keyframe] | None:
        """The last copy at or before `position`."""
        with self._lock:
            index = bisect_right(self._positions, position)
            found = [(kept, self._kept[kept]) for kept in self._positions[index - 1 : index] if index]
            found += [kept for kept in self._trail if kept[0] <= position]
        return max(found, key=lambda kept: kept[0], default=None)

    def stored_before(self, position: int) -> int:
        """Where the last checkpoint of the recording at or before `position` is; 0: nowhere."""
        if self._stored is None:
            return 0
        positions = self._stored.columns.checkpoints
        index = bisect_right(positions, position)
        return positions[index - 1] if index else 0

    def read_stored(self, position: int) -> EngineState | None:
        """The state there, for the caller to fold on; None when it cannot be read."""
        assert self._stored is not None
        try:
            return self._stored.checkpoint(bisect_left(self._stored.columns.checkpoints, position))
        except ValueError:  # of a foreign file; an earlier place is as good
            return None

    def _is_wanted(self, position: int) -> bool:
        with self._lock:
            index = bisect_left(self._positions, position)
            near = self._positions[max(index - 1, 0) : index + 1]
            here = self._events_before[position]
            return here >= self._spacing and all(
                abs(here - self._events_before[kept]) >= self._spacing for kept in near
            )
