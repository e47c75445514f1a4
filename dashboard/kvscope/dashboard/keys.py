"""Every key of the dashboard, in one table: the app binds it, the help screen and the palette are written from it."""

from typing import NamedTuple

from textual.binding import Binding

PANES = {
    "grid": "Block pool",
    "requests": "Requests",
    "table": "Table",
    "text": "Text",
    "events": "Events",
    "block": "Block",
}


class Key(NamedTuple):
    """`needs` names what must be there for the key to do anything: "engine" (control), "recording", or nothing."""

    keys: str
    action: str
    label: str
    about: str
    needs: str = ""
    footer: bool = True
    priority: bool = False  # seen before the focused pane sees it, so that the very next key already has its new place


KEYS = (
    Key("i,slash", "focus_prompt", "prompt", "Write a prompt", "engine", priority=True),
    Key("p", "toggle_pause", "pause", "Pause or resume the engine", "engine"),
    Key("n,full_stop", "step", "step", "Run one step while paused", "steps"),
    Key("c", "cancel", "cancel", "Cancel the selected request", "engine"),
    Key("space", "play", "play", "Play or pause the recording", "recording"),
    Key("b,backspace", "step_back", "back", "One step back in the recording", "recording"),
    Key("home", "rewind", "start", "Go to the start of the recording", "recording", priority=True),
    Key("less_than_sign,comma", "speed(-1)", "slower", "Play slower", "recording", footer=False),
    Key("greater_than_sign", "speed(1)", "faster", "Play faster", "recording", footer=False),
    Key("1", "pane('grid')", "pool", "Go to the block pool", footer=False, priority=True),
    Key("2", "pane('requests')", "requests", "Go to the requests", footer=False, priority=True),
    Key("3", "pane('table')", "table", "Go to the block table", footer=False, priority=True),
    Key("4", "pane('text')", "text", "Go to the text", footer=False, priority=True),
    Key("5", "pane('events')", "events", "Go to the events", footer=False, priority=True),
    Key("6", "pane('block')", "block", "Go to the block under the cursor", footer=False, priority=True),
    Key("plus,equals_sign", "zoom(-1)", "zoom in", "Draw blocks nearer", footer=False),
    Key("minus", "zoom(1)", "zoom out", "Draw blocks denser", footer=False),
    Key("0", "zoom_auto", "zoom auto", "Choose the zoom by the pool's size", footer=False),
    Key("escape", "clear", "clear", "Select nothing", footer=False),
    Key("s", "save_picture", "svg", "Save an SVG picture of the screen in the current directory"),
    Key("question_mark,f1", "help", "help", "This list of keys"),
    Key("q", "quit", "quit", "Leave"),
    Key("ctrl+q,ctrl+c", "quit", "quit", "Leave, also while writing", footer=False, priority=True),
)


def app_bindings() -> list[Binding]:
    return [Binding(key.keys, key.action, key.label, show=key.footer, priority=key.priority) for key in KEYS]


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
    "escape": "Esc",
    "enter": "Enter",
    "space": "Space",
    "home": "Home",
    "backspace": "Backspace",
    "left": "Left",
    "right": "Right",
    "up": "Up",
    "down": "Down",
    "f1": "F1",
}


def key_names(keys: str) -> str:
    """`plus,equals_sign` as `+ =`."""
    return " ".join(_NAMES.get(key, key.replace("ctrl+", "Ctrl+")) for key in keys.split(","))
