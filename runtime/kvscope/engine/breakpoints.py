"""Breakpoints: what the engine is to pause at, and whether the events just recorded contain it."""

from collections.abc import Iterable

from kvscope.engine.block_pool import BlockPool
from kvscope.events.notable import BREAKPOINTS
from kvscope.events.state import Breakpoints
from kvscope.events.types import Event


class BreakpointWatch:
    """Looks at every phase's events, and remembers the first thing it was told to look for.

    Free blocks are watched at the ends of phases, and for falling: a pool that is below the limit already must rise
    above it first. Cached ones count as free, because they can be handed out. With nothing set, a look is one
    comparison.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._hit: str | None = None
        self.change(Breakpoints())

    def change(self, wanted: Breakpoints) -> None:
        """Look for these from now on, and forget what was found."""
        self.wanted, self._hit = wanted, None
        self._names = {BREAKPOINTS[name]: name for name in wanted.events}
        self._is_set = bool(wanted.events) or wanted.free_below is not None
        self._was_below = self._is_below()

    def look(self, events: Iterable[Event], step: int) -> None:
        """Call it with each phase's events, before anything else happens."""
        if not self._is_set:
            return
        was_below, self._was_below = self._was_below, self._is_below()
        if self._hit is not None:
            return
        name = next((self._names[type(event)] for event in events if type(event) in self._names), None)
        if name is None and self._was_below and not was_below:
            name = f"{self._pool.num_available_blocks} free blocks, below {self.wanted.free_below},"
        self._hit = None if name is None else f"{name} at step {step}"

    def take_hit(self) -> str | None:
        """What was found since the last call, in words."""
        hit, self._hit = self._hit, None
        return hit

    def _is_below(self) -> bool:
        free_below = self.wanted.free_below
        return free_below is not None and self._pool.num_available_blocks < free_below
