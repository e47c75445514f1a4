"""Copies of a long column that changes in few places: where nobody holds an older copy, it is brought up to date."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_KEPT = 4  # the latest, one on the screen, and those that panes drawn less often still hold
MAX_CHANGED = 8  # with more than one element in so many changed, a copy of the whole is quicker


class _Kept:
    """A copy that was handed out, and where the column has changed since."""

    __slots__ = ("array", "missed", "num_missed")

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.num_missed = array, 0
        self.missed: list[NDArray[np.intp]] = []

    def miss(self, places: NDArray[np.intp]) -> None:
        self.missed.append(places)
        self.num_missed += len(places)

    def catch_up(self, column: NDArray[Any]) -> NDArray[Any]:
        for places in self.missed:
            self.array[places] = column[places]
        self.missed, self.num_missed = [], 0
        return self.array


def _num_references(kept: _Kept) -> int:
    return sys.getrefcount(kept.array)


_UNHELD = _num_references(_Kept(np.zeros(1)))  # of an array that is kept and nobody else's; slices count as well


class ColumnCopies:
    """What has been handed out of one column. An array that somebody holds, or a part of it, stays as it is."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def take(self, column: NDArray[Any], changed: NDArray[np.intp] | None = None) -> NDArray[Any]:
        """A copy of the column, which since the last one has changed in these places; None: it may be another one."""
        if changed is None:
            self._kept = []
        for kept in self._kept:
            kept.miss(changed)  # type: ignore[arg-type]  # nothing is kept where it is None
        self._kept = [kept for kept in self._kept if kept.num_missed * MAX_CHANGED <= len(column)]
        found = next((kept for kept in self._kept if _num_references(kept) == _UNHELD), None)
        if found is not None:
            return found.catch_up(column)
        copy = column.copy()
        self._kept = [*self._kept[1 - MAX_KEPT :], _Kept(copy)]
        return copy
