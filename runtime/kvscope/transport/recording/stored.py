"""A recording that stays on disk: batches are decoded when somebody looks at them, a few chunks at a time.

A file that was closed properly carries an index, and is open at once. A torn one, or one without an index, is scanned
first: every chunk's checksum, every batch's header, no event.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol, overload

from kvscope.events.checkpoint import decode_checkpoint
from kvscope.events.codec import decode_state
from kvscope.events.finder import Finder
from kvscope.events.fold_transposed import apply_transposed, apply_watched
from kvscope.events.state import EngineState, FullState
from kvscope.events.transposed import read_transposed
from kvscope.events.types import Batch
from kvscope.transport.healing import receivable
from kvscope.transport.recording.chunks import Chunks, Layout
from kvscope.transport.recording.columns import BatchColumns
from kvscope.transport.recording.deltas import parse_packed, unpack
from kvscope.transport.recording.format import RecordingError
from kvscope.transport.recording.packing import Form
from kvscope.transport.recording.reader import decode_kept
from kvscope.transport.refusals import Refusals

CACHED_BATCHES = 256


class StoredRecording:
    """A `Track` whose batches are on disk. Any thread may read. Every read may raise RecordingError."""

    def __init__(
        self, path: Path, file: int, layout: Layout, *, missing: str | None = None, has_hole: bool = False
    ) -> None:
        self.path, self.missing, self.has_hole = path, missing, has_hole
        self.columns = layout.columns
        self._chunks = Chunks(file, layout)
        self._lock = threading.Lock()
        self._decoded = lru_cache(CACHED_BATCHES)(self._decode)  # by position
        self._refusals = Refusals()
        self._base: tuple[int, bytes] | None = None  # the checkpoint that others were made from, unpacked
        self.batches: Sequence[tuple[int, Batch]] = StoredBatches(self)
        initial, self.bookmarks = self._chunks.initial(), self._chunks.bookmarks()
        self.initial_state = decode_state(initial, printable=True) if initial is not None else None
        first = self.columns.seqs[0] if len(self.columns) else 0
        self.initial_seq = first - 1 if initial is not None else None

    @property
    def last_seq(self) -> int | None:
        return self.columns.seqs[-1] if len(self.columns) else self.initial_seq

    @property
    def num_refused_events(self) -> int:
        """Of the batches that were looked at so far."""
        return self._refusals.total

    def close(self) -> None:
        """Nothing can be read afterwards. Idempotent."""
        with self._lock:
            self._chunks.close()

    def batch(self, position: int) -> tuple[int, Batch]:
        """The batch after `position` others, and its number."""
        with self._lock:
            return self.columns.seqs[position], self._decoded(position)

    def fold(self, state: EngineState, position: int, finder: Finder) -> EngineState:
        """The state after the batch after `position` others, without an object for every event where that is spared.

        Raises:
            FoldError: it does not fit; the state is then unusable.
        """
        with self._lock:
            kept = self._chunks.batch(position)
        if kept.form != Form.TRANSPOSED:
            return apply_watched(state, receivable(self.batch(position)[1]), finder)
        batch = read_transposed(kept.data, printable=True)
        self._refusals.add(position, batch.num_refused_events)
        return apply_transposed(state, batch, finder)

    def checkpoint(self, number: int) -> EngineState:
        """The state where `columns.checkpoints[number]` says."""
        with self._lock:
            seq = self._seq_before(self.columns.checkpoints[number])
            packed = parse_packed(self._chunks.checkpoint(number, seq))
            base_raw = b"" if packed.base is None else self._unpack_base(packed.base)
            raw = unpack(packed, base_raw)
        return decode_checkpoint(raw)

    def mentions(self, position: int, needles: Sequence[bytes]) -> bool:
        """Whether the bytes of the batch after `position` others hold one of these; a full state may hold anything."""
        with self._lock:
            kept = self._chunks.batch(position)
        return kept.form is None or any(needle in kept.data for needle in needles)

    def _unpack_base(self, seq: int) -> bytes:
        if self._base is None or self._base[0] != seq:
            position = bisect_left(self.columns.seqs, seq) + 1
            number = bisect_left(self.columns.checkpoints, position)
            if number >= len(self.columns.checkpoints) or self.columns.checkpoints[number] != position:
                raise RecordingError("a checkpoint needs one that is not there")
            packed = parse_packed(self._chunks.checkpoint(number, seq))
            if packed.base is not None:
                raise RecordingError("a checkpoint needs one that needs another")
            self._base = seq, unpack(packed, b"")
        return self._base[1]

    def _seq_before(self, position: int) -> int:
        return self.columns.seqs[position - 1] if position else -1

    def _decode(self, position: int) -> Batch:
        kept = self._chunks.batch(position)
        if kept.form is None:
            return full_state_batch(decode_state(kept.data, printable=True))
        batch, num_refused = decode_kept(kept.form, kept.data)
        self._refusals.add(position, num_refused)
        return batch


def full_state_batch(state: EngineState) -> Batch:
    """A batch that only replaces the state: where batches are missing, or one was too large."""
    return Batch(
        epoch=state.epoch,
        step=state.step,
        phase=state.phase,
        time_ns=state.time_ns,
        events=(FullState(state=state),),
    )


class _Stored(Protocol):
    columns: BatchColumns

    def batch(self, position: int) -> tuple[int, Batch]: ...


class StoredBatches(Sequence[tuple[int, Batch]]):
    """A recording's batches as a sequence."""

    def __init__(self, recording: _Stored) -> None:
        self._recording = recording

    def __len__(self) -> int:
        return len(self._recording.columns)

    @overload
    def __getitem__(self, index: int) -> tuple[int, Batch]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, Batch]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, Batch] | Sequence[tuple[int, Batch]]:
        if isinstance(index, slice):
            return [self._recording.batch(position) for position in range(*index.indices(len(self)))]
        return self._recording.batch(range(len(self))[index])

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        return map(self._recording.batch, range(len(self)))
