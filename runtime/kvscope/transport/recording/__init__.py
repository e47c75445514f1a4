"""Recordings: an MCAP file with one message per batch, written beside a live engine and played back later."""

from kvscope.transport.recording.format import RecordingError
from kvscope.transport.recording.opening import open_recording
from kvscope.transport.recording.reader import Recording, read_recording
from kvscope.transport.recording.recorder import Recorder
from kvscope.transport.recording.series import SeriesRecorder, files_of, open_recorder, read_series
from kvscope.transport.timetravel.player import Player, ReplaySource

__all__ = [
    "Player",
    "Recorder",
    "Recording",
    "RecordingError",
    "ReplaySource",
    "SeriesRecorder",
    "files_of",
    "open_recorder",
    "open_recording",
    "read_recording",
    "read_series",
]
