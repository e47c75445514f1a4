"""Going back in time: a track of batches, keyframes, the walker that moves between moments, and the player's clock."""

from kvscope.transport.timetravel.history import FrozenTrack, History
from kvscope.transport.timetravel.player import Player, ReplaySource
from kvscope.transport.timetravel.survey import Survey
from kvscope.transport.timetravel.track import Place, Track

__all__ = ["FrozenTrack", "History", "Place", "Player", "ReplaySource", "Survey", "Track"]
