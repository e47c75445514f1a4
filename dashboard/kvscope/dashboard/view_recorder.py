"""Recording what the dashboard watches, from the viewer's side: one key starts it, the same key ends it."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvscope.dashboard.keys import DEFAULT_NAMES, KeyNames
from kvscope.events.text import make_printable
from kvscope.transport.recording.format import RecordingError
from kvscope.transport.recording.tap import Tap
from kvscope.transport.source import View

if TYPE_CHECKING:
    from kvscope.transport.recording import Recorder


class ViewRecorder:
    """States: idle <-> recording. Calls are made one at a time, off the UI thread: a disk may be slow."""

    def __init__(self, view: View, tap: Tap, keys: KeyNames = DEFAULT_NAMES) -> None:
        self._view, self._tap, self._keys = view, tap, keys
        self._recorder: Recorder | None = None

    @property
    def name(self) -> str:
        """The file being written, for the header; empty when idle."""
        recorder = self._recorder
        return "" if recorder is None else make_printable(recorder.path.name)

    @property
    def broken(self) -> bool:
        """Whether it has ended by itself: then `stop` says why."""
        recorder = self._recorder  # another thread may stop it meanwhile
        return recorder is not None and (recorder.error or self._tap.ended) is not None

    def start(self) -> str:
        """From the picture on the screen on; the file's place. Raises RecordingError."""
        if self._view.last_seq is None:
            raise RecordingError("nothing to record: the engine's state has not arrived yet")
        from kvscope.transport.recording import Recorder  # only now: most viewers never record

        recorder = Recorder(recording_path())
        try:
            self._tap.begin(recorder, self._view)
        except BaseException:
            recorder.close()
            raise
        self._recorder = recorder
        return f"recording to {recorder.path}; {self._keys['record']} ends it"

    def stop(self) -> str:
        """Write the rest; what is in the file. A no-op when idle."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return ""
        self._tap.end(self._view)
        recorder.close()
        reason = recorder.error or (f"ended by itself: {self._tap.ended}" if self._tap.ended else "")
        kept = f"kept {self._tap.num_batches:,} batches, {self._tap.num_events:,} events: {recorder.path}"
        return f"{kept}; {reason}" if reason else kept


def recording_path() -> Path:
    """A name with the date; in the current directory, or where that cannot be written, in the XDG data directory."""
    folder = Path.cwd()
    if not os.access(folder, os.W_OK):
        data = os.environ.get("XDG_DATA_HOME", "")
        folder = (Path(data) if data.startswith("/") else Path.home() / ".local/share") / "kvscope"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = time.strftime("kvscope-%Y%m%d-%H%M%S")
    names = (f"{now}{again}.mcap" for again in ("", *(f"-{number}" for number in range(2, 100))))
    return next(path for name in names if not (path := folder / name).exists())
