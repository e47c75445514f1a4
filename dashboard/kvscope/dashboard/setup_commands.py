"""The commands about this machine and this user: settings, keys, and what is missing."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvscope.dashboard.errors import ExitCode
from kvscope.events.text import make_printable


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


keys = typer.Typer(help="Keys for engines that other machines reach over TCP.", rich_markup_mode=None)


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
