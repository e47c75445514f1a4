"""Every key of the dashboard, in one table: the app binds it, the help screen and the palette are written from it."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from textual.binding import Binding

PANES = {
    "grid": "Block pool",
    "requests": "Requests",
    "table": "Table",
    "text": "Text",
    "events": "Events",
    "block": "Block",
    "insight": "Insight",
    "host": "Host pool",
}


NOTABLE = "copy-on-write, preemption, eviction, refusal, audit finding or bookmark"


class Key(NamedTuple):
    """`needs` names what must be there for the key to do anything, or nothing.

    "engine": control of it. "recording": a past to move in, a file's or an engine's. "live": an engine that can be
    frozen. "history": it has been. "steps": engine or recording. "tap": something to record. "host": blocks to swap to.
    """

    keys: str
    action: str
    label: str
    about: str
    needs: str = ""
    footer: bool = True
    priority: bool = False  # seen before the focused pane sees it, so that the very next key already has its new place

    @property
    def name(self) -> str:
        """What the settings file calls it."""
        return self.label.lower().replace(" ", "-")


KEYS = (
    # First, so that they are in the footer at every width: the way to everything else, and the way out.
    Key("colon,ctrl+p", "command_palette", "palette", "Palette: every action by name"),
    Key("question_mark,f1", "help", "help", "This list of keys"),
    Key("q", "quit", "quit", "Leave"),
    Key("L", "live", "LIVE", "Leave the past for the live engine", "history"),
    Key("space", "play", "play", "Play or pause", "recording"),
    Key("b,backspace", "step_back", "back", "One batch back", "recording"),
    Key("right_square_bracket", "move('next_notable')", "notable", f"To the next {NOTABLE}", "recording"),
    Key("t", "go_to", "go to", "To a step number, or a time such as 12.5s", "recording", priority=True),
    Key("i", "focus_prompt", "prompt", "Write a prompt", "engine", priority=True),
    Key("ctrl+o", "edit_prompt", "editor", "Write the prompt in your own editor: $VISUAL or $EDITOR", "engine", False),
    Key("slash", "filter", "filter", "Filter the requests, or the events where they have the focus", priority=True),
    Key("p", "toggle_pause", "pause", "Pause or resume the engine", "engine"),
    Key("n,full_stop", "step", "step", "One batch forward in the past; one step of a paused engine", "steps"),
    Key("P", "breakpoints", "breakpoints", "Breakpoints: what the engine pauses at", "engine", footer=False),
    Key("x", "cancel", "cancel", "Cancel the selected request", "engine"),
    Key("space", "freeze", "freeze", "Freeze the view and walk in its past; the engine goes on", "live"),
    Key(
        "left_square_bracket",
        "move('previous_notable')",
        "last notable",
        "To the notable event before",
        "recording",
        False,
    ),
    Key("m", "bookmark", "bookmark", "Mark this moment, with a note; again changes it", footer=False, priority=True),
    Key("N", "move('engine_step_forward')", "engine step", "One engine step forward", "recording", False),
    Key("B", "move('engine_step_back')", "engine step back", "One engine step back", "recording", False),
    Key("e", "move('event_forward')", "event", "One event forward", "recording", False),
    Key("E", "move('event_back')", "event back", "One event back", "recording", False),
    Key("w", "watch('block_change')", "block changed", "Back to the last change of the block", "recording", False),
    Key("W", "watch('block_release')", "held before", "Back to who let go of the block last", "recording", False),
    Key("a", "watch('admission')", "admitted", "Back to the selected request's admission", "recording", False),
    Key("v", "watch('preemption')", "preempted", "Back to the selected request's preemption", "recording", False),
    Key("home", "rewind", "start", "To the start", "recording", False, priority=True),
    Key("end", "end", "end", "To the end; of an engine's past, back to LIVE", "recording", False, priority=True),
    Key("left_curly_bracket", "jump(-1)", "jump back", "A twentieth back", "recording", False),
    Key("right_curly_bracket", "jump(1)", "jump", "A twentieth forward; a click on the timeline", "recording", False),
    Key("less_than_sign,comma", "speed(-1)", "slower", "Play slower", "recording", footer=False),
    Key("greater_than_sign", "speed(1)", "faster", "Play faster", "recording", footer=False),
    Key("1", "pane('grid')", "pool", "Go to the block pool", footer=False, priority=True),
    Key("2", "pane('requests')", "requests", "Go to the requests", footer=False, priority=True),
    Key("3", "pane('table')", "table", "Go to the block table", footer=False, priority=True),
    Key("4", "pane('text')", "text", "Go to the text", footer=False, priority=True),
    Key("5", "pane('events')", "events", "Go to the events", footer=False, priority=True),
    Key("6", "pane('block')", "block", "Go to the block under the cursor", footer=False, priority=True),
    Key("7", "pane('insight')", "insight", "Where the memory goes: pool over time, waste ledger", priority=True),
    Key("8", "pane('host')", "host", "Go to the host pool, where swapped-out requests are", "host", False, True),
    Key("c", "colour", "colour", "Colour blocks by owner, state, ref count, last write or cache hits", footer=False),
    Key("plus,equals_sign", "zoom(-1)", "zoom in", "Zoom in: draw blocks nearer", footer=False),
    Key("minus", "zoom(1)", "zoom out", "Zoom out: draw blocks denser", footer=False),
    Key("0", "zoom_auto", "zoom auto", "Choose the zoom by the pool's size", footer=False),
    Key("escape", "back", "back out", "Back out one level: selection, cursor, the past", footer=False),
    Key("y", "copy", "copy", "Copy what the focused pane shows to the clipboard", footer=False),
    Key("R", "record", "record", "Record the engine into a file here, from now on; again ends it", "tap", footer=False),
    Key("s", "save_picture", "svg", "Save an SVG picture of the screen in the current directory"),
    Key("L", "lesson", "lesson", "The lesson: six moments of a paged KV cache", "live", False),
    Key("ctrl+z", "suspend_process", "suspend", "Suspend; the shell's fg comes back", footer=False),
    Key("ctrl+l", "redraw", "redraw", "Redraw the whole screen", footer=False),
    Key("ctrl+q,ctrl+c", "quit", "quit anywhere", "Leave, also while writing", footer=False, priority=True),
)


def app_bindings() -> list[Binding]:
    """The table, and F2, F3, ... for the panes of these numbers: they work while the user writes."""
    named = [
        Binding(key.keys, key.action, key.label, show=key.footer, priority=key.priority, id=key.name) for key in KEYS
    ]
    numbered = [
        Binding(f"f{number}", f"go('{name}')", PANES[name], show=False, priority=True)
        for number, name in enumerate(PANES, start=1)
        if number > 1  # F1 is help
    ]
    return named + numbered


def clashing_keys(keymap: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Keys that would mean two things at once with these of the user's own, and the two actions."""
    taken: dict[str, list[Key]] = {}
    for entry in KEYS:
        for key in keymap.get(entry.name, entry.keys).split(","):
            others = taken.setdefault(_CHARACTERS.get(key, key), [])
            for other in others:
                if {entry.needs, other.needs} not in _NEVER_TOGETHER:
                    yield key, [entry.name, other.name]
            others.append(entry)


_NEVER_TOGETHER = ({"live", "recording"}, {"live", "history"})


_NAMES = {
    "question_mark": "?",
    "full_stop": ".",
    "slash": "/",
    "plus": "+",
    "equals_sign": "=",
    "minus": "-",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "comma": ",",
    "right_square_bracket": "]",
    "left_square_bracket": "[",
    "right_curly_bracket": "}",
    "left_curly_bracket": "{",
    "escape": "Esc",
    "enter": "Enter",
    "space": "Space",
    "home": "Home",
    "end": "End",
    "backspace": "Backspace",
    "left": "Left",
    "right": "Right",
    "up": "Up",
    "down": "Down",
    "f1": "F1",
    "tab": "Tab",
    "colon": ":",
}
_CHARACTERS = {character: name for name, character in _NAMES.items() if len(character) == 1}


def key_names(keys: str) -> str:
    """`plus,equals_sign` as `+ =`."""
    return " ".join(_NAMES.get(key, key.replace("ctrl+", "Ctrl+")) for key in keys.split(","))


class KeyNames:
    """The keys in force: the user's own on top of those of the table. Every hint on the screen names these."""

    def __init__(self, keymap: Mapping[str, str] = MappingProxyType({})) -> None:
        self._keymap = keymap

    def all(self, key: Key) -> str:
        return key_names(self._keymap.get(key.name, key.keys))

    def __getitem__(self, name: str) -> str:
        """The first key of the action that settings call so."""
        return self.all(_BY_NAME[name]).split(" ")[0]

    def pane(self, pane: str) -> str:
        """The key that goes to a pane."""
        return self.all(_BY_ACTION[f"pane('{pane}')"]).split(" ")[0]


_BY_NAME = {key.name: key for key in KEYS}
_BY_ACTION = {key.action: key for key in KEYS}
DEFAULT_NAMES = KeyNames()


def typed_keys(keys: str) -> str:
    """`question_mark,f1` as `?,f1`: how one writes it in a file. A comma keeps its name."""
    short = {name: character for character, name in _CHARACTERS.items() if character != ","}
    return ",".join(short.get(key, key) for key in keys.split(","))
