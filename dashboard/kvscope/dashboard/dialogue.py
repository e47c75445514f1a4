"""Opening a dialogue with a line to write in."""

from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.screen import Screen
from textual.widgets import Input


async def open_dialogue(app: App[Any], screen: Screen[Any], answer: Callable[[Any], None] | None = None) -> None:
    """Show it, and give its line the focus before the next key is looked at: whoever types on types into the line.

    Only a key with priority is handled in the app's own turn; the action of any other comes after later keys.
    """
    await app.push_screen(screen, answer)
    screen.set_focus(screen.query_one(Input))
