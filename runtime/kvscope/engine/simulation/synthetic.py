"""A made-up trace, the same for the same seed: arrivals at random, lengths around a mean, beginnings in common."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from kvscope.engine.simulation.trace import MAX_TOKENS, Row, Trace, TraceError

LENGTH_SIGMA = 0.6  # of the logarithm; measured traces are wider, but few fit a small pool then
MAX_REQUESTS = 100_000_000


class Synthetic(msgspec.Struct, frozen=True, kw_only=True):
    """Means are of tokens; `rate` is requests per second, 0: all at once.

    With `prefixes` > 0 every prompt begins with one of that many chunks, the second half as popular as the first, the
    third a third as popular, and so on.
    """

    requests: int = 1_000
    rate: float = 10.0
    prompt: int = 512
    output: int = 128
    prefixes: int = 0
    seed: int = 0


def parse_synthetic(text: str) -> Synthetic:
    """`requests=1000 rate=20 ...` as the options of a synthetic trace.

    Raises:
        TraceError: an unknown option, or a value that cannot work.
    """
    kinds = {field.name: field.type for field in msgspec.structs.fields(Synthetic)}
    values: dict[str, int | float] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or name not in kinds:
            raise TraceError(f"--synthetic: {word} is not NAME=NUMBER with one of the names {', '.join(kinds)}")
        if name in values:
            raise TraceError(f"--synthetic: {name} is there twice")
        values[name] = _number(name, value, kinds[name])
    wanted = msgspec.convert(values, Synthetic)
    _check(wanted)
    return wanted


def _number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    """Raises TraceError: the text is no number of that kind."""
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        rule = "a whole number" if kind is int else "a number"
        raise TraceError(f"--synthetic: {name} is {rule}, not {text[:40]!r}") from None


def _check(wanted: Synthetic) -> None:
    for name, low, high in (
        ("requests", 1, MAX_REQUESTS),
        ("rate", 0, 1e9),
        ("prompt", 1, MAX_TOKENS // 16),
        ("output", 1, MAX_TOKENS // 16),
        ("prefixes", 0, 1 << 20),
        ("seed", 0, (1 << 63) - 1),
    ):
        if not low <= getattr(wanted, name) <= high:
            raise TraceError(f"--synthetic: {name} is from {low:,} to {int(high):,}, not {getattr(wanted, name)}")


def make_trace(wanted: Synthetic, chunk_size: int) -> Trace:
    """Draw all requests."""
    return Trace(_rows(wanted, chunk_size), "synthetic", chunk_size)


def _rows(wanted: Synthetic, chunk_size: int) -> Iterator[Row]:
    random = np.random.default_rng(wanted.seed)
    count = wanted.requests
    gaps = random.exponential(1 / wanted.rate, count) if wanted.rate else np.zeros(count)
    arrivals = np.cumsum(gaps).tolist()
    prompts, outputs = _lengths(random, wanted.prompt, count), _lengths(random, wanted.output, count)
    if not wanted.prefixes:
        yield from map(Row, arrivals, prompts, outputs)
        return
    popularity = 1 / np.arange(1, wanted.prefixes + 1)
    prefixes = random.choice(wanted.prefixes, count, p=popularity / popularity.sum()).tolist()
    for arrival, prompt, output, prefix in zip(arrivals, prompts, outputs, prefixes, strict=True):
        yield Row(arrival, prompt + chunk_size, output, (prefix,))


def _lengths(random: np.random.Generator, mean: int, count: int) -> Sequence[int]:
    """Log-normal around the mean, cut at 16 times of it."""
    drawn = random.lognormal(np.log(mean) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA, count)
    lengths: list[int] = np.clip(np.rint(drawn), 1, 16 * mean).astype(np.int64).tolist()
    return lengths
