"""Recordings: an MCAP file with one message per batch, written beside a live engine and played back later."""

from kvscope.transport.recording.format import RecordingError
from kvscope.transport.recording.player import Player, ReplaySource
from kvscope.transport.recording.reader import Recording, read_recording
from kvscope.transport.recording.recorder import Recorder

__all__ = ["Player", "Recorder", "Recording", "RecordingError", "ReplaySource", "read_recording"]
