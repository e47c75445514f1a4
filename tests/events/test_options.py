"""Options as they are typed: each one, its range, and what a slip is told."""

import pytest

from kvscope.events import types as ev
from kvscope.events.options import OptionError, make_params, parse_options, split_prompt


@pytest.mark.parametrize("name", ev.SamplingParams.__struct_fields__)
def test_every_option_can_be_typed(name: str) -> None:
    texts = {"ignore_eos": "true", "temperature": "0.5", "top_p": "0.5", "stop": "end", "cache_salt": "team1"}
    params = parse_options([f"{name}={texts.get(name, '2')}"])
    assert getattr(params, name) != getattr(ev.SamplingParams(), name)
    assert split_prompt(f"some text {name}={texts.get(name, '2')}") == ("some text", params)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("n=0", "n is a whole number from 1 to 64"),
        ("n=two", "n is a whole number from 1 to 64"),
        ("n=65", "n is a whole number from 1 to 64"),
        ("temperature=nan", "temperature is a number from 0"),
        ("temperature=inf", "temperature is a number from 0"),
        ("temperature=-1", "temperature is a number from 0"),
        ("top_p=0", "top_p is a number above 0"),
        ("top_p=nan", "top_p is a number above 0"),
        ("top_k=-1", "top_k is a whole number"),
        ("max_tokens=0", "max_tokens is a whole number from 1"),
        ("seed=-1", "seed is a whole number from 0"),
        ("ignore_eos=perhaps", "ignore_eos is true or false"),
        ("stop=", "1 to 256 characters"),
        ("maxtokens=3", "did you mean max_tokens?"),
        ("banana=3", "options are n, max_tokens"),
        ("just-a-word", "is not key=value"),
        ("cache_salt=" + "x" * 257, "up to 256 characters"),
    ],
)
def test_a_wrong_option_says_what_is_right(word: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options([word])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stop_string_may_hold_line_breaks() -> None:
    assert parse_options(["stop=\n\n"]).stop == ("\n\n",)
    assert parse_options(["stop=the\n"]).stop == ("the\n",)


def test_stop_strings_may_be_repeated() -> None:
    assert parse_options(["stop=a", "stop=b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        ("x=1 y=2", "x=1 y=2", []),  # not our keys: part of the prompt
        ("n=2", "", ["n=2"]),
        ("what is n=2 here", "what is n=2 here", []),  # only at the end
        ("  spaces  n=2  seed=3 ", "  spaces", ["n=2", "seed=3"]),
    ],
)
def test_only_trailing_options_leave_the_prompt(line: str, text: str, words: list[str]) -> None:
    assert split_prompt(line) == (text, parse_options(words))


@pytest.mark.parametrize(
    ("line", "message", "word"),
    [
        ("some text temprature=1", "did you mean temperature", "temprature=1"),
        ("some text n=3 temp=2", "did you mean temperature", "temp=2"),
        ("temp=2 n=3", "did you mean temperature", "temp=2"),
        ("some text n=3 best=2", "unknown option 'best'", "best=2"),
    ],
)
def test_what_must_be_meant_as_an_option_is_no_part_of_the_prompt(line: str, message: str, word: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        split_prompt(line)
    assert caught.value.word == word


@pytest.mark.parametrize("values", [{"n": True}, {"n": "2"}, {"n": 1.5}, {"stop": 3}, {"what": 1}, {"cache_salt": 5}])
def test_wrong_types_from_the_control_channel(values: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        make_params(values)
