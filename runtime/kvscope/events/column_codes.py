"""One field of many events as a short MessagePack value, and back.

A column is one of

    [0, values]         one by one
    [1, value, count]   the same for all
    [2, number]         as column `number` of this batch; columns are counted as they end
    [3, column]         lists of one element each: these elements
    [4, number, plus]   whole numbers, each by `plus` more than in that column
    [5, type, bytes]    whole numbers as they lie in memory, of numpy's type b, h, i or q; each by the engine's step
                        more than here
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_REPEATED_CHARACTERS = 1 << 20  # of text that a batch says once and means many times
_CONSTANTS = (str, int, bool, type(None))  # not float: -0.0 equals 0.0
_TYPECODES = "bhiq"  # numpy's, by size
_MAX_PACKED_NUMBER = 1 << 62
_CONSTANT_KINDS = frozenset(_CONSTANTS)


class Code(IntEnum):
    """How a column is written."""

    VALUES = 0
    ALL = 1
    SAME = 2
    SINGLES = 3
    PLUS = 4
    STEPPING = 5


class ColumnError(ValueError):
    """Not a column, or not as long as it must be."""


class Singles(Sequence[list[Any]]):
    """Lists of one element each, made when somebody looks at one: `elements[i]` is the only one of list i."""

    def __init__(self, elements: list[Any]) -> None:
        self.elements = elements

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, place: Any) -> Any:
        return Singles(self.elements[place]) if isinstance(place, slice) else [self.elements[place]]

    def __iter__(self) -> Iterator[list[Any]]:
        return ([element] for element in self.elements)


Values = list[Any] | Singles | NDArray[np.int64]  # of one field


def pack_numbers(numbers: NDArray[Any]) -> tuple[str, bytes]:
    """With as few bytes for each as the largest needs."""
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    code = next(code for code in _TYPECODES if np.iinfo(code).min <= low <= high <= np.iinfo(code).max)
    return code, numbers.astype(code).tobytes()


def unpack_numbers(code: str, data: bytes) -> NDArray[np.int64]:
    """Raises ValueError."""
    if len(code) != 1 or code not in _TYPECODES:
        raise ValueError("unknown type of numbers")
    return np.frombuffer(data, code).astype(np.int64)


def as_list(values: Values) -> list[Any] | Singles:
    """With Python's own numbers."""
    return values.tolist() if isinstance(values, np.ndarray) else values


class ColumnWriter:
    """Writes the columns of one batch, of that step of the engine."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._known: list[tuple[set[type], list[Any]]] = []

    def write(self, values: list[Any], *, is_stepping: bool = False, is_sum: bool = False) -> list[Any]:
        """A short form; the caller does not change `values` later.

        With `is_stepping` they mostly grow by one with every step, as positions do: without the step they stay the
        same from batch to batch, which compresses to nothing. With `is_sum` they mostly are as much more than others.
        All other columns hold each of their values as it is: who looks for one may look for its bytes.
        """
        kinds = set(map(type, values))
        written = self._write(values, kinds, is_sum=is_sum)
        self._known.append((kinds, values))
        are_numbers = kinds == {int} and written[0] == Code.VALUES
        if is_stepping and are_numbers and max(map(abs, values)) <= _MAX_PACKED_NUMBER:
            return [Code.STEPPING, *pack_numbers(np.array(values, np.int64) - self._step)]
        return written

    def _write(self, values: list[Any], kinds: set[type], *, is_sum: bool) -> list[Any]:
        first = values[0]
        if len(kinds) == 1 and type(first) in _CONSTANTS and values.count(first) == len(values):
            return [Code.ALL, first, len(values)]
        if kinds == {list} and all(len(value) == 1 for value in values):
            return [Code.SINGLES, self.write([value[0] for value in values])]
        if kinds in ({str}, {int}):  # of one kind, so that what is equal is the same
            for number, known in enumerate(self._known):
                if known == (kinds, values):
                    return [Code.SAME, number]
        if is_sum and kinds == {int}:
            for number, (other_kinds, others) in enumerate(self._known):
                plus = values[0] - others[0] if other_kinds == kinds and len(others) == len(values) else None
                if plus is not None and all(value - other == plus for value, other in zip(values, others, strict=True)):
                    return [Code.PLUS, number, plus]
        return [Code.VALUES, values]


class ColumnReader:
    """Reads the columns of one batch, of that step; `clean` is applied to the values of each, once."""

    def __init__(self, step: int, clean: Callable[[list[Any]], list[Any]]) -> None:
        self._step, self._clean, self._known = step, clean, list[Values]()
        self._validated: dict[tuple[int, Any], Values] = {}  # by the number `id` of a column that is known
        self._constant: set[int] = set()  # the `id` of columns that say the same of all; they are known, too
        self._room = MAX_REPEATED_CHARACTERS

    def read(self, written: Any, count: int, *, is_inner: bool = False) -> Values:
        """`count` values, not to be changed. Raises ColumnError."""
        values: Values
        match written:
            case [Code.VALUES, list(found)]:
                values = self._clean(found)
            case [Code.ALL, str() | int() | None as value, int(length)] if length == count:
                values = self._repeated(self._clean([value]), count)
                self._constant.add(id(values))
            case [Code.SAME, int(number)] if 0 <= number < len(self._known):
                values = self._again(self._known[number])
            case [Code.SINGLES, inner] if not is_inner:
                values = Singles(self._elements(self.read(inner, count, is_inner=True)))
            case [Code.PLUS, int(number), int(plus)] if 0 <= number < len(self._known):
                values = self._add(self._known[number], plus)
            case [Code.STEPPING, str(code), bytes(data)]:
                values = unpack_numbers(code, data) + self._step
            case _:
                raise ColumnError("not a column")
        if len(values) != count:
            raise ColumnError(f"{len(values)} values for {count} events")
        self._known.append(values)
        return values

    def validated(self, values: Values, field_type: Any) -> Values:
        """A column that was read, as one of that type; the same one again for the same one.

        Raises msgspec.ValidationError, OverflowError.
        """
        key = id(values), field_type
        found = self._validated.get(key)
        if found is None:
            found = self._validated[key] = self._validate(values, field_type)
        return found

    def _validate(self, values: Values, field_type: Any) -> Values:
        if isinstance(values, np.ndarray):
            msgspec.convert([int(values.min()), int(values.max())], list[field_type])  # and so are all between
            return values
        if not isinstance(values, Singles):
            return self._converted(values, field_type)
        if get_origin(field_type) is not list:
            raise msgspec.ValidationError("lists where there should be none")
        return Singles(self._converted(values.elements, get_args(field_type)[0]))

    def _converted(self, values: list[Any], field_type: Any) -> list[Any]:
        if id(values) not in self._constant:
            return msgspec.convert(values, list[field_type])
        return msgspec.convert(values[:1], list[field_type]) * len(values)

    def _repeated(self, values: list[Any] | Singles, times: int = 1) -> Values:
        """A kilobyte of file must not become a gigabyte of state."""
        kinds = set(map(type, values))
        if not kinds <= _CONSTANT_KINDS:
            raise ColumnError("only text and numbers are said again")
        if str in kinds:
            texts = values if len(kinds) == 1 else [value for value in values if isinstance(value, str)]
            self._room -= sum(map(len, texts)) * times
        if self._room < 0:
            raise ColumnError("more text than a batch may hold")
        return values if times == 1 else list(values) * times

    @staticmethod
    def _elements(values: Values) -> list[Any]:
        values = as_list(values)
        return list(values) if isinstance(values, Singles) else values

    def _again(self, values: Values) -> Values:
        return values if isinstance(values, np.ndarray) else self._repeated(values)

    @staticmethod
    def _add(others: Values, plus: int) -> Values:
        if isinstance(others, np.ndarray):
            moved: NDArray[np.int64] = np.add(others, plus)
            return moved
        summands: Sequence[Any] = others
        try:
            return [other + plus for other in summands]
        except TypeError:
            raise ColumnError("only numbers can be added") from None
