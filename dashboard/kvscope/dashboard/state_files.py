"""Small files of the user's in the XDG state directory: one JSON value a line, readable by the user only."""

import os
from pathlib import Path

MAX_BYTES = 1 << 20  # of a file that is read; only its end counts


def read_lines(path: Path) -> list[bytes]:
    """The last lines, the first of which may be torn; none where there is no file that can be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - MAX_BYTES, 0))
            return file.read().splitlines()
    except OSError:
        return []


def append_line(path: Path, line: bytes) -> None:
    """At once, and never through a link. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:  # noqa: PTH123 - the mode
        os.fchmod(file.fileno(), 0o600)
        file.write(line + b"\n")
