"""Commands around recordings and without a dashboard: `check`, `stats`, `diff`, `export`, `record`, `status`."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvscope.dashboard import flags
from kvscope.dashboard.errors import CommandError, ExitCode
from kvscope.dashboard.output import write_lines
from kvscope.dashboard.reading import open_files
from kvscope.events.text import make_printable

if TYPE_CHECKING:
    from kvscope.analysis.assertions import Assertion

MAX_RULES_BYTES = 1 << 20

File = Annotated[Path, typer.Argument(help="What --record wrote, whole or torn.", metavar="FILE", show_default=False)]
Files = Annotated[
    list[Path],
    typer.Argument(
        help="What --record wrote, whole or torn; several of one run, in order.", metavar="FILE...", show_default=False
    ),
]
Endpoint = Annotated[str | None, typer.Argument(help="Name, socket directory, or tcp://host:port.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def check(
    file: File,
    assertions: Annotated[
        list[str] | None,
        typer.Argument(
            help="More files of the run, then what must hold, quoted.", metavar="[ASSERTION]...", show_default=False
        ),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help='Assertions from a TOML file: assert = ["copies == 3"].', metavar="FILE.toml")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Audit a recording, and check what must hold. Exit code 1: a finding, or an assertion that fails.

    An assertion is NAME OPERATOR NUMBER, or a condition. Operators: <= >= == != < >

    Names: num_blocks, max_held_blocks (after any batch), copies, preemptions, refusals, evictions, generated_tokens,
    computed_tokens, prefix_hit_tokens, dropped_batches, steps, requests, findings.

    Conditions: no_leak_at_end (every held block belongs to an unfinished request), complete (nothing is missing).

    \b
    kvscope check run.mcap
    kvscope check run.mcap 'max_held_blocks<=120' 'preemptions==0' no_leak_at_end
    kvscope check run.mcap --rules rules.toml --json
    kvscope check run.0*.mcap complete
    """
    import msgspec

    from kvscope.analysis.check import check as check_recording
    from kvscope.analysis.check_text import check_lines

    words = assertions or []
    files = [file, *(Path(word) for word in takewhile(lambda word: Path(word).is_file(), words))]
    wanted = [*_read_rules(rules), *_parse(words[len(files) - 1 :])]
    report = check_recording(open_files(files), wanted)
    write_lines([msgspec.json.encode(report).decode()] if as_json else check_lines(report))
    return ExitCode.OK if report.ok else ExitCode.FAILURE


def stats(files: Files, as_json: AsJson = False) -> int:
    """Figures of a recorded run: time, tokens, pool use, waste, sharing, waiting.

    Means are over steps. Waste is what was reserved and unwritten once a step was done.

    \b
    kvscope stats run.mcap
    kvscope stats run.mcap --json | jq .pool.peak_held
    kvscope stats run.0*.mcap
    """
    import msgspec

    from kvscope.analysis.stats import measure
    from kvscope.analysis.stats_text import stats_lines

    figures = measure(open_files(files))
    write_lines([msgspec.json.encode(figures).decode()] if as_json else stats_lines(_shown(files), figures))
    return ExitCode.OK


def diff(
    a: Annotated[
        Path, typer.Argument(help="A recording; of a rotated one, its first file.", metavar="A", show_default=False)
    ],
    b: Annotated[Path, typer.Argument(help="Another one, of the same prompts.", metavar="B", show_default=False)],
    as_json: AsJson = False,
) -> int:
    """Compare two recordings, request by request and in total. Exit code 1: a token or a request differs.

    Requests are aligned by the token ids of their prompts and their options, in order; then by the prompts alone.
    Of a rotated recording name the first file: those that follow it are read too.

    \b
    kvscope diff cpu.mcap gpu.mcap
    kvscope diff blocks-of-4.mcap blocks-of-16.mcap --json
    kvscope diff monday.0001.mcap tuesday.0001.mcap
    """
    import msgspec

    from kvscope.analysis.diff import diff as diff_recordings
    from kvscope.analysis.diff_text import diff_lines
    from kvscope.transport.recording import files_of

    sides = files_of(a), files_of(b)
    difference = diff_recordings(*map(open_files, sides))
    lines = diff_lines(_shown(sides[0]), _shown(sides[1]), difference)
    write_lines([msgspec.json.encode(difference).decode()] if as_json else lines)
    return ExitCode.OK if difference.same else ExitCode.FAILURE


def export(
    files: Files,
    events: Annotated[bool, typer.Option("--events", help="JSON lines, one event per line.")] = False,
    pool: Annotated[bool, typer.Option("--pool", help="CSV, one row for the pool after each batch.")] = False,
    at: Annotated[
        str | None,
        typer.Option(help="The screen at a moment: start, end, step:412, seq:4211, time:12.5s.", metavar="MOMENT"),
    ] = None,
    size: Annotated[str, typer.Option(help="Of that screen, in columns and rows.", metavar="160x45")] = "120x36",
    ascii_only: flags.Ascii = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to; standard output unless given.", metavar="FILE")
    ] = None,
    force: flags.Force = False,
) -> int:
    """A recording as plain data: its events as JSON lines, its pool over time as CSV, or the screen at a moment.

    A screen is text, or a picture where -o ends in .svg.

    \b
    kvscope export run.mcap --events | jq 'select(.type == "block_copied")'
    kvscope export run.mcap --pool -o pool.csv
    kvscope export run.mcap --at step:412 --size 160x45 -o step-412.svg
    """
    from kvscope.analysis.export import event_lines, pool_rows

    if (events, pool, at is not None).count(True) != 1:
        raise CommandError("export needs one of --events, --pool and --at")
    for file in files:
        if output is not None and output.exists() and output.samefile(file):
            raise CommandError(f"{output} is the recording itself; choose another file for -o")
    if at is not None:
        return _export_screen(files, at, size, output, ascii_only=ascii_only, force=force)
    recording = open_files(files)
    write_lines(event_lines(recording) if events else pool_rows(recording), output, force=force)
    _tell_missing(files, recording.missing)
    return ExitCode.OK


def _export_screen(
    files: Sequence[Path], at: str, size: str, output: Path | None, *, ascii_only: bool, force: bool
) -> int:
    from kvscope.dashboard.still import draw_still, parse_moment, parse_size

    seek, cells = parse_moment(at), parse_size(size)
    track = open_files(files)
    as_svg = output is not None and output.suffix.lower() == ".svg"
    lines = draw_still(track, seek, cells, title=files[0].name, ascii_only=ascii_only, as_svg=as_svg)
    write_lines(lines, output, force=force)
    _tell_missing(files, track.missing)
    return ExitCode.OK


def _tell_missing(files: Sequence[Path], missing: str | None) -> None:
    if missing is not None:
        typer.echo(f"kvscope: {make_printable(str(files[-1]))} {missing}", err=True)


def _shown(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return make_printable(str(files[0])) + more


def record(
    output: Annotated[Path, typer.Option("--output", "-o", help="The recording.", metavar="FILE", show_default=False)],
    endpoint: Endpoint = None,
    record_max_size: flags.RecordMaxSize = None,
    force: flags.Force = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--for",
            parser=flags.number_within(0.1, 1_000_000_000),
            help="End by itself after this time, 0.1 or more.",
            metavar="SECONDS",
        ),
    ] = None,
    key: flags.Key = None,
    server_key: flags.ServerKey = None,
) -> int:
    """Record a running engine from outside; Ctrl-C ends the recording and says what was kept.

    It begins with the engine's state at that moment. What is lost on the way is fetched again, or marked.

    \b
    kvscope record -o run.mcap
    kvscope record demo-4711 -o run.mcap --for 60
    """
    from kvscope.dashboard import record as recording
    from kvscope.transport.discovery import resolve

    endpoints = resolve(endpoint, key=key, server_key=server_key)
    return recording.record(endpoints, output, force=force, seconds=seconds, max_bytes=record_max_size)


def status(
    endpoint: Endpoint = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state now and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per engine and line.")] = False,
    key: flags.Key = None,
    server_key: flags.ServerKey = None,
) -> int:
    """One line per running engine: blocks, requests, tokens per second. Every second until Ctrl-C.

    \b
    kvscope status
    kvscope status --once --json | jq .free
    """
    from kvscope.dashboard import status as engine_status

    return engine_status.status(endpoint, key=key, server_key=server_key, once=once, as_json=as_json)


def _parse(texts: Sequence[str]) -> "list[Assertion]":
    from kvscope.analysis.assertions import AssertionSyntaxError, parse_assertion

    try:
        return [parse_assertion(text) for text in texts]
    except AssertionSyntaxError as error:
        raise CommandError(str(error)) from None


def _read_rules(path: Path | None) -> "list[Assertion]":
    from kvscope.analysis.assertions import AssertionSyntaxError, parse_rules

    if path is None:
        return []
    with path.open("rb") as file:
        content = file.read(MAX_RULES_BYTES + 1)
    if len(content) > MAX_RULES_BYTES:
        raise CommandError(f"{path} is too long for a rules file; the limit is {MAX_RULES_BYTES:,} bytes")
    try:
        return parse_rules(content)
    except AssertionSyntaxError as error:
        raise CommandError(f"{path}: {error}") from None
