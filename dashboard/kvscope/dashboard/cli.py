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
from typing import Annotated, NoReturn

import typer

from kvscope.dashboard import engine_commands, recording_commands, setup_commands, simulation_command, viewer_commands
from kvscope.dashboard.errors import CommandError, ExitCode, one_line
from kvscope.dashboard.terminal import YOUNG_OBJECTS

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
    viewer_commands.attach,
    viewer_commands.replay,
    setup_commands.settings,
    setup_commands.doctor,
):
    app.command()(command)
app.command(name="list")(viewer_commands.list_running)
app.add_typer(setup_commands.keys, name="keys")


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
