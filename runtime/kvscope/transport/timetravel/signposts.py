"""Where a step leads: the places before and after a moment. Pure lookups; None where there is nothing to go to."""

from bisect import bisect_left, bisect_right

from kvscope.events.notable import notable_places
from kvscope.transport.timetravel.survey import Survey
from kvscope.transport.timetravel.track import Place, TrackIndex
from kvscope.transport.timetravel.watch import Watch


class Signposts:
    """For a track and what its survey has found so far."""

    def __init__(self, index: TrackIndex, survey: Survey) -> None:
        self._index, self._survey = index, survey
        self.bookmarks: list[Place] = []  # in order
        self.looked_back: float | None = None

    def batch_back(self, here: Place) -> Place | None:
        """The start of the begun batch, else of the last one."""
        if here.event:
            return Place(here.position)
        return Place(here.position - 1) if here.position else None

    def event_back(self, here: Place) -> Place | None:
        """One event less; a batch without events counts as one."""
        if here.event:
            return Place(here.position, here.event - 1)
        if here.position == 0:
            return None
        before = here.position - 1
        return Place(before, max(self._index.num_events(before) - 1, 0))

    def engine_step(self, here: Place) -> Place | None:
        """The end of the engine step that comes next, or has begun."""
        if here.position >= len(self._index):
            return None
        return Place(self._index.after_step(self._index.steps[here.position]))

    def engine_step_back(self, here: Place) -> Place | None:
        """The start of the engine step that was applied last."""
        last = here.position if here.event else here.position - 1
        return Place(self._index.before_step(self._index.steps[last])) if last >= 0 else None

    def notable(self, here: Place) -> Place | None:
        """Just after the next event that stands out; a finding of the audit, or a bookmark, if that comes first."""
        marks = [self._survey.next_finding(here), *self.bookmarks[bisect_right(self.bookmarks, here) :][:1]]
        found = min((mark for mark in marks if mark is not None), default=None)
        last = len(self._index) - 1
        for position in range(here.position, (last if found is None else min(found.position, last)) + 1):
            places = [place for place in self._notable_in(position) if place > here]
            if places:
                return min(places[0], found or places[0])
        return found

    def notable_back(self, here: Place) -> Place | None:
        """The same, backwards."""
        marks = [self._survey.previous_finding(here), *self.bookmarks[: bisect_left(self.bookmarks, here)][-1:]]
        found = max((mark for mark in marks if mark is not None), default=None)
        first = 0 if found is None else max(found.position - 1, 0)
        for position in range(min(here.position, len(self._index) - 1), first - 1, -1):
            places = [place for place in self._notable_in(position) if place < here]
            if places:
                return max(places[-1], found or places[-1])
        return found

    def last_event(self, limit: Place, watch: Watch) -> Place | None:
        """Just after the last event that matches, no later than `limit`; `looked_back` tells how far it is."""
        first = min(limit.position, len(self._index) - 1)
        try:
            for position in range(first, -1, -1):
                self.looked_back = 1 - position / max(first, 1)
                found = self._last_event_in(position, limit, watch)
                if found is not None:
                    return found
            return None
        finally:
            self.looked_back = None

    def _last_event_in(self, position: int, limit: Place, watch: Watch) -> Place | None:
        if watch.needles and not self._index.mentions(position, watch.needles):
            return None
        events = self._index.batch(position).events
        for event in range(len(events) - 1, -1, -1):
            if watch.matches(events[event]) and (place := self.after_event(position, event)) <= limit:
                return place
        return None

    def _notable_in(self, position: int) -> list[Place]:
        kinds = self._survey.kinds
        if position < len(kinds) and not kinds[position]:
            return []
        batch = self._index.batch(position)
        return [self.after_event(position, event) for event in notable_places(batch)]

    def after_event(self, position: int, event: int) -> Place:
        """The moment just after event number `event` (from 0) of the batch after `position`."""
        return Place(position, event + 1) if event + 1 < self._index.num_events(position) else Place(position + 1)
