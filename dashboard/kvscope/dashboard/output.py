"""Where a command's lines go: standard output, or a file that is not overwritten unasked."""

import sys
from collections.abc import Iterable
from pathlib import Path

from kvscope.dashboard.errors import CommandError, ExitCode


def write_lines(lines: Iterable[str], path: Path | None = None, *, force: bool = False) -> None:
    """Write and flush.

    Raises:
        CommandError: the file exists (unless `force`), or it cannot be written.
        BrokenPipeError: the reader of standard output has gone.
    """
    try:
        if path is None:
            for line in lines:
                sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            return
        with path.open("w" if force else "x", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
    except BrokenPipeError:
        raise
    except FileExistsError:
        raise CommandError(f"{path} exists; add --force to overwrite it") from None
    except OSError as error:
        where = path if path is not None else "the output"
        raise CommandError(f"cannot write {where}: {error.strerror}", ExitCode.FAILURE if path is None else 2) from None
