"""The commands that watch an engine or a recording: arguments in, a dashboard on a source."""

from pathlib import Path
from typing import Annotated

import typer

from kvscope.dashboard import flags
from kvscope.dashboard.errors import ExitCode


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


def list_running() -> int:
    """List your running engines."""
    from kvscope.dashboard import viewer

    lines = viewer.engine_lines()
    print(*lines or ["no engine is running; start one with: kvscope serve"], sep="\n")
    return ExitCode.OK
