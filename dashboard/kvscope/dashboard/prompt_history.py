"""Prompts of earlier sessions: one JSON string a line, in the XDG state directory, readable by the user only."""

import contextlib
import json
import os
from pathlib import Path

import platformdirs

from kvscope.events.text import make_printable

MAX_PROMPTS = 500
MAX_BYTES = 1 << 20  # of the file that is read; only its end counts


def history_path() -> Path:
    return platformdirs.user_state_path("kvscope") / "prompts.jsonl"


class PromptHistory:
    """Reads once, appends at once. A file that cannot be used costs the memory, never the prompt."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[str]:
        """The last prompts, oldest first; lines that are none are skipped. What is in them is made printable."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - MAX_BYTES, 0))
                lines = file.read().splitlines()
        except OSError:
            return []
        prompts = [prompt for line in lines if (prompt := _parse(line)) is not None]
        if len(prompts) > 2 * MAX_PROMPTS:
            self._write(prompts[-MAX_PROMPTS:])
        return prompts[-MAX_PROMPTS:]

    def add(self, prompt: str) -> None:
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            with open(os.open(self._path, flags, 0o600), "wb") as file:  # noqa: PTH123 - the mode
                os.fchmod(file.fileno(), 0o600)
                file.write(f"{json.dumps(prompt)}\n".encode())

    def _write(self, prompts: list[str]) -> None:
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
                file.writelines(f"{json.dumps(prompt)}\n" for prompt in prompts)
            draft.replace(self._path)


def _parse(line: bytes) -> str | None:
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(prompt, str) or not prompt.strip():
        return None
    return "\n".join(make_printable(part) for part in prompt.splitlines())
