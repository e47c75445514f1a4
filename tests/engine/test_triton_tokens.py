"""The Triton kernels, in Triton's interpreter, generate the tokens that the torch path generates.

In a process of its own: the interpreter is chosen when triton is imported.
"""

import json
import os
import subprocess
import sys

import pytest

PROMPTS = ["ROMEO:", "To be, or"]


def run(backend: str, *flags: str) -> dict[str, object]:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    command = [sys.executable, "-m", "kvscope.dashboard.cli", "run", "tiny-shakespeare", *prompts, "--json"]
    command += ["--attention-backend", backend, "--device", "cpu", *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    report: dict[str, object] = json.loads(result.stdout)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("block_size", ["4", "16"])
def test_interpreted_triton_generates_the_same_greedy_tokens(block_size: str) -> None:
    options = ["--block-size", block_size, "n=2", "max_tokens=10", "temperature=0", "ignore_eos=true"]
    expected, found = run("torch", *options), run("triton", *options)
    assert found["requests"] == expected["requests"]
    assert found["audit"] == {"ok": True, "findings": []}
