"""The kernels compile for GPUs that are not here."""

import json
import os
import subprocess
import sys

import pytest

# One shape per path: phases, element types, padded and large heads, blocks below and above the tile, variants.
COMPILE = """
import json, sys
from kvscope.kernels.aot import AttentionShape, compile_all
shapes = [
    AttentionShape(True, "bf16", 64, 16, num_splits=16),
    AttentionShape(True, "fp16", 128, 4, 128, True),
    AttentionShape(True, "fp32", 256, 32),
    AttentionShape(False, "bf16", 128, 4),
    AttentionShape(False, "fp16", 80, 128, 128, True),
    AttentionShape(False, "fp32", 64, 16, 128),
    AttentionShape(True, "bf16", 64, 16, cache="fp8e4nv"),
    AttentionShape(False, "bf16", 128, 16, cache="fp8e4nv"),
]
for done in compile_all([sys.argv[1]], shapes):
    row = done._asdict()
    if done.machine_code:
        row["machine_code"] = done.machine_code._replace(copy_bytes=sorted(done.machine_code.copy_bytes))._asdict()
    print(json.dumps(row))
"""
# Shared memory one program may use, in bytes: NVIDIA's tuning guides, AMD's CDNA 3 ISA.
FP8_TARGETS = ("sm_90", "sm_100")
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
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6 + 1 + 3 + (2 + 1) * (target in FP8_TARGETS)
    for row in rows:
        assert row["shared_bytes"] <= SHARED_LIMITS[target], row
        assert row["binary_bytes"] > 0, row
        if target != "gfx942":
            check_machine_code(row["kernel"], row["machine_code"])


def check_machine_code(kernel, code):
    """Nothing spills; K and V are loaded 16 bytes at a time; half precision is multiplied by the matrix units."""
    assert code["stack_bytes"] == 0, kernel
    if kernel.startswith("attention"):
        # Of 8-bit V, whose layout in shared memory is that of what it is multiplied as, a decode loads 8 bytes at once.
        assert code["copy_bytes"] == ([8, 16] if "decode" in kernel and "fp8" in kernel else [16]), kernel
        assert code["has_matrix_operations"] == ("fp32" not in kernel), kernel


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
