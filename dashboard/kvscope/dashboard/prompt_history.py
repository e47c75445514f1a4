"""Prompts of earlier sessions: one JSON string a line, in the XDG state directory, readable by the user only."""

import contextlib
import json
import os
from pathlib import Path

import platformdirs

from kvscope.dashboard.state_files import append_line, read_lines
from kvscope.events.text import make_printable

MAX_PROMPTS = 500


def history_path() -> Path:
    return platformdirs.user_state_path("kvscope") / "prompts.jsonl"


class PromptHistory:
    """Reads once, appends at once. A file that cannot be used costs the memory, never the prompt."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[str]:
        """The last prompts, oldest first; lines that are none are skipped. What is in them is made printable."""
        prompts = [prompt for line in read_lines(self._path) if (prompt := _parse(line)) is not None]
        if len(prompts) > 2 * MAX_PROMPTS:
            self._write(prompts[-MAX_PROMPTS:])
        return prompts[-MAX_PROMPTS:]

    def add(self, prompt: str) -> None:
        with contextlib.suppress(OSError):
            append_line(self._path, json.dumps(prompt).encode())

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
