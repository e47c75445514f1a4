"""The pool over time, as far as it was watched: one sample per picture, and samples folded into columns."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kvscope.dashboard.frames import Frame
from kvscope.events.types import EngineInfo

MAX_SAMPLES = 8_192
RATE_NS = 500_000_000  # what tokens are counted over, at least
MAX_UNSEEN_NS = 1_000_000_000  # a longer leap over steps that nobody looked at is a gap in the chart


class Sample(NamedTuple):
    """The slots of the whole pool by what they are, in the order in which they are stacked; and two rates."""

    time_ns: int
    step: int
    shared: int  # written, in blocks with ref count > 1
    written: int  # in blocks with one holder
    unwritten: int
    cached: int
    free: int
    generated_tokens: int  # of the engine's life
    step_ns: int  # how long the latest step took

    @property
    def layers(self) -> tuple[int, int, int, int, int]:
        return self.shared, self.written, self.unwritten, self.cached, self.free


class Series:
    """Samples by engine time. Going back in time loses none: a look at an earlier moment ends earlier."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._life: tuple[EngineInfo | None, bytes] = None, b""

    def observe(self, frame: Frame) -> None:
        """Add the picture's sample, unless its moment is known."""
        if (frame.info, frame.epoch) != self._life:
            self._life, self._samples = (frame.info, frame.epoch), []
        if frame.info is None or not frame.pool.num_blocks:
            return
        sample = take_sample(frame)
        place = bisect_left(self._samples, sample.time_ns, key=_time)
        if place < len(self._samples) and self._samples[place].time_ns == sample.time_ns:
            self._samples[place] = sample
        else:
            self._samples.insert(place, sample)
        if len(self._samples) > MAX_SAMPLES:
            del self._samples[0]

    def until(self, time_ns: int) -> Sequence[Sample]:
        return self._samples[: bisect_right(self._samples, time_ns, key=_time)]


def take_sample(frame: Frame) -> Sample:
    pool, size = frame.pool, frame.pool.block_size
    free = pool.num_blocks - pool.num_held - pool.num_cached
    return Sample(
        time_ns=frame.time_ns,
        step=frame.step,
        shared=pool.num_shared_slots,
        written=pool.num_written_slots - pool.num_shared_slots,
        unwritten=pool.num_wasted_slots,
        cached=pool.num_cached * size,
        free=free * size,
        generated_tokens=frame.counters.generated_tokens,
        step_ns=frame.step_elapsed_ns,
    )


class Column(NamedTuple):
    """One stretch of time: the state at its end, and the rates in it; None where nobody looked or nothing ran."""

    sample: Sample | None
    tokens_per_s: float | None
    step_ns: int | None


_UNSEEN = Column(None, None, None)


def fold_samples(samples: Sequence[Sample], width: int) -> list[Column]:
    """The watched time in `width` equal stretches.

    Between two looks that are close nothing else was to be seen, and the rates are those from the one to the other.
    """
    if len(samples) < 2 or width < 1:
        return [_UNSEEN] * max(width, 0)
    first, span = samples[0].time_ns, samples[-1].time_ns - samples[0].time_ns
    gaps = [(a.time_ns, b.time_ns) for a, b in pairwise(samples) if _is_gap(a, b)]
    columns: list[Column] = []
    start = 0
    for number in range(width):
        until_ns = first + span * (number + 1) // width
        stop = bisect_right(samples, until_ns, lo=start, key=_time)
        if stop > start:
            slowest = max((_step_ns(samples, place) for place in range(start, stop)), key=lambda ns: ns or 0)
            columns.append(Column(samples[stop - 1], _rate(samples, start, stop), slowest))
        elif any(a < until_ns < b for a, b in gaps):
            columns.append(_UNSEEN)
        else:
            columns.append(Column(samples[start - 1], _rate(samples, start, start + 1), _step_ns(samples, start)))
        start = stop
    return columns


def _rate(samples: Sequence[Sample], start: int, stop: int) -> float | None:
    """Tokens per second from a look before the stretch to the last one in it.

    The last look before, or an earlier one: tokens come all at once at the end of a step, and over the few
    milliseconds around that moment they would pass for a rate of many hundreds.
    """
    before = max(start - 1, 0)
    while before and samples[stop - 1].time_ns - samples[before].time_ns < RATE_NS:
        if _is_gap(samples[before - 1], samples[before]):
            break
        before -= 1
    if stop - 1 <= before or any(_is_gap(a, b) for a, b in pairwise(samples[before:stop])):
        return None
    earlier, later = samples[before], samples[stop - 1]
    return (later.generated_tokens - earlier.generated_tokens) * 1e9 / (later.time_ns - earlier.time_ns)


def _step_ns(samples: Sequence[Sample], place: int) -> int | None:
    """How long the latest step took, if it was not over at the look before."""
    now, before = samples[place], samples[place - 1] if place else None
    return None if before and (now.step, now.step_ns) == (before.step, before.step_ns) else now.step_ns


def _is_gap(earlier: Sample, later: Sample) -> bool:
    return later.time_ns - earlier.time_ns > MAX_UNSEEN_NS and later.step - earlier.step > 1


def _time(sample: Sample) -> int:
    return sample.time_ns
