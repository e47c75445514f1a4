"""How often words change on the screen. Cells are seen at a glance; what has to be read need not change as often."""

import math

WORDS_PER_S = 10


class Cadence:
    """Which pictures bring words: the first one after a pause at once, of thirty a second every third."""

    def __init__(self, fps: int) -> None:
        self._interval_s, self._slack_s = max(fps // WORDS_PER_S, 1) / max(fps, 1), 0.5 / max(fps, 1)
        self._drawn_s = -math.inf

    def drawn(self, now_s: float) -> None:
        """Words have been drawn."""
        self._drawn_s = now_s

    def wait_s(self, now_s: float) -> float:
        """0: a picture that comes now brings words. Else they are drawn so much later, should no picture come by then.

        A picture may be half an interval of pictures early, and the wait ends half an interval late: so it is nearly
        always a picture that brings them, and seldom a timer.
        """
        passed_s = now_s - self._drawn_s
        return 0.0 if passed_s >= self._interval_s - self._slack_s else self._interval_s + self._slack_s - passed_s
