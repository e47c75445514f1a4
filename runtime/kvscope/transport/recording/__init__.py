"""Recordings: an MCAP file with one message per batch, written beside a live engine and played back later.

Its parts are loaded when they are asked for: a viewer of a live engine needs none of MCAP before it records.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvscope.transport.recording.format import RecordingError
    from kvscope.transport.recording.opening import open_recording
    from kvscope.transport.recording.reader import Recording, read_recording
    from kvscope.transport.recording.recorder import Recorder
    from kvscope.transport.recording.series import (
        SeriesRecorder,
        check_recordable,
        files_of,
        open_recorder,
        read_series,
    )
    from kvscope.transport.recording.stored_series import open_series
    from kvscope.transport.timetravel.player import Player, ReplaySource

__all__ = [
    "Player",
    "Recorder",
    "Recording",
    "RecordingError",
    "ReplaySource",
    "SeriesRecorder",
    "check_recordable",
    "files_of",
    "open_recorder",
    "open_recording",
    "open_series",
    "read_recording",
    "read_series",
]

_PLACES = {
    "Player": "kvscope.transport.timetravel.player",
    "Recorder": "kvscope.transport.recording.recorder",
    "Recording": "kvscope.transport.recording.reader",
    "RecordingError": "kvscope.transport.recording.format",
    "ReplaySource": "kvscope.transport.timetravel.player",
    "SeriesRecorder": "kvscope.transport.recording.series",
    "check_recordable": "kvscope.transport.recording.series",
    "files_of": "kvscope.transport.recording.series",
    "open_recorder": "kvscope.transport.recording.series",
    "open_recording": "kvscope.transport.recording.opening",
    "open_series": "kvscope.transport.recording.stored_series",
    "read_recording": "kvscope.transport.recording.reader",
    "read_series": "kvscope.transport.recording.series",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
