"""The campaigns that need no lab still run, at their smallest scale, so that nobody finds them broken when needed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import TIMEOUT_S, children_of, is_gone, wait_until

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


@pytest.mark.skipif(sys.platform != "linux", reason="the campaigns look at /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_campaign_that_is_ended_leaves_nobody_behind(how: signal.Signals, tmp_path: Path) -> None:
    """Not even a child that is stopped."""
    command = [sys.executable, HERE / "soak.py", "--minutes", "5"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as campaign:
        wait_until(lambda: sum(map(is_tied, children_of(campaign.pid))) == 3)
        family = children_of(campaign.pid)
        os.kill(family[-1], signal.SIGSTOP)
        campaign.send_signal(how)
        campaign.wait(TIMEOUT_S)
    wait_until(lambda: all(map(is_gone, family)))
    assert how is signal.SIGKILL or list(tmp_path.iterdir()) == []


def is_tied(pid: int) -> bool:
    """Whether a child of a campaign has come to its script: what ties it to its parent is done before."""
    return b"lab_" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1]
