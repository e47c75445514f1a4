"""Choosing a backend, and what that imports."""

import os
import subprocess
import sys

import pytest

from kvscope.kernels.backend import BACKEND_NAMES, check_block_size, get_backend


def run_python(code):
    """Run code in a fresh interpreter, without TRITON_INTERPRET; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_a_backend_knows_its_name(name):
    assert get_backend(name).name == name


def test_an_unknown_backend_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"'flash'.*reference, torch, numba, triton"):
        get_backend("flash")
    with pytest.raises(ValueError, match=r"'flash'.*reference, torch, numba, triton"):
        check_block_size("flash", 16)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 32, 256])
@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_powers_of_two_suit_every_backend(name, block_size):
    check_block_size(name, block_size)


@pytest.mark.parametrize("block_size", [5, 24, 512])
def test_other_block_sizes_suit_torch_but_not_triton(block_size):
    check_block_size("torch", block_size)
    check_block_size("reference", block_size)
    with pytest.raises(ValueError, match=f"power of two from 1 to 256, not {block_size}"):
        check_block_size("triton", block_size)


@pytest.mark.parametrize("block_size", [0, -16])
@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_a_block_has_a_slot(name, block_size):
    with pytest.raises(ValueError, match="at least 1"):
        check_block_size(name, block_size)


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_a_block_size_of_five_works(make_case, name):
    case = make_case([1, 6], [12, 11], block_size=5)
    output = get_backend(name).attention(case.query, case.key_cache, case.value_cache, case.batch, scale=case.scale)
    assert (output.double() - case.expected()).abs().max() < 3e-6


def test_triton_is_imported_for_its_own_backend_only():
    code = """
import sys
from kvscope.kernels.backend import get_backend
get_backend("reference"), get_backend("torch")
print([name for name in sys.modules if name.split(".")[0] in ("triton", "transformers")])
"""
    assert run_python(code).strip() == "[]"


ATTEND_ONE_TOKEN = """
import torch
from kvscope.kernels.backend import get_backend
from kvscope.kernels.batch import PagedBatch
backend = get_backend("triton")
one, cache = torch.ones(1, 1, 16), torch.zeros(1, 1, 4, 16)
slot = torch.zeros(1, dtype=torch.int64)
batch = PagedBatch(torch.tensor([0, 1]).int(), torch.tensor([1]).int(), torch.zeros(1, 1).int(), slot, 1, 1)
backend.write_kv(one, one, cache, cache, slot)
print(backend.attention(one, cache, cache, batch, scale=1.0).sum().item())
"""


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="the kernels are compiled where there is a GPU")
@pytest.mark.parametrize("before", ["", "import triton", "import triton.language, torch._inductor"])
def test_without_a_gpu_the_kernels_are_interpreted_whoever_imported_triton_first(before):
    code = f"{before}\n{ATTEND_ONE_TOKEN}\nimport os; print(os.environ.get('TRITON_INTERPRET'))"
    assert run_python(code).split() == ["16.0", "None"]


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="compiled kernels run where there is a GPU")
def test_kernels_imported_for_compilation_are_no_backend_without_a_gpu():
    code = """
import kvscope.kernels.triton_attention, kvscope.kernels.triton_cache
from kvscope.kernels.backend import get_backend
try:
    get_backend("triton")
except RuntimeError as error:
    print(error)
"""
    assert "no CUDA device" in run_python(code)
