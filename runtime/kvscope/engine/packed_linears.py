"""Linear layers of a CPU with their weights laid out once in oneDNN's own order, instead of at every call.

Nothing is looked up by name: which linear layers read the same input (the projections to Q, K and V; gate and up) is
observed in one forward pass, and those become one multiplication. torch's operators for it are private ones: they are
tried out first, and where they are missing or wrong the model keeps its own layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvscope.kernels.blocked_weight import BlockedWeight, choose_max_rows, choose_num_threads
from kvscope.kernels.huge_pages import collapse

# Rows that oneDNN is told to expect. At 64 its order is as good for 1 and for 2,048 rows as one made for those.
EXPECTED_ROWS = 64
# A smaller weight is quicker as it is: a call of the operator takes 15 us more than torch's own.
MIN_ELEMENTS = 1 << 18


class Call(NamedTuple):
    """One call of a linear layer; the input is kept so that no later one can have its identity."""

    layer: nn.Linear
    input: Tensor


class HookFree(nn.Module):
    """A module that is its forward and nothing else: looking for hooks takes a tenth of what a step's layers take."""

    def __call__(self, *given: Any) -> Any:
        return self.forward(*given)


class PackedLinear(HookFree):
    """`nn.Linear` over a packed weight; for inference only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), EXPECTED_ROWS)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._blocked: BlockedWeight | None = None  # for as many rows as it is the faster for

    @property
    def weight(self) -> Tensor:
        """A copy in the usual order, for the odd model that looks at it."""
        weight: Tensor = self._packed.to_dense()
        return weight

    def memory(self) -> tuple[int, int]:
        """Address and number of bytes of the packed weight."""
        return torch.ops.mkldnn.data_ptr(self._packed), self._packed.numel() * self._packed.dtype.itemsize

    def read_in_place(self) -> BlockedWeight | None:
        """From now on multiply by our own function as far as it is faster; None where it finds another order."""
        shape, dtype = tuple(self._packed.shape), self._packed.dtype
        if not hasattr(torch.ops.mkldnn, "data_ptr") or not BlockedWeight.may_be(shape, dtype):
            return None
        blocked = BlockedWeight(self.memory()[0], shape, dtype, self.bias)
        rows = torch.rand(7, shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
        expected, found = self(rows).double(), blocked.multiply(rows).double()
        right = (found - expected).norm() <= max(1e-5, torch.finfo(dtype).eps) * expected.norm()
        self._blocked = blocked if right else None
        return self._blocked

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        if self._blocked is not None and self._blocked.takes(rows):
            return self._blocked.multiply(rows)
        if not rows.numel():  # a step in which no sequence chooses a token; the operator refuses it
            return rows.new_empty(*rows.shape[:-1], self._packed.shape[0])
        return self.operator(rows)

    def operator(self, rows: Tensor) -> Tensor:
        """The same by torch's operator, which takes any number of rows but none."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output


class _Shared:
    """Computes several layers at once when the first is called, and keeps the result until the last has taken its part.

    Serves one thread. An input is recognised by identity, which holds as long as nobody writes into it between two of
    the layers; the comparison of logits at load would tell.
    """

    def __init__(self, fused: PackedLinear, num_parts: int) -> None:
        self.fused = fused
        self._num_parts = num_parts
        self._waiting: set[int] = set()
        self._input: Tensor | None = None
        self._output: Tensor | None = None

    def part(self, index: int, rows: Tensor) -> Tensor:
        """The output of all layers, for the one of this index to take its part of."""
        if self._input is not rows or index not in self._waiting or self._output is None:
            self._input, self._output = rows, self.fused(rows)
            self._waiting = set(range(self._num_parts))
        output = self._output
        self._waiting.remove(index)
        if not self._waiting:
            self._input = self._output = None
        return output


class LinearPart(HookFree):
    """One of several linear layers that read the same input: columns `start:stop` of their common output."""

    def __init__(self, shared: _Shared, index: int, start: int, stop: int) -> None:
        super().__init__()
        self._shared, self._index, self._start, self._stop = shared, index, start, stop

    @property
    def weight(self) -> Tensor:
        """A copy in the usual order, for the odd model that looks at it."""
        return self._shared.fused.weight[self._start : self._stop]

    @property
    def bias(self) -> Tensor | None:
        bias = self._shared.fused.bias
        return None if bias is None else bias[self._start : self._stop]

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., in_features]` -> `[..., out_features]`, a view."""
        return self._shared.part(self._index, rows)[..., self._start : self._stop]


@contextmanager
def watch_linears(model: nn.Module) -> Iterator[list[Call]]:
    """Note every call of a plain linear layer inside the block, in order."""
    calls: list[Call] = []
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [
        layer.register_forward_pre_hook(lambda layer, given: calls.append(Call(layer, given[0]))) for layer in layers
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def pack_linears(model: nn.Module, calls: list[Call]) -> None:
    """Replace the linear layers that were called by packed ones, where that works and pays. Mutates the model."""
    names = {module: name for name, module in model.named_modules()}
    dtypes = {layer.weight.dtype for layer, _ in calls}
    usable = {dtype: operators_work(dtype) for dtype in dtypes}
    done: set[nn.Linear] = set()
    packed: list[PackedLinear] = []
    for layers in siblings(calls):
        weights = [layer.weight for layer in layers if layer not in done and usable[layer.weight.dtype]]
        if len(weights) == len(layers) and sum(weight.numel() for weight in weights) >= MIN_ELEMENTS:
            done.update(layers)
            fused, replacements = _packed(layers)
            packed.append(fused)
            for layer, replacement in zip(layers, replacements, strict=True):
                parent, _, attribute = names[layer].rpartition(".")
                setattr(model.get_submodule(parent), attribute, replacement)
    if hasattr(torch.ops.mkldnn, "data_ptr"):
        collapse(fused.memory() for fused in packed)
        with torch.inference_mode():
            operators = {blocked: fused.operator for fused in packed if (blocked := fused.read_in_place()) is not None}
            choose_num_threads(list(operators))
            choose_max_rows(operators)


def siblings(calls: list[Call]) -> list[list[nn.Linear]]:
    """Layers called one after the other with the very same input, in order; the others are alone."""
    groups = groupby(calls, lambda call: (id(call.input), call.layer.bias is None, call.layer.weight.dtype))
    return [list(dict.fromkeys(call.layer for call in group)) for _, group in groups]


def operators_work(dtype: torch.dtype) -> bool:
    """Whether torch's private operators are there, take this type, and multiply right on this machine."""
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.rand(shape, generator=generator).to(dtype) for shape in ((3, 32), (48, 32), (48,)))
    try:
        with torch.inference_mode():
            output = PackedLinear(weight, bias)(rows)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False
    return torch.allclose(output.float(), linear(rows.float(), weight.float(), bias.float()), rtol=2e-2, atol=1e-2)


def _packed(layers: list[nn.Linear]) -> tuple[PackedLinear, list[Any]]:
    """Their common multiplication, and their replacements in the same order."""
    if len(layers) == 1:
        alone = PackedLinear(layers[0].weight, layers[0].bias)
        return alone, [alone]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    fused = PackedLinear(torch.cat([layer.weight.detach() for layer in layers]), torch.cat(biases) if biases else None)
    shared = _Shared(fused, len(layers))
    parts, start = [], 0
    for index, layer in enumerate(layers):
        parts.append(LinearPart(shared, index, start, start + layer.out_features))
        start += layer.out_features
    return fused, parts
