"""The end of a list that grows, as a value: who looks at it from time to time need not copy it."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar, overload

T = TypeVar("T")


class Tail(Sequence[T]):
    """The last `max_length` elements as they were. Those that came later share the list, and see further into it."""

    __slots__ = ("_all", "_max_length", "_start", "_stop")

    def __init__(self, elements: Sequence[T] = (), *, max_length: int) -> None:
        self._all = list(elements)
        self._max_length, self._stop = max_length, len(self._all)
        self._start = max(self._stop - max_length, 0)

    def followed_by(self, elements: Sequence[T]) -> "Tail[T]":
        """Itself with more at its end; what is too long ago leaves. One thread at a time."""
        if not elements:
            return self
        is_last = self._stop == len(self._all)
        if not is_last or self._start > self._max_length // 4:  # now and then, a list without what has left
            return Tail([*self, *elements], max_length=self._max_length)
        self._all += elements
        longer = Tail[T](max_length=self._max_length)
        longer._all, longer._stop = self._all, len(self._all)
        longer._start = max(longer._stop - self._max_length, 0)
        return longer

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._start, self._stop)[index]  # a negative one counts from our end, not from the list's
        return self._all[places] if isinstance(places, int) else [self._all[place] for place in places]

    def __iter__(self) -> Iterator[T]:
        return islice(self._all, self._start, self._stop)

    def __reversed__(self) -> Iterator[T]:
        return map(self._all.__getitem__, reversed(range(self._start, self._stop)))
