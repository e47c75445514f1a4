"""The campaigns that need no lab still run, at their smallest scale, so that nobody finds them broken when needed."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("script", "options", "row"),
    [
        ("fuzz_decoder.py", ("--inputs", "500"), "hostile   batch"),
        ("recordings.py", ("--flips", "5", "--kills", "0", "--every", "2000"), "bit flip"),
    ],
)
def test_smallest_scale_runs_clean(script: str, options: tuple[str, ...], row: str) -> None:
    command = [sys.executable, HERE / script, *options, "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert row in done.stdout
