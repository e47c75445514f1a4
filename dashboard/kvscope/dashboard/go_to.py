"""One line that asks where to go: a step number, or a time since the engine's start."""

import re
from typing import ClassVar, NamedTuple

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import ModalScreen
from textual.widgets import Input

HINT = "step number, or a time: 412   12.5s   2m"


class Destination(NamedTuple):
    """Exactly one of the two is set."""

    step: int | None = None
    time_ns: int | None = None


def parse_destination(text: str) -> Destination | None:
    """`412` is a step, `12.5s` or `2m` a time; None for anything else."""
    found = re.fullmatch(r"\s*(\d{1,15})(\.\d{1,9})?\s*(s|m|ms)?\s*", text, re.ASCII)
    if found is None:
        return None
    whole, fraction, unit = found.groups()
    if unit is None:
        return Destination(step=int(whole)) if fraction is None else None
    return Destination(time_ns=round(float(whole + (fraction or "")) * {"s": 1e9, "m": 60e9, "ms": 1e6}[unit]))


class GoToScreen(ModalScreen[Destination | None]):
    """Enter goes there, Esc leaves things as they are."""

    BINDINGS: ClassVar = [Binding("escape", "leave", "close", show=False)]

    def compose(self) -> ComposeResult:
        line = Input(placeholder=HINT, id="go-to")
        line.border_title = "Go to"
        yield line

    def on_input_submitted(self, event: Input.Submitted) -> None:
        destination = parse_destination(event.value)
        if destination is None and event.value.strip():
            event.input.border_subtitle = HINT
            return
        self.dismiss(destination)

    def action_leave(self) -> None:
        self.dismiss(None)
