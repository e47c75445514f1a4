"""The line of keys at the bottom."""

from itertools import accumulate, islice

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Footer


class KeyFooter(Footer):
    """Textual's footer with the keys that fit whole, composed anew only when it would look different.

    Textual 8.2 keeps every key of a footer for as long as the footer lives: each is bound to `compact`, and nothing
    unbinds it. A change of `compact` drops those that are gone; telling of one that is none does the same.
    """

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)
        self._shown: list[tuple[str, str, bool]] = []

    def compose(self) -> ComposeResult:
        yield from islice(super().compose(), len(self._whole_keys(self.screen)))

    def on_resize(self) -> None:
        if self._bindings_ready:
            self.bindings_changed(self.screen)

    def bindings_changed(self, screen: Screen[object]) -> None:
        shown = self._whole_keys(screen)
        if shown != self._shown or not self._bindings_ready:
            super().bindings_changed(screen)
            if screen is self.screen and screen.app.app_focus:
                self._shown = shown

    def _whole_keys(self, screen: Screen[object]) -> list[tuple[str, str, bool]]:
        """Key, label and whether it works, of each action; known from the width alone, before anything is laid out."""
        said: dict[str, tuple[str, str, bool]] = {}
        for _, binding, enabled, _ in screen.active_bindings.values():
            if binding.show:
                said.setdefault(binding.action, (self.app.get_key_display(binding), binding.description, enabled))
        ends = accumulate(cell_len(f" {key} {label} ") for key, label, _ in said.values())
        return [key for key, end in zip(said.values(), ends, strict=True) if end <= self.app.size.width + 1]

    async def recompose(self) -> None:
        await super().recompose()
        self.mutate_reactive(Footer.compact)
