"""What a recording must fulfil, as a person types it: `max_held_blocks<=120`, `copies == 3`, `no_leak_at_end`.

assertion   quantity operator number | condition
operator    <= >= == != < >
number      a whole number from 0
"""

import difflib
import operator
import re
import tomllib
from collections.abc import Callable
from typing import NamedTuple

QUANTITIES = (
    "num_blocks",
    "max_held_blocks",
    "copies",
    "preemptions",
    "refusals",
    "evictions",
    "generated_tokens",
    "computed_tokens",
    "prefix_hit_tokens",
    "dropped_batches",
    "steps",
    "requests",
    "findings",
)
CONDITIONS = ("no_leak_at_end", "complete")
OPERATORS: dict[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
MAX_DIGITS = 18
_SHAPE = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(<=|>=|==|!=|<|>)\s*(\S.*?)\s*)?", re.DOTALL)
_NUMBER = re.compile(r"[0-9]+")


class AssertionSyntaxError(ValueError):
    """Not an assertion; one line that says what would be."""


class Comparison(NamedTuple):
    """`quantity operator limit`."""

    quantity: str
    operator: str
    limit: int

    def __str__(self) -> str:
        return f"{self.quantity}{self.operator}{self.limit}"

    def holds(self, actual: int) -> bool:
        return OPERATORS[self.operator](actual, self.limit)


class Condition(NamedTuple):
    """A name that stands for itself."""

    name: str

    def __str__(self) -> str:
        return self.name


Assertion = Comparison | Condition


def parse_assertion(text: str) -> Assertion:
    """Raises AssertionSyntaxError."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise AssertionSyntaxError(f"{text!r} is not an assertion; one is: max_held_blocks<=120")
    name, symbol, number = match.groups()
    if name in CONDITIONS:
        if symbol is not None:
            raise AssertionSyntaxError(f"{text!r}: {name} stands alone")
        return Condition(name)
    if name not in QUANTITIES:
        raise AssertionSyntaxError(f"{text!r}: {_unknown(name)}")
    if symbol is None:
        raise AssertionSyntaxError(f"{text!r} compares with nothing; an assertion is: {name}<=120")
    if _NUMBER.fullmatch(number) is None or len(number) > MAX_DIGITS:
        raise AssertionSyntaxError(f"{text!r}: {number!r} is not a whole number from 0")
    return Comparison(name, symbol, int(number))


def parse_rules(content: bytes) -> list[Assertion]:
    """The assertions of a rules file: TOML with one list, `assert = ["copies == 3", "no_leak_at_end"]`.

    Raises:
        AssertionSyntaxError: not such a file, or one of its assertions is not one.
    """
    try:
        fields = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AssertionSyntaxError(f"not TOML: {error}") from None
    unknown = [key for key in fields if key != "assert"]
    texts = fields.get("assert")
    if unknown:
        raise AssertionSyntaxError(f"unknown key {unknown[0]!r}; the one key is: assert")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise AssertionSyntaxError('it needs a list of strings: assert = ["copies == 3", "no_leak_at_end"]')
    return [parse_assertion(text) for text in texts]


def _unknown(name: str) -> str:
    known = (*QUANTITIES, *CONDITIONS)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"names are {', '.join(known)}"
    return f"nothing is called {name}; {hint}"
