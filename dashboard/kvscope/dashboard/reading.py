"""Opening recordings for a command: one file or the files of one run, with progress on a terminal."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvscope.transport.recording.reader import Progress
    from kvscope.transport.recording.stored_series import AnyRecording

PATIENCE_S, INTERVAL_S = 0.5, 0.2


def open_files(files: Sequence[Path]) -> "AnyRecording":
    """One file, or the files of one run in order; on disk, where they can be looked into. Raises RecordingError."""
    from kvscope.transport.recording import open_recording, open_series

    with _progress() as tell:
        return open_recording(files[0], tell) if len(files) == 1 else open_series(files, tell)


@contextmanager
def _progress() -> "Iterator[Progress]":
    """What reading calls with how far it is; on a terminal that is a line, once it takes long enough to be missed."""
    shown_at, is_shown = time.monotonic() + PATIENCE_S - INTERVAL_S, False

    def tell(name: str, num_bytes: int, size: int) -> None:
        nonlocal shown_at, is_shown
        now = time.monotonic()
        if sys.stderr.isatty() and now - shown_at >= INTERVAL_S:
            shown_at, is_shown = now, True
            percent = 100 * num_bytes // max(size, 1)
            sys.stderr.write(f"\rreading {name}: {percent}% of {size / 1e6:,.0f} MB\x1b[K")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        if is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
