"""The characters the dashboard draws with: one set for terminals with Unicode, one in plain ASCII."""

from dataclasses import dataclass

NUM_LEVELS = 9  # from none of a group to all of it


@dataclass(frozen=True)
class Glyphs:
    """Every glyph is one cell wide. State is told by shape alone; colour only adds the owner."""

    written: str  # slot with KV
    reserved: str  # slot or block without KV in a held block
    free: str
    cached: str
    shared: str  # written slots of blocks with several holders, in a chart
    partly: str  # block with written and reserved slots
    full: str
    many: str  # ref count above nine
    halves: str  # the upper half of a cell, the lower one, both; empty: there are no such characters
    levels: str  # how much of a group of blocks is held, from none to all
    bar_written: str
    bar_reserved: str
    bar_free: str
    dot: str
    cursor: str
    arrow: str
    ellipsis: str
    newline: str
    separator: str
    bar: str  # between the texts of two tokens
    tick: str
    cross: str
    warning: str
    copy: str
    preempt: str
    pause: str
    play: str
    wait: str
    times: str
    back: str  # looking at the past
    head: str  # where a player is on its timeline
    bookmark: str
    window: str  # under the part of a map that is on the screen
    unknown: str  # a part of the timeline that was not looked at yet
    ascii_borders: bool


UNICODE = Glyphs(
    written="■",
    reserved="□",
    free="·",
    cached="○",
    shared="▓",
    partly="◧",
    full="■",
    many="+",
    halves="▀▄█",
    levels="·▁▂▃▄▅▆▇█",
    bar_written="■",
    bar_reserved="□",
    bar_free="·",
    dot="●",
    cursor="›",
    arrow="→",
    ellipsis="…",
    newline="⏎",
    separator="·",
    bar="│",
    tick="✓",
    cross="✗",
    warning="▲",
    copy="◆",
    preempt="▼",
    pause="‖",
    play="▶",
    wait="◌",
    times="×",
    back="◀",
    head="┃",
    bookmark="⚑",
    window="━",
    unknown="╌",
    ascii_borders=False,
)

ASCII = Glyphs(
    written="#",
    reserved="_",
    free=".",
    cached="~",
    shared="2",
    partly="=",
    full="#",
    many="+",
    halves="",
    levels=".:-=+*%@#",
    bar_written="#",
    bar_reserved="_",
    bar_free=".",
    dot="*",
    cursor=">",
    arrow=">",
    ellipsis="~",
    newline="\\n",
    separator="-",
    bar="|",
    tick="v",
    cross="x",
    warning="!",
    copy="@",
    preempt="%",
    pause="=",
    play=">",
    wait="?",
    times="x",
    back="<",
    head="|",
    bookmark="$",
    window="=",
    unknown=" ",
    ascii_borders=True,
)
