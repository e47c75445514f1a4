"""Writing a text in the user's own editor: `$VISUAL`, else `$EDITOR`, else vi."""

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvscope.events.text import make_printable

MAX_CHARACTERS = 1 << 20


class EditorError(Exception):
    """Why there is no new text, in one line."""


def edit_text(text: str) -> str:
    """What the user made of it. The terminal must be the editor's; the file is the user's alone, and goes away.

    Raises:
        EditorError: there is no editor, it cannot be started, it failed, or what it left cannot be read.
    """
    command = _command()
    try:
        descriptor, name = tempfile.mkstemp(prefix="kvscope-prompt-", suffix=".txt")  # mode 0600
    except OSError as error:
        raise EditorError(f"no temporary file for the editor: {error.strerror}") from None
    path = Path(name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - of a descriptor
            file.write(text)
        return _edited(command, path)
    finally:
        path.unlink(missing_ok=True)


def printable_lines(text: str) -> str:
    """The text with its line breaks; what a terminal would obey becomes visible."""
    return "\n".join(map(make_printable, text.splitlines()))


def _command() -> list[str]:
    named = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ("vi" if shutil.which("vi") else "")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise EditorError(f"VISUAL or EDITOR is no command line: {error}") from None
    if not command:
        raise EditorError("no editor: set VISUAL or EDITOR")
    return command


def _edited(command: list[str], path: Path) -> str:
    try:
        status = subprocess.run([*command, str(path)], check=False).returncode  # noqa: S603 - the user named it
        if status:
            raise EditorError(f"{command[0]} ended with status {status}; the prompt is as it was")
        with path.open(encoding="utf-8") as file:
            return printable_lines(file.read(MAX_CHARACTERS))
    except OSError as error:
        raise EditorError(f"{command[0]}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise EditorError(f"{command[0]} left a text that is not UTF-8; the prompt is as it was") from None
