"""The kernels compile for GPUs that are not here."""

import os
import subprocess
import sys

import pytest

# One shape per path: phases, element types, padded and large heads, blocks below and above the tile, variants.
COMPILE = """
import sys
from kvscope.kernels.aot import AttentionShape, compile_all
shapes = [
    AttentionShape(True, "bf16", 64, 16),
    AttentionShape(True, "fp16", 128, 4, 128, True),
    AttentionShape(True, "fp32", 256, 32),
    AttentionShape(False, "bf16", 64, 4),
    AttentionShape(False, "fp16", 80, 128, 128, True),
    AttentionShape(False, "fp32", 32, 16, 128),
]
for done in compile_all([sys.argv[1]], shapes):
    print(done.kernel, done.shared_bytes, done.binary_bytes, sep=",")
"""
# Shared memory one program may use, in bytes: NVIDIA's tuning guides, AMD's CDNA 3 ISA.
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_kernels_compile_and_fit(target, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, target], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(",") for line in done.stdout.splitlines()]
    assert len(rows) == 6 + 3
    for kernel, shared_bytes, binary_bytes in rows:
        assert int(shared_bytes) <= SHARED_LIMITS[target], kernel
        assert int(binary_bytes) > 0, kernel


def test_interpreted_kernels_are_not_compiled():
    code = """
from kvscope.kernels.aot import compile_all
try:
    next(compile_all())
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "interpreted in this process" in done.stdout
