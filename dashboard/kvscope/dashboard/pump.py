"""The reader thread: looks at the view at a fixed rate and posts a frame when something has changed."""

import threading
import time
from collections.abc import Callable

from textual.message import Message

from kvscope.dashboard.frames import Frame, FrameBuilder, build_frame
from kvscope.transport.source import View


class FrameReady(Message):
    """A new picture from the reader thread, or why there will be none; a newer one replaces it."""

    def __init__(self, frame: Frame | Exception) -> None:
        super().__init__()
        self.frame = frame

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, FrameReady)


class FramePump:
    """Builds frames off the UI thread. At most one frame is on its way: a busy screen drops frames, not keystrokes.

    `post` is called from the reader thread and returns False once nobody listens. It is given an exception where a
    frame cannot be built, and nothing after it: a picture that stands still must not pass for a quiet engine.
    `has_room`, called there as well, tells whether another picture makes sense, and else calls back when it does.
    """

    def __init__(
        self,
        view: View,
        post: Callable[[Frame | Exception], bool],
        fps: int,
        has_room: Callable[[Callable[[], None]], bool] = lambda _: True,
    ) -> None:
        self._view, self._post, self._interval_s, self._has_room = view, post, 1 / max(fps, 1), has_room
        self._builder = FrameBuilder()
        self._seen: tuple[View, int] | None = None  # what the latest frame shows
        self._stop = threading.Event()
        self._shown = threading.Event()
        self._shown.set()
        self._thread = threading.Thread(target=self._run, name="kvscope-frames", daemon=True)

    def watch(self, view: View) -> None:
        """Look at another view from now on."""
        self._view = view

    def want_ledger(self, wanted: bool) -> None:
        """Whether frames bring the waste ledger, which costs a look at every table; the next frame comes at once."""
        if wanted != self._builder.wants_ledger:
            self._builder.wants_ledger = wanted
            self._seen = None

    def want_traces(self, wanted: bool) -> None:
        """The same with what was seen of each block: its last write, its hits."""
        if wanted != self._builder.wants_traces:
            self._builder.wants_traces = wanted
            self._seen = None

    def start(self) -> None:
        self._thread.start()

    def shown(self) -> None:
        """The last frame has been drawn; the next one may come."""
        self._shown.set()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        self._shown.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            begun = time.monotonic()
            self._shown.wait()
            if self._is_stale() and not self._stop.is_set():
                self._wait_for_room()
                view = self._view
                self._seen = view, view.revision
                frame = self._build(view)
                self._shown.clear()
                if not self._post(frame) or isinstance(frame, Exception):
                    return
            # The making of a frame is part of its interval. On a machine that is too slow for the rate, half of the
            # time is left to those who fold what comes in.
            now = time.monotonic()
            due = max(due + self._interval_s, now + (now - begun))
            self._stop.wait(due - now)

    def _is_stale(self) -> bool:
        return (self._view, self._view.revision) != self._seen or self._builder.owes_ledger

    def _wait_for_room(self) -> None:
        """Or until the end."""
        self._shown.clear()
        if not self._stop.is_set() and not self._has_room(self._shown.set):
            self._shown.wait()

    def _build(self, view: View) -> Frame | Exception:
        try:
            return build_frame(view, self._builder)
        except Exception as error:
            return error
