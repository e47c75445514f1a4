"""The files of one run as one recording that stays on disk, so far as each of them can be looked into."""

import contextlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from kvscope.events.finder import Finder
from kvscope.events.keyframe import Keyframe
from kvscope.events.state import EngineState
from kvscope.events.types import Batch
from kvscope.transport.recording.bookmarks import Bookmark
from kvscope.transport.recording.columns import BatchColumns
from kvscope.transport.recording.opening import open_stored
from kvscope.transport.recording.reader import Progress, Recording, no_progress
from kvscope.transport.recording.series import check_follows, read_series
from kvscope.transport.recording.stored import StoredBatches, StoredRecording


def open_series(paths: Sequence[Path], progress: Progress = no_progress) -> "StoredSeries | Recording":
    """Several files of one recording, in their order; in memory where one of them cannot be looked into.

    Raises:
        RecordingError: one cannot be read, or does not begin where the one before it ends.
    """
    with contextlib.ExitStack() as opened:
        parts = []
        with contextlib.suppress(Exception):  # whatever it is, the reader says it in words
            for path in paths:
                parts.append(open_stored(path, progress))
                opened.callback(parts[-1].close)
            for before, part in pairwise(parts):
                check_follows(before, part)
            opened.pop_all()
            return StoredSeries(parts)
    return read_series(paths, progress)


class StoredSeries:
    """An `IndexedTrack` of several: place `position` is in the last part that begins at or before it.

    The state that each part but the first begins with is a checkpoint too.
    """

    def __init__(self, parts: Sequence[StoredRecording]) -> None:
        self._parts, self._starts = parts, list[int]()
        self._begins = [Keyframe(part.initial_state) for part in parts if part.initial_state is not None]
        self._checkpoints: list[tuple[int, int | None]] = []  # part, and number in it; None: what it begins with
        self.columns = BatchColumns()
        for number, part in enumerate(parts):
            self._append(number, part)
        self.path, self.missing, self.has_hole = parts[-1].path, parts[-1].missing, parts[-1].has_hole
        self.batches: Sequence[tuple[int, Batch]] = StoredBatches(self)
        self.bookmarks: list[Bookmark] = [bookmark for part in parts for bookmark in part.bookmarks]
        self.initial_state, self.initial_seq = parts[0].initial_state, parts[0].initial_seq

    def _append(self, number: int, part: StoredRecording) -> None:
        start, columns = len(self.columns), part.columns
        self._starts.append(start)
        if number:
            self.columns.checkpoints.append(start)
            self._checkpoints.append((number, None))
        self.columns.checkpoints.extend(start + position for position in columns.checkpoints)
        self._checkpoints += [(number, inside) for inside in range(len(columns.checkpoints))]
        for name in ("seqs", "steps", "times_ns", "num_events", "held", "kinds"):
            getattr(self.columns, name).extend(getattr(columns, name))
        self.columns.num_blocks = max(self.columns.num_blocks, columns.num_blocks)

    @property
    def last_seq(self) -> int | None:
        return self._parts[-1].last_seq

    @property
    def num_refused_events(self) -> int:
        """Of the batches that were looked at so far."""
        return sum(part.num_refused_events for part in self._parts)

    def close(self) -> None:
        """Nothing can be read afterwards. Idempotent."""
        for part in self._parts:
            part.close()

    def batch(self, position: int) -> tuple[int, Batch]:
        """The batch after `position` others, and its number."""
        number = bisect_right(self._starts, position) - 1
        return self._parts[number].batch(position - self._starts[number])

    def fold(self, state: EngineState, position: int, finder: Finder) -> EngineState:
        """As `StoredRecording.fold`."""
        number = bisect_right(self._starts, position) - 1
        return self._parts[number].fold(state, position - self._starts[number], finder)

    def mentions(self, position: int, needles: Sequence[bytes]) -> bool:
        """As `StoredRecording.mentions`."""
        number = bisect_right(self._starts, position) - 1
        return self._parts[number].mentions(position - self._starts[number], needles)

    def checkpoint(self, number: int) -> EngineState:
        """The state where `columns.checkpoints[number]` says."""
        part, inside = self._checkpoints[number]
        if inside is None:
            return self._begins[part - len(self._parts)].restore()  # of the last parts: the first may have none
        return self._parts[part].checkpoint(inside)


AnyRecording = Recording | StoredRecording | StoredSeries  # in memory, or on disk
