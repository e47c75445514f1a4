"""The compiled small operations against torch's own, as models write them."""

import re

import pytest
import torch
from numba import types
from numba.core import event
from torch import Tensor
from torch.nn.functional import silu

from kvscope.kernels import cpu_layers, numba_layers
from kvscope.kernels.numba_layers import layer_functions

DTYPES = [torch.float32, torch.bfloat16]
NUM_ROWS = [0, 1, 3, 700]  # the last is shared out over threads


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch.manual_seed(3)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """In bfloat16 nearly all to the bit: where a sum's order puts a value just beside a tie, the next number."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1.6e-2 if found.dtype == torch.bfloat16 else 2e-6, atol=1e-6)
    if found.dtype == torch.bfloat16 and found.numel():
        assert (found == expected).double().mean() > 0.999


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(num_rows, dtype, offset):
    x, weight = (3 * torch.randn(1, num_rows, 200)).to(dtype), torch.rand(200).to(dtype)
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = weight * scaled.to(dtype) if not offset else (scaled * (1 + weight.float())).to(dtype)
    assert_same(cpu_layers.rms_norm(x, weight, 1e-5, offset), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_silu_and_multiply_columns_of_wider_rows(num_rows, dtype):
    both = (20 * torch.randn(1, num_rows, 460)).to(dtype)
    gate, up = both[..., 7:207], both[..., 230:430]
    assert_same(cpu_layers.silu_and_multiply(gate, up), silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", NUM_ROWS)
def test_rotate(num_tokens, dtype):
    x = torch.randn(1, num_tokens, 5 * 48 + 16).to(dtype)[..., 16:].view(1, num_tokens, 5, 48).transpose(1, 2)
    angles = torch.rand(1, num_tokens, 24).repeat(1, 1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    halves = torch.cat((-x[..., 24:], x[..., :24]), dim=-1)
    assert_same(cpu_layers.rotate(x, cosines, sines), x * cosines[:, None] + halves * sines[:, None])


def test_what_is_not_a_number_stays_so():
    x = torch.tensor([[[float("nan"), 1.0], [-float("nan"), 1.0]]])
    for rows in (x, x.bfloat16()):
        for result in (cpu_layers.silu_and_multiply(rows, rows), cpu_layers.rotate(rows[None], rows, rows)):
            assert result.isnan().any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 200])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_add(num_rows, size, dtype):
    left, right = torch.randn(2, 1, num_rows, size).to(dtype)
    output = torch.empty_like(left)
    cpu_layers.add(left, right, output)
    assert torch.equal(output, left + right)


@pytest.mark.parametrize("element", [types.float32, types.uint16])
@pytest.mark.parametrize("function", [numba_layers._add, numba_layers._silu_row])
def test_loops_become_vectors(function, element):
    """Asked of the compiler: nothing else tells but time."""
    array, n = types.Array(element, 1, "C"), types.int64
    signature = (n, n, array, array, array, n) if function is numba_layers._add else (array, array, array)
    function.compile(signature)
    assert re.search(r"= fadd [^=]*<\d+ x float>", function.inspect_llvm(signature))


@pytest.mark.parametrize("bfloat16", [False, True])
def test_what_was_compiled_once_is_found_on_disk(bfloat16):
    compiled = []

    class Listener(event.Listener):
        def on_start(self, event):
            compiled.append(event.data)

        def on_end(self, event): ...

    layer_functions(bfloat16)
    layer_functions.cache_clear()  # as another process would begin
    with event.install_listener("numba:compile", Listener()):
        layer_functions(bfloat16)
    assert compiled == []
