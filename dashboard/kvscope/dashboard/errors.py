"""How a command ends when something is wrong: one line on stderr, and an exit code that scripts can rely on."""

from enum import IntEnum

from kvscope.events.text import make_printable

INSTALL_ENGINE = "pip install '.[engine]', in a clone of kvscope"


class ExitCode(IntEnum):
    """2 is the user's to fix; 130 is what a shell shows for SIGINT."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    INTERRUPTED = 130


class CommandError(Exception):
    """A command cannot do what it was asked. The message is one line that says what to do instead."""

    def __init__(self, message: str, exit_code: int = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def one_line(error: Exception) -> str:
    """The error's message on one line; it may quote a file or an engine, so nothing in it reaches the terminal raw."""
    return make_printable(" ".join(str(error).split())) or type(error).__name__
