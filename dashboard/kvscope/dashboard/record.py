"""`kvscope record`: attach to a live engine, and keep what it publishes until told to stop."""

import contextlib
import sys
import threading
import time
from pathlib import Path

from kvscope.dashboard.errors import CommandError, ExitCode
from kvscope.dashboard.output import write_lines
from kvscope.dashboard.terminal import handling
from kvscope.dashboard.viewer import CONNECT_TIMEOUT_S
from kvscope.events.text import make_printable
from kvscope.transport.client import EngineClient
from kvscope.transport.endpoints import Endpoints
from kvscope.transport.recording import Recorder, SeriesRecorder, open_recorder
from kvscope.transport.recording.tap import Tap
from kvscope.transport.source import Status, View

SYNC_TIMEOUT_S = 10.0
POLL_S = 0.05


def record(
    endpoints: Endpoints, path: Path, *, force: bool, seconds: float | None, max_bytes: int | None = None
) -> int:
    """Record until interrupted, until the time is over, or until the engine ends. The exit code.

    Raises:
        EndpointError, RecordingError, CommandError: it cannot begin; no file is touched then.
    """
    stop = threading.Event()
    with handling(lambda *_: stop.set()), contextlib.ExitStack() as stack:
        tap = Tap()
        view = View(tap)
        client = EngineClient(endpoints, view).connect(CONNECT_TIMEOUT_S)
        stack.callback(client.close)
        if not wait_until_synced(view, endpoints.label, stop):
            return ExitCode.INTERRUPTED
        recorder = stack.enter_context(contextlib.closing(open_recorder(path, force=force, max_bytes=max_bytes)))
        tap.begin(recorder, view)
        sys.stderr.write(f"kvscope: recording {make_printable(endpoints.label)}; Ctrl-C ends it\n")
        reason = _keep_on(view, tap, recorder, stop, seconds)
        tap.end(view)
    write_lines(_summary(tap, view.num_gaps, path, reason))
    if recorder.error is not None:
        raise CommandError(recorder.error, ExitCode.FAILURE)
    return ExitCode.OK


def wait_until_synced(view: View, label: str, stop: threading.Event) -> bool:
    """Whether the engine's state has arrived; False when `stop` was set first.

    Raises:
        CommandError: it does not come.
    """
    deadline = time.monotonic() + SYNC_TIMEOUT_S
    while view.status not in (Status.LIVE, Status.ENDED):
        if stop.wait(POLL_S):
            return False
        if time.monotonic() > deadline:
            why = f": {view.status_detail}" if view.status_detail else ""
            raise CommandError(f"no state from {label} within {SYNC_TIMEOUT_S:.0f} s{why}", ExitCode.FAILURE)
    return True


def _keep_on(
    view: View, tap: Tap, recorder: Recorder | SeriesRecorder, stop: threading.Event, seconds: float | None
) -> str | None:
    """Wait for the end; why it came, None: because the user wanted it."""
    deadline = None if seconds is None else time.monotonic() + seconds
    is_told = False
    while not stop.wait(POLL_S):
        if recorder.error is not None:
            return "the disk ended it"
        if tap.ended is not None:
            return tap.ended
        if view.status is Status.ENDED:
            return view.status_detail
        if deadline is not None and time.monotonic() >= deadline:
            return None
        if view.status is Status.STALE and not is_told:
            sys.stderr.write(f"kvscope: {view.status_detail}; waiting for it, Ctrl-C ends the recording\n")
        is_told = view.status is Status.STALE
    return None


def _summary(tap: Tap, num_gaps: int, path: Path, reason: str | None) -> list[str]:
    healed = num_gaps - tap.num_holes
    gaps = f"{healed} gaps healed" if healed > 0 else "no gaps"
    if tap.num_holes:
        gaps = f"{tap.num_missing_batches:,} batches missing in {tap.num_holes} gaps, full states in their place"
    kept = f"{tap.num_batches:,} batches, {tap.num_events:,} events in {tap.seconds:.1f} s"
    if not tap.num_batches and not num_gaps:
        kept = "the state alone, as the engine was idle"
    lines = [f"kept {kept}, {gaps}: {make_printable(str(path))}"]
    return lines if reason is None else [*lines, f"ended by itself: {reason}"]
