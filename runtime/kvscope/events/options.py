"""Sampling options as a person types them: `n=2 max_tokens=64 temperature=0.8`.

One parser for the command line, the dashboard's prompt line and the control channel.
"""

import difflib
import re
from collections.abc import Mapping, Sequence

import msgspec

from kvscope.events.types import SamplingParams

OPTION_NAMES = tuple(SamplingParams.__struct_fields__)
_OPTION_WORD = re.compile(r"([A-Za-z_]+)=(.*)", re.DOTALL)
_LAST_WORD = re.compile(r"(?:^|\s)([A-Za-z_]+)=(\S*)$")
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_LIMITS: dict[str, tuple[float, float, str]] = {
    "n": (1, 64, "a whole number from 1 to 64"),
    "max_tokens": (1, 1 << 20, "a whole number from 1 to 1048576"),
    "temperature": (0.0, 100.0, "a number from 0 (greedy) to 100"),
    "top_k": (0, 1 << 24, "a whole number from 0 (keeps every token) to 16777216"),
    "top_p": (1e-6, 1.0, "a number above 0, up to 1"),
    "seed": (0, (1 << 63) - 1, f"a whole number from 0 to {(1 << 63) - 1}"),
    "beam_width": (1, 64, "a whole number from 1 (no beam search) to 64"),
    "length_penalty": (-10.0, 10.0, "a number from -10 to 10; above 0 favours long outputs"),
}
_REAL_NUMBERS = frozenset({"temperature", "top_p", "length_penalty"})
MAX_STOP_STRINGS = 16
MAX_TEXT = 256  # characters of a stop string or a salt; they stay in every snapshot


class OptionError(ValueError):
    """An option that cannot be used. The message is one line; `word` is the part that is wrong."""

    def __init__(self, message: str, word: str) -> None:
        super().__init__(message)
        self.word = word


def parse_options(words: Sequence[str], defaults: SamplingParams | None = None) -> SamplingParams:
    """`key=value` words on top of the defaults; `stop=` may be repeated.

    Raises:
        OptionError: not `key=value`, an unknown key, or a value outside its range.
    """
    values: dict[str, object] = {}
    for word in words:
        match = _OPTION_WORD.fullmatch(word)
        if match is None:
            raise OptionError(f"{word!r} is not key=value; options are {', '.join(OPTION_NAMES)}", word)
        name, text = match.groups()
        value = _parse_value(name, text, word)
        values[name] = (*_stops(values), text) if name == "stop" else value
    return make_params(values, defaults)


def make_params(values: Mapping[str, object], defaults: SamplingParams | None = None) -> SamplingParams:
    """Validated parameters from already typed values, as the control channel receives them.

    Raises:
        OptionError: an unknown name, a wrong type, or a value outside its range.
    """
    for name, value in values.items():
        if name not in OPTION_NAMES:
            raise OptionError(_unknown(name), str(name))
        _check_range(name, value, f"{name}={value}")
    base = defaults if defaults is not None else SamplingParams()
    try:
        params = msgspec.convert({**msgspec.structs.asdict(base), **values}, SamplingParams)
    except msgspec.ValidationError as error:
        raise OptionError(f"sampling options: {error}", "") from None
    _check_beam_search(params)
    return params


def split_prompt(line: str, defaults: SamplingParams | None = None) -> tuple[str, SamplingParams]:
    """A prompt line's text, and the options in its trailing `key=value` words.

    A trailing word counts as an option when its key is one, or must be meant as one: spelled nearly so, cut short, or
    right behind an option. Every other word is part of the prompt.

    Raises:
        OptionError: a misspelled key, or a value outside its range.
    """
    text = line.rstrip()
    words: list[str] = []
    while (match := _LAST_WORD.search(text)) is not None:
        name = match.group(1)
        if name not in OPTION_NAMES:
            if not _near(name, cutoff=0.75) and not _ends_with_option(text[: match.start()].rstrip()):
                break
            raise OptionError(_unknown(name), f"{name}={match.group(2)}")
        words.insert(0, f"{name}={match.group(2)}")
        text = text[: match.start()].rstrip()
    return text, parse_options(words, defaults)


def _parse_value(name: str, text: str, word: str) -> object:
    if name not in OPTION_NAMES:
        raise OptionError(_unknown(name), word)
    if name in ("stop", "cache_salt"):
        return text
    if name == "ignore_eos":
        if text.lower() not in _BOOLEANS:
            raise OptionError(f"{word!r}: ignore_eos is true or false", word)
        return _BOOLEANS[text.lower()]
    try:
        return float(text) if name in _REAL_NUMBERS else int(text)
    except ValueError:
        raise OptionError(f"{word!r}: {name} is {_LIMITS[name][2]}", word) from None


def _check_range(name: str, value: object, word: str) -> None:
    if name == "stop":
        stops = value if isinstance(value, list | tuple) else [value]
        if len(stops) > MAX_STOP_STRINGS or not all(isinstance(s, str) and 0 < len(s) <= MAX_TEXT for s in stops):
            raise OptionError(f"stop takes up to {MAX_STOP_STRINGS} strings of 1 to {MAX_TEXT} characters", word)
    if name == "cache_salt" and not (isinstance(value, str) and len(value) <= MAX_TEXT):
        raise OptionError(f"cache_salt is a text of up to {MAX_TEXT} characters", "cache_salt")
    if name not in _LIMITS or (name == "seed" and value is None):
        return
    low, high, words = _LIMITS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise OptionError(f"{word!r}: {name} is {words}", word)


def _check_beam_search(params: SamplingParams) -> None:
    """Beam search draws nothing and ends where the model says so; what contradicts that is refused."""
    if params.beam_width > 1 and params.n > 1:
        raise OptionError(f"n={params.n} cannot go with beam_width: the beams are the candidates", f"n={params.n}")
    if params.beam_width > 1 and params.stop:
        raise OptionError("stop cannot go with beam_width: beams end where the model ends", f"stop={params.stop[0]}")


def _stops(values: Mapping[str, object]) -> tuple[str, ...]:
    stops = values.get("stop", ())
    return stops if isinstance(stops, tuple) else ()


def _near(name: str, *, cutoff: float) -> list[str]:
    """The option that this is spelled nearly like, or is the beginning of."""
    longer = [option for option in OPTION_NAMES if len(name) > 2 and option.startswith(name)]
    return longer[:1] or difflib.get_close_matches(name, OPTION_NAMES, n=1, cutoff=cutoff)


def _ends_with_option(text: str) -> bool:
    match = _LAST_WORD.search(text)
    return match is not None and match.group(1) in OPTION_NAMES


def _unknown(name: str) -> str:
    near = _near(name, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"options are {', '.join(OPTION_NAMES)}"
    return f"unknown option {name!r}; {hint}"
