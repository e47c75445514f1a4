"""Reading traces: our own CSV, Mooncake's JSON lines, and the CSVs of Azure's LLM inference traces.

    arrival_s,prompt_tokens,output_tokens,hash_ids             ours; hash_ids (may be missing): numbers, spaces between
    {"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": [..]}       a line each
    TIMESTAMP,ContextTokens,GeneratedTokens                                            dates and times, no hash ids

The format is told by the first line. Whatever is wrong is named with its file and line.
Sources: github.com/kvcache-ai/Mooncake (FAST25-release), github.com/Azure/AzurePublicDataset.
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import TextIO, TypeVar

import msgspec

from kvscope.engine.simulation.trace import MAX_TOKENS, Row, Trace, TraceError

OWN_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
AZURE_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")
MAX_LINE_CHARACTERS = 1 << 24
MAX_HASH_ID = (1 << 63) - 1
FORMATS = (
    "arrival_s,prompt_tokens,output_tokens[,hash_ids] (CSV), Mooncake's JSON lines, or "
    "TIMESTAMP,ContextTokens,GeneratedTokens (Azure's CSV)"
)


_HASH_IDS = "hash_ids are whole numbers with spaces between"
_Value = TypeVar("_Value")


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, *, chunk_size: int, max_requests: int | None = None) -> Trace:
    """Read and validate a whole file.

    Raises:
        TraceError: with the line that is wrong.
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8", newline="") as lines:
        return Trace(islice(_rows(lines, path), max_requests), str(path), chunk_size)


def _rows(lines: TextIO, path: Path) -> Iterator[Row]:
    number = 0
    try:
        for number, row in _numbered(lines):  # noqa: B007 - the handlers below name it
            yield _checked(row)
    except _LineError as error:
        raise TraceError(f"{path}:{error.number}: {error}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}:{number + 1}: not UTF-8 text, here or somewhat later") from None
    except ValueError as error:
        raise TraceError(f"{path}:{number}: {error}") from None


class _LineError(Exception):
    """A line that could not become a row."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def _numbered(lines: TextIO) -> Iterator[tuple[int, Row]]:
    """Rows with the numbers of their lines."""
    first = lines.readline(MAX_LINE_CHARACTERS).lstrip("\ufeff")
    if first.lstrip().startswith("{"):
        yield from _json_rows(chain([first], iter(lambda: lines.readline(MAX_LINE_CHARACTERS), "")))
        return
    header = [name.strip().lower() for name in first.strip().split(",")]
    parse = _csv_parser(header)
    reader = csv.reader(lines)
    while True:
        try:
            fields = next(reader, None)
            if fields is None:
                return
            if fields:
                yield reader.line_num + 1, parse(_all_of(fields, header))
        except UnicodeDecodeError:
            raise
        except (csv.Error, ValueError, OverflowError) as error:
            raise _LineError(reader.line_num + 1, str(error)) from None


def _all_of(fields: list[str], header: Sequence[str]) -> list[str]:
    """Raises ValueError when a field is missing or left over."""
    if len(fields) != len(header):
        raise ValueError(f"{len(fields)} fields under {len(header)} columns")
    return fields


def _json_rows(lines: Iterator[str]) -> Iterator[tuple[int, Row]]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(line) == MAX_LINE_CHARACTERS:
            raise _LineError(number, f"a line of more than {MAX_LINE_CHARACTERS:,} characters")
        try:
            found = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _LineError(number, str(error)) from None
        yield number, Row(found.timestamp / 1000, found.input_length, found.output_length, found.hash_ids)


def _csv_parser(header: Sequence[str]) -> Callable[[Sequence[str]], Row]:
    """How the fields under this header become a row."""
    if set(OWN_COLUMNS) <= set(header):
        arrival, prompt, output = (header.index(name) for name in OWN_COLUMNS)
        chunks = header.index("hash_ids") if "hash_ids" in header else None
        return lambda fields: Row(
            _parse(float, fields[arrival], "arrival_s is a number of seconds"),
            _parse(int, fields[prompt], "prompt_tokens is a whole number"),
            _parse(int, fields[output], "output_tokens is a whole number"),
            [_parse(int, word, _HASH_IDS) for word in fields[chunks].split()] if chunks is not None else (),
        )
    if set(AZURE_COLUMNS) <= set(header):
        arrival, prompt, output = (header.index(name) for name in AZURE_COLUMNS)
        return lambda fields: Row(
            _parse(_seconds, fields[arrival], "TIMESTAMP is a date and time"),
            _parse(int, fields[prompt], "ContextTokens is a whole number"),
            _parse(int, fields[output], "GeneratedTokens is a whole number"),
        )
    raise _LineError(1, f"not a trace; the first line tells its kind: {FORMATS}")


def _parse(kind: Callable[[str], _Value], text: str, rule: str) -> _Value:
    """Raises ValueError, with the column's name and what belongs there."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{rule}, not {text[:40]!r}") from None


def _seconds(text: str) -> float:
    """Of a date and time; without a zone it is UTC, as differences are all that counts."""
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _checked(row: Row) -> Row:
    """Raises ValueError when no engine could be given such a request."""
    if not math.isfinite(row.arrival_s):
        raise ValueError(f"the arrival is {row.arrival_s}, not a time")
    if not 1 <= row.num_prompt_tokens <= MAX_TOKENS:
        raise ValueError(f"a prompt of {row.num_prompt_tokens:,} tokens; 1 to {MAX_TOKENS:,} can be simulated")
    if not 0 <= row.num_output_tokens <= MAX_TOKENS:
        raise ValueError(f"an output of {row.num_output_tokens:,} tokens; 0 to {MAX_TOKENS:,} can be simulated")
    for hash_id in row.hash_ids:
        if not -MAX_HASH_ID <= hash_id <= MAX_HASH_ID:
            raise ValueError(f"the hash id {hash_id} has more than 64 bits")
    return row
