"""One whole number per block, side by side in memory: what the state keeps of a pool."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

if TYPE_CHECKING:
    _Integers = array[int]
else:
    _Integers = array


class Column(_Integers):
    """32-bit integers by physical block id: read and written as a list is, copied and counted as numpy does.

    A single element costs what it costs in a list (numpy: three times as much), which is what a fold does most;
    `numbers` is the same memory as a numpy array, for whoever looks at the whole pool. On the wire it is a list.
    `touched` has a 1 for each element that may have been written since the last look: who writes one, says so. It is no
    part of the value. Who looks from time to time puts flags of its own there: as long as they stand, it alone looks.

    Raises:
        OverflowError: a value does not fit into 32 bits.
    """

    touched: bytearray

    def __new__(cls, values: Iterable[int] = ()) -> Self:
        column: Self = super().__new__(cls, "i", values)  # type: ignore[assignment]  # typeshed forgets the subclass
        column.touched = _flags(len(column))
        return column

    @classmethod
    def zeros(cls, length: int) -> Self:
        return cls(array("i", bytes(4 * length)))

    @classmethod
    def of(cls, numbers: NDArray[np.integer[Any]]) -> Self:
        """A column of its own with these numbers. Raises OverflowError."""
        if numbers.dtype.itemsize > 4 and numbers.size and not -(1 << 31) <= numbers.min() <= numbers.max() < 1 << 31:
            raise OverflowError("a number does not fit into 32 bits")
        column = cls.zeros(len(numbers))
        column.numbers[:] = numbers
        return column

    @property
    def numbers(self) -> NDArray[np.int32]:
        """The same memory; not to be kept, since a column cannot grow while it is lent."""
        return np.asarray(self)

    def take_touched(self) -> NDArray[np.intp]:
        """Which elements may have been written since the last look, in order; the next one begins from here.

        Eight flags at a time: of a large pool hardly any is set. Of columns that are watched together, in any of them.
        """
        flags = np.frombuffer(self.touched, np.uint64)
        words = np.flatnonzero(flags != 0)
        rows, places = np.nonzero(flags[words].view(np.bool_).reshape(-1, 8))
        flags[words] = 0
        return words[rows] * 8 + places

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) if isinstance(other, array) else list(self) == other

    __hash__ = None

    def __copy__(self) -> "Column":
        return Column(self)

    def __deepcopy__(self, memo: Any) -> "Column":
        return Column(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Column, (self.tolist(),)


def watch(*columns: Column) -> bytearray:
    """Begin to look at columns of one length, at all of them at once: their new flags."""
    flags = _flags(len(columns[0]))
    for column in columns:
        column.touched = flags
    return flags


def _flags(length: int) -> bytearray:
    """One byte for each element, up to a whole number of words; at least one, for numpy does not look at nothing."""
    return bytearray(8 * (length // 8 + 1))


class LazyList(Sequence[T]):
    """A list that is made when somebody looks into it; of a few hundred prompts, most are never looked at."""

    def __init__(self, length: int, make: Callable[[], list[T]]) -> None:
        self._length, self._make = length, make

    @cached_property
    def _items(self) -> list[T]:
        return self._make()

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        return self._items[place]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, LazyList) else other)

    __hash__ = None  # type: ignore[assignment]


def column_to_list(value: Any) -> list[Any]:
    """The wire form (msgspec's `enc_hook`)."""
    if isinstance(value, Column):
        return value.tolist()
    if isinstance(value, LazyList):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} has no wire form")


def column_from_list(kind: type, value: Any) -> Any:
    """From the wire form (msgspec's `dec_hook`). Raises ValueError for what does not fit a column, or is none."""
    if kind is not Column:
        raise ValueError(f"{kind.__name__} has no wire form")
    try:
        return Column(msgspec.convert(value, list[int]))
    except OverflowError:
        raise ValueError("a number of a block does not fit into 32 bits") from None
