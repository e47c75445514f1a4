"""The command line: reads arguments, builds the parts of a command, and turns every error into one line.

Heavy modules (torch above all) are imported inside the command that needs them: `kvscope --help` answers at once, and
`attach` and `replay` work without the engine's packages.
"""

import atexit
import contextlib
import errno
import gc
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvscope.dashboard import engine_commands, flags, recording_commands, simulation_command
from kvscope.dashboard.errors import CommandError, ExitCode, one_line
from kvscope.dashboard.terminal import YOUNG_OBJECTS
from kvscope.events.text import make_printable

app = typer.Typer(
    name="kvscope",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (
    engine_commands.demo,
    engine_commands.run,
    engine_commands.serve,
    simulation_command.simulate,
    recording_commands.record,
    recording_commands.check,
    recording_commands.stats,
    recording_commands.diff,
    recording_commands.export,
    recording_commands.status,
):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # loads the email package

        print(f"kvscope {importlib.metadata.version('kvscope')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _kvscope(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Watch the memory of a live paged-KV engine, block by block.

    \b
    kvscope demo                            a small model, and its blocks on the screen
    kvscope serve                           an engine to attach to
    kvscope attach                          the dashboard on it (over SSH: ssh -t HOST kvscope attach)
    kvscope run --prompt "To be" n=2        no dashboard: outputs and a memory summary
    kvscope simulate trace.jsonl            no model: scheduler and pool on a trace
    kvscope replay run.mcap                 a recorded run, again
    kvscope check run.mcap                  is anything wrong in it?
    kvscope doctor                          what this terminal and this machine offer
    kvscope settings                        theme, colours and keys of your own
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def attach(
    endpoint: Annotated[
        str | None, typer.Argument(help="Name, socket directory, tcp://host:port, or ssh://host; else the only one.")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Watch only: no prompts, no pausing.")] = False,
    key: flags.Key = None,
    server_key: flags.ServerKey = None,
    ascii_only: flags.Ascii = False,
    theme: flags.Theme = None,
    colors: flags.Colors = None,
    no_mouse: flags.NoMouse = False,
) -> int:
    """Open the dashboard on a running engine.

    \b
    kvscope attach                          the engine that runs here
    kvscope attach demo-4711                one of several, by name
    kvscope attach ssh://HOST               one on another machine: ssh://[user@]host[:port][/engine]
    ssh -t HOST kvscope attach              the same, drawn over there
    kvscope attach tcp://gpu:5557 --server-key gpu.key
    """
    from kvscope.dashboard import viewer
    from kvscope.dashboard.opening import ScreenFlags
    from kvscope.dashboard.ssh_tunnel import SCHEME
    from kvscope.transport.discovery import resolve

    screen = ScreenFlags(ascii_only, theme, colors, no_mouse)
    if endpoint is not None and endpoint.startswith(SCHEME):
        return viewer.attach_over_ssh(endpoint, screen, key=key, read_only=read_only)
    return viewer.attach(resolve(endpoint, key=key, server_key=server_key), screen, read_only=read_only)


@app.command()
def replay(
    recording: Annotated[
        list[Path],
        typer.Argument(
            help="What --record wrote; several of one run, in order.", metavar="FILE...", show_default=False
        ),
    ],
    ascii_only: flags.Ascii = False,
    theme: flags.Theme = None,
    colors: flags.Colors = None,
    no_mouse: flags.NoMouse = False,
) -> int:
    """Watch a recorded run again: play, pause, step."""
    from kvscope.dashboard import viewer
    from kvscope.dashboard.opening import ScreenFlags

    return viewer.replay(recording, ScreenFlags(ascii_only, theme, colors, no_mouse))


@app.command()
def settings(
    path: Annotated[bool, typer.Option("--path", help="Print where the file is looked for, and no more.")] = False,
    init: Annotated[bool, typer.Option("--init", help="Write it there, unless there is one.")] = False,
) -> int:
    """Print a settings file to start from: theme, colours, keys. All of it is commented out.

    Mistakes in the file you have are named on stderr; exit code 1 then.

    \b
    kvscope settings --init
    $EDITOR "$(kvscope settings --path)"
    """
    from kvscope.dashboard.settings import example_lines, load_settings, settings_path

    where = settings_path()
    notices = load_settings(where).notices
    if init:
        where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with where.open("x", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in example_lines(where))
    print(*([where] if path or init else example_lines(where)), sep="\n")
    for notice in notices:
        print(f"kvscope: {make_printable(notice)}", file=sys.stderr)
    return ExitCode.FAILURE if notices else ExitCode.OK


keys = typer.Typer(help="Keys for engines that other machines reach over TCP.", rich_markup_mode=None)
app.add_typer(keys, name="keys")


@keys.callback(invoke_without_command=True)
def _keys(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@keys.command(name="new")
def new_keys(
    name: Annotated[str, typer.Argument(help="What to call the two files.")] = "default",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to; your configuration directory unless set.", metavar="DIR")
    ] = None,
) -> int:
    """Make a pair of keys: NAME.key to give away, NAME.key_secret to keep.

    \b
    kvscope keys new                        once on each machine
    kvscope keys new alice --dir .
    """
    from kvscope.transport.keys import create_keys

    files = create_keys(name, directory)
    print(f"give away   {files.public}", f"keep        {files.secret}", sep="\n")
    return ExitCode.OK


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of checks instead of text.")] = False,
) -> int:
    """Say what this terminal and this machine offer, and how to mend what is missing. Exit code 1: something fails.

    \b
    kvscope doctor
    kvscope doctor --json | jq '.[] | select(.level != "ok")'
    """
    from kvscope.dashboard.doctor import examine, is_healthy, report_json, report_lines

    checks = examine()
    print(*([report_json(checks)] if as_json else report_lines(checks)), sep="\n")
    return ExitCode.OK if is_healthy(checks) else ExitCode.FAILURE


@app.command(name="list")
def list_running() -> int:
    """List your running engines."""
    from kvscope.dashboard import viewer

    lines = viewer.engine_lines()
    print(*lines or ["no engine is running; start one with: kvscope serve"], sep="\n")
    return ExitCode.OK


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command to its exit code. Errors that are the user's to fix become one line on stderr."""
    try:
        _interrupts_raise()
        result = typer.main.get_command(app).main(list(arguments), prog_name="kvscope", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return ExitCode.FAILURE  # quietly, as typer does where it writes itself
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            _discard_stdout()
            print("kvscope: cannot write the output: no space left", file=sys.stderr)
            return ExitCode.FAILURE
        if not _is_users(error):
            raise
        print(f"kvscope: {_message(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, CommandError) else ExitCode.USAGE
    return result if isinstance(result, int) else ExitCode.OK


def _interrupts_raise() -> None:
    """From here on Ctrl-C unwinds the stack; the entry point had it end the process."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_users(error: Exception) -> bool:
    """Whether the error is about what was asked, not about this program."""
    if isinstance(error, CommandError) or (isinstance(error, OSError) and error.filename is not None):
        return True
    from kvscope.events.options import OptionError
    from kvscope.transport.endpoints import EndpointError
    from kvscope.transport.recording import RecordingError

    usage_error = typer.BadParameter.__mro__[1]  # the base of all argument errors, in click and in typer's own copy
    return isinstance(error, OptionError | EndpointError | RecordingError | usage_error)


def _message(error: Exception) -> str:
    if isinstance(error, OSError):
        return one_line(CommandError(f"{error.filename}: {error.strerror}"))
    format_message = getattr(error, "format_message", None)  # an argument error, with the argument's name
    return one_line(CommandError(format_message()) if format_message is not None else error)


def _discard_stdout() -> None:
    """The reader has gone: let the interpreter's last flush go nowhere instead of failing."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run the process's own arguments. Python's warnings are for developers (python -W), not for users."""
    if sys.stdout is None:  # started with its output closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - for the life of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a narrow encoding must not end a run
    gc.set_threshold(YOUNG_OBJECTS)  # loading modules makes half a million objects, and no garbage
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    _leave(run_command_line(sys.argv[1:]))


def _leave(code: int) -> NoReturn:
    """Exit. Where torch is loaded, without the interpreter's last collection: it takes seconds and saves nothing."""
    if "torch" in sys.modules:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):  # a reader that has gone, or a closed stream
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
