"""The line of keys at the bottom."""

from textual.screen import Screen
from textual.widgets import Footer


class KeyFooter(Footer):
    """Textual's footer, composed anew only when it would look different, and without a trace of the keys it had.

    Textual 8.2 keeps every key of a footer for as long as the footer lives: each is bound to `compact`, and nothing
    unbinds it. A change of `compact` drops those that are gone; telling of one that is none does the same.
    """

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)
        self._shown: list[tuple[str, str, bool]] = []

    def bindings_changed(self, screen: Screen[object]) -> None:
        shown = [
            (self.app.get_key_display(binding), binding.description, enabled)
            for _, binding, enabled, _ in screen.active_bindings.values()
            if binding.show
        ]
        if shown != self._shown or not self._bindings_ready:
            super().bindings_changed(screen)
            if screen is self.screen and screen.app.app_focus:
                self._shown = shown

    async def recompose(self) -> None:
        await super().recompose()
        self.mutate_reactive(Footer.compact)
