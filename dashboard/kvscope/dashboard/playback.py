"""What the dashboard needs of a recording's player, and its position as a line."""

from typing import Protocol

from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.strips import Part, columns, measure

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class Player(Protocol):
    """A recording that can be played, stepped and rewound. `position` of `length` batches have been applied."""

    speed: float
    length: int

    @property
    def position(self) -> int: ...
    @property
    def playing(self) -> bool: ...
    def toggle(self) -> None: ...
    def step_forward(self) -> bool: ...
    def step_back(self) -> bool: ...
    def seek_start(self) -> None: ...


def next_speed(speed: float, step: int) -> float:
    """The neighbouring one of SPEEDS."""
    nearest = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - speed))
    return SPEEDS[min(max(nearest + step, 0), len(SPEEDS) - 1)]


def draw_playback(player: Player, glyphs: Glyphs, width: int) -> Strip:
    """Playing or not, how far, how fast, and the keys."""
    position, length = player.position, player.length
    state = f" {glyphs.play} playing" if player.playing else f" {glyphs.pause} paused "
    left: list[Part] = [
        (state, theme.GOOD if player.playing else theme.NOTICE),
        (f"  {position:>{len(str(length))}}/{length} ", theme.STRONG),
    ]
    right: list[Part] = [(f" {player.speed:g}{glyphs.times} ", theme.STRONG)]
    if width >= 100:
        keys = "space play/pause  n step  b back  home start  < > speed "
        right.append((keys, theme.SOFT))
    room = max(width - measure(left) - measure(right), 4)
    done = room * position // length if length else 0
    bar: list[Part] = [(glyphs.bar_written * done, theme.BRAND), (glyphs.bar_free * (room - done), theme.FAINT)]
    return columns([*left, *bar], right, width)
