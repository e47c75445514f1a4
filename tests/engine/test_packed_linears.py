"""Packed linear layers compute what the model's own do, and only replace what they can."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kvscope.engine import packed_linears
from kvscope.engine.packed_linears import LinearPart, PackedLinear, pack_linears, watch_linears
from kvscope.kernels.blocked_weight import BlockedWeight


class Block(nn.Module):
    """Three projections of one input, two of another that differ in their bias, one alone."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 96, bias), nn.Linear(64, 32, bias), nn.Linear(64, 32, bias)
        self.gate, self.up = nn.Linear(160, 48, True), nn.Linear(160, 48, False)
        self.down = nn.Linear(48, 64, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)
        return self.down(torch.tanh(self.gate(joined)) * self.up(joined))


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linears, "MIN_ELEMENTS", 1)


def packed(model: nn.Module) -> Any:
    """A packed copy of the model."""
    model = copy.deepcopy(model)
    with torch.inference_mode(), watch_linears(model) as calls:
        model(torch.rand(1, 2, 64))
    pack_linears(model, calls)
    return model


needs_operators = pytest.mark.skipif(
    not packed_linears.operators_work(torch.float32), reason="this torch has no operators for packed weights"
)


@needs_operators
@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 200])
def test_equals_the_models_own_layers(num_rows: int, bias: bool) -> None:
    torch.manual_seed(1)
    model = Block(bias=bias)
    fast = packed(model)
    for rows in (torch.rand(1, num_rows, 64), torch.rand(num_rows, 2, 64).transpose(0, 1), torch.rand(num_rows, 64)):
        torch.testing.assert_close(fast(rows), model(rows), rtol=1e-5, atol=1e-6)


@needs_operators
@torch.inference_mode()
def test_layers_with_one_input_are_one_multiplication() -> None:
    fast = packed(Block(bias=True))
    assert isinstance(fast.q, LinearPart)
    assert fast.q._shared is fast.k._shared is fast.v._shared
    assert all(isinstance(layer, PackedLinear) for layer in (fast.gate, fast.up, fast.down))
    assert fast.k.weight.shape == (32, 64)
    assert fast.k.bias.shape == (32,)


@needs_operators
@torch.inference_mode()
def test_layers_of_one_shape_and_two_types() -> None:
    class TwoTypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(64, 64), nn.Linear(64, 64).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.down(x).bfloat16())

    torch.manual_seed(3)
    model, rows = TwoTypes(), torch.rand(1, 7, 64)
    torch.testing.assert_close(packed(model)(rows), model(rows), rtol=2e-2, atol=1e-2)


@needs_operators
@torch.inference_mode()
def test_a_part_never_answers_for_another_input() -> None:
    """Out of order, twice in a row, some parts never asked: what is kept from one input is not given for the next."""
    torch.manual_seed(2)
    model = Block(bias=False)
    fast = packed(model)
    first, second = torch.rand(3, 64), torch.rand(3, 64)
    for name, rows in [("k", first), ("q", second), ("q", second), ("v", first), ("k", second), ("k", first)]:
        torch.testing.assert_close(getattr(fast, name)(rows), getattr(model, name)(rows), rtol=1e-5, atol=1e-6)
    first.add_(1)
    for name in ("k", "k"):
        torch.testing.assert_close(getattr(fast, name)(first), getattr(model, name)(first), rtol=1e-5, atol=1e-6)


@needs_operators
def test_weights_and_biases_are_those_of_the_model() -> None:
    model = Block(bias=True)
    fast = packed(model)
    for name in ("q", "k", "v", "gate", "down"):
        assert getattr(fast, name).weight.equal(getattr(model, name).weight)
        assert getattr(fast, name).bias.equal(getattr(model, name).bias)


@needs_operators
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_are_multiplied_in_place(dtype: torch.dtype) -> None:
    """The order that oneDNN lays a weight out in is the expected one, or the weight is left to oneDNN."""
    if not packed_linears.operators_work(dtype):
        pytest.skip("oneDNN takes bfloat16 only with AVX512 or AVX_NE_CONVERT")
    torch.manual_seed(3)
    layer = nn.Linear(96, 192, dtype=dtype)
    fast = PackedLinear(layer.weight, layer.bias)
    rows = torch.randn(5, 96, dtype=dtype)
    before, blocked = fast(rows), fast.read_in_place()
    if blocked is not None:
        few = [fast(rows[i : i + 2]) for i in (0, 2)]
        torch.testing.assert_close(torch.cat(few), before[:4], rtol=1e-2, atol=1e-5)
    assert fast(rows).equal(before)


@needs_operators
def test_a_weight_in_another_order_is_left_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    right = BlockedWeight.multiply
    monkeypatch.setattr(BlockedWeight, "multiply", lambda self, rows: right(self, rows).roll(1, -1))
    layer = nn.Linear(96, 192)
    fast, rows = PackedLinear(layer.weight, layer.bias), torch.rand(1, 96)
    assert fast.read_in_place() is None
    torch.testing.assert_close(fast(rows), layer(rows), rtol=1e-5, atol=1e-6)


def test_without_the_operators_a_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(PackedLinear, "forward", missing)
    assert not any(isinstance(module, PackedLinear | LinearPart) for module in packed(Block(bias=True)).modules())


def test_an_operator_that_multiplies_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: right(self, rows) * 1.1)
    assert not packed_linears.operators_work(torch.float32)
