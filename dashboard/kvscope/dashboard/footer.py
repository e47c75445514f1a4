"""The line of keys at the bottom."""

from textual.screen import Screen
from textual.widgets import Footer


class KeyFooter(Footer):
    """Textual's footer, composed anew only when it would differ; no key is cut at the edge, none leaves a trace.

    Textual 8.2 keeps every key of a footer for as long as the footer lives: each is bound to `compact`, and nothing
    unbinds it. A change of `compact` drops those that are gone; telling of one that is none does the same.
    """

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)
        self._shown: list[tuple[str, str, bool]] = []

    def on_mount(self) -> None:
        self.screen.screen_layout_refresh_signal.subscribe(self, self._leave_out_cut_keys)

    def _leave_out_cut_keys(self, _: Screen[object]) -> None:
        for key in self.children:
            if key.visible != (is_whole := key.region.right <= self.region.right):
                key.visible = is_whole

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
