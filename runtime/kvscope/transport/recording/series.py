"""A recording in several files: a new one is begun once the last has reached a size, each readable by itself.

run.mcap becomes run.0001.mcap, run.0002.mcap, ...; each but the first begins with the state where the one before ends.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from kvscope.events.codec import encode_state
from kvscope.events.state import EngineState
from kvscope.events.text import make_printable
from kvscope.events.types import Batch
from kvscope.transport.recording.bookmarks import Bookmark
from kvscope.transport.recording.format import RecordingError
from kvscope.transport.recording.reader import Progress, Recording, no_progress, read_recording
from kvscope.transport.recording.recorder import Recorder, check_file
from kvscope.transport.recording.stored import StoredRecording

logger = logging.getLogger(__name__)

_DIGITS = "[0-9][0-9][0-9][0-9]"


def open_recorder(path: Path, *, force: bool = False, max_bytes: int | None = None) -> "Recorder | SeriesRecorder":
    """One file, or with `max_bytes` as many as it takes. Raises RecordingError."""
    return Recorder(path, force=force) if max_bytes is None else SeriesRecorder(path, max_bytes, force=force)


def check_recordable(path: Path | None, *, force: bool = False, max_bytes: int | None = None) -> None:
    """Look, without touching anything; None: nothing is to be recorded.

    Raises:
        RecordingError: what `open_recorder` would refuse for sure, or a limit without a recording.
    """
    if path is None:
        if max_bytes is not None:
            raise RecordingError("--record-max-size says how long a recording's files are; add --record FILE")
        return
    if max_bytes is not None:
        _check_series(path, force=force)
    check_file(path, force=force or max_bytes is not None)


def _check_series(path: Path, *, force: bool = False) -> list[Path]:
    """The files there are of a rotated recording. Raises RecordingError where there are some, unless `force`."""
    old = sorted(path.parent.glob(f"{_escape(path.stem)}.{_DIGITS}{_escape(path.suffix)}"))
    if old and not force:
        raise RecordingError(f"{old[0]} exists; add --force to overwrite that recording, in all its files")
    return old


class SeriesRecorder:
    """A recorder that goes on in another file. What is queued when one is full still goes into it, and its index.

    The next file is begun when there is a batch for it: none holds a state alone.
    """

    def __init__(self, path: Path, max_bytes: int, *, force: bool = False) -> None:
        """Raises RecordingError: a file of that series exists (unless `force`, which removes them all)."""
        self.path, self._max_bytes, self._number = path, max_bytes, 1
        self._error: str | None = None
        self._next: tuple[int, int, bytes] | None = None  # the last one is full; what another begins with
        for old in _check_series(path, force=force):
            old.unlink()
        self._recorders = [Recorder(self.file(1))]

    def file(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.{number:04}{self.path.suffix}")

    @property
    def error(self) -> str | None:
        return self._error or next((one.error for one in self._recorders if one.error is not None), None)

    @property
    def num_queued_bytes(self) -> int:
        return sum(recorder.num_queued_bytes for recorder in self._recorders)

    def record(
        self, seq: int, log_time_ns: int, payload: bytes, batch: Batch | None = None, state: EngineState | None = None
    ) -> None:
        """As `Recorder.record`. Without the state after the batch no new file can begin there."""
        self._go_on()
        current = self._recorders[-1]
        current.record(seq, log_time_ns, payload, batch, state)
        if state is not None and current.num_file_bytes >= self._max_bytes and self.error is None:
            self._next = seq, log_time_ns, encode_state(state)

    def record_keyframe(self, seq: int, log_time_ns: int, state: bytes) -> None:
        self._go_on()
        self._recorders[-1].record_keyframe(seq, log_time_ns, state)

    def record_bookmark(self, bookmark: Bookmark, log_time_ns: int) -> None:
        self._recorders[-1].record_bookmark(bookmark, log_time_ns)

    def _go_on(self) -> None:
        """In another file, if the last one is full."""
        if self._next is None:
            return
        begins_with, self._next = self._next, None
        self._recorders[-1].end()
        self._number += 1
        try:
            following = Recorder(self.file(self._number))
        except RecordingError as error:
            self._error = f"recording stopped: {error}: {self.path}"
            logger.error("%s", self._error)
            return
        following.record_keyframe(*begins_with)
        self._recorders = [one for one in self._recorders if one.is_alive() or one.error is not None]
        self._recorders.append(following)

    def close(self) -> None:
        """Write what is queued. Idempotent."""
        for recorder in self._recorders:
            recorder.close()


def read_series(paths: Sequence[Path], progress: Progress = no_progress) -> Recording:
    """Several files of one recording, in their order, as one.

    Raises:
        RecordingError: one cannot be read, or does not begin where the one before it ends.
    """
    whole = read_recording(paths[0], progress)
    for path in paths[1:]:
        part = read_recording(path, progress)
        check_follows(whole, part)
        whole.batches += part.batches
        whole.bookmarks += part.bookmarks
        whole.num_refused_events += part.num_refused_events
        whole.path, whole.missing, whole.has_hole = path, part.missing, part.has_hole
    return whole


def check_follows(before: Recording | StoredRecording, part: Recording | StoredRecording) -> None:
    """Raises RecordingError unless the part begins where the one before it ends."""
    earlier, later = make_printable(str(before.path)), make_printable(str(part.path))
    if before.missing is not None:
        raise RecordingError(f"{earlier} {before.missing}: {later} cannot follow it")
    if part.initial_state is None or _epoch(part) != _epoch(before) or part.initial_seq != before.last_seq:
        raise RecordingError(f"{later} does not begin where {earlier} ends; give the files of one run in order")


def files_of(first: Path) -> list[Path]:
    """The file, and if it is the first one of a rotated recording, those that follow it."""
    found = [first]
    stem, dot, number = first.stem.rpartition(".")
    if dot and number == "0001":
        while (following := first.with_name(f"{stem}.{len(found) + 1:04}{first.suffix}")).exists():
            found.append(following)
    return found


def _epoch(recording: Recording | StoredRecording) -> bytes:
    if recording.initial_state is not None:
        return recording.initial_state.epoch
    return recording.batches[0][1].epoch


def _escape(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
