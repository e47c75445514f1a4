"""The small language of assertions: what it takes, what it refuses, and with which words."""

import pytest

from kvscope.analysis.assertions import (
    CONDITIONS,
    OPERATORS,
    QUANTITIES,
    AssertionSyntaxError,
    Comparison,
    Condition,
    parse_assertion,
    parse_rules,
)


@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("space", ["", " "])
def test_comparisons(name: str, operator: str, space: str) -> None:
    parsed = parse_assertion(f"{space}{name}{space}{operator}{space}120{space}")
    assert parsed == Comparison(name, operator, 120)
    assert parse_assertion(str(parsed)) == parsed


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions(name: str) -> None:
    assert parse_assertion(name) == Condition(name)
    with pytest.raises(AssertionSyntaxError, match="stands alone"):
        parse_assertion(f"{name}==1")


@pytest.mark.parametrize(
    ("symbol", "holding"),
    [("<=", (1, 2)), (">=", (2, 3)), ("==", (2,)), ("!=", (1, 3)), ("<", (1,)), (">", (3,))],
)
def test_operators(symbol: str, holding: tuple[int, ...]) -> None:
    comparison = Comparison("copies", symbol, 2)
    assert tuple(actual for actual in (1, 2, 3) if comparison.holds(actual)) == holding


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not an assertion"),
        ("copies=3", "is not an assertion"),
        ("copies===3", "not a whole number"),
        ("copies == 3 or True", "not a whole number"),
        ("copies==-1", "not a whole number"),
        ("copies==1.5", "not a whole number"),
        ("copies==١", "not a whole number"),
        ("copies==" + "9" * 5000, "not a whole number"),
        ("copies==", "is not an assertion"),
        ("copies", "compares with nothing"),
        ("3==copies", "is not an assertion"),
        ("copy==3", "did you mean copies"),
        ("held==3", "names are num_blocks"),
        ("__import__('os')==1", "is not an assertion"),
        ("no_leak", "did you mean no_leak_at_end"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(AssertionSyntaxError, match=words):
        parse_assertion(text)


def test_rules_file() -> None:
    content = b'assert = ["copies == 3",\n  "no_leak_at_end"]  # comments are fine\n'
    assert parse_rules(content) == [Comparison("copies", "==", 3), Condition("no_leak_at_end")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"assert = [", "not TOML"),
        (b"\xff", "not TOML"),
        (b"asserts = []", "unknown key 'asserts'"),
        (b"", "needs a list of strings"),
        (b'assert = "copies==3"', "needs a list of strings"),
        (b"assert = [3]", "needs a list of strings"),
        (b'assert = ["copy==3"]', "did you mean copies"),
        (b"a = " + b"[" * 3000, "not TOML"),
    ],
)
def test_rules_that_are_none(content: bytes, words: str) -> None:
    with pytest.raises(AssertionSyntaxError, match=words):
        parse_rules(content)
