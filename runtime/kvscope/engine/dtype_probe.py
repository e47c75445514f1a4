"""Is bfloat16 the faster type on this CPU? Asked of the machine, with a layer of the model's own size.

With matrix units or AVX512_BF16 it halves the bytes and doubles the arithmetic; without, it is emulated, and loses.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvscope.engine.packed_linears import PackedLinear, operators_work
from kvscope.kernels.choices import remembered

DTYPES = torch.float32, torch.bfloat16
BUDGET_S = 0.05
NUM_ROWS = 16  # a step of as many sequences
MAX_ELEMENTS = 1 << 21  # of the weight: a part of a larger layer tells as much
NEEDED_GAIN = 1.15  # below, the more exact type is worth more


def typical_linear(model: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of the largest linear layer that is there more than once; of one on the meta device too."""
    shapes = [(layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)]
    repeated = [shape for shape in shapes if shapes.count(shape) > 1]
    return max(repeated or shapes, key=lambda shape: shape[0] * shape[1])


def faster_dtype(in_features: int, out_features: int) -> tuple[torch.dtype, dict[torch.dtype, float]]:
    """The type to compute such a layer in, and the milliseconds that either took when this was first asked here."""
    rows_of_weight = max(min(out_features, MAX_ELEMENTS // in_features), 1)
    question = f"milliseconds of a layer of {rows_of_weight} x {in_features}, by type"
    took = remembered(question, partial(_milliseconds, in_features, rows_of_weight))
    best = dict(zip(DTYPES, took, strict=True))
    gain = best[torch.float32] / best[torch.bfloat16]
    return torch.bfloat16 if gain >= NEEDED_GAIN else torch.float32, best


def _milliseconds(in_features: int, out_features: int) -> list[float]:
    """Of each type, the best of some turns."""
    layers = {dtype: _layer(in_features, out_features, dtype) for dtype in DTYPES}
    best = dict.fromkeys(layers, float("inf"))
    started, turns = time.perf_counter(), 0
    while turns < 3 or time.perf_counter() - started < BUDGET_S:
        turns += 1
        for dtype, layer in layers.items():
            begun = time.perf_counter()
            layer()
            best[dtype] = min(best[dtype], 1e3 * (time.perf_counter() - begun))
    return list(best.values())


def _layer(in_features: int, out_features: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """One multiplication as the engine does it in this type."""
    weight, rows = (
        torch.full((out_features, in_features), 0.5, dtype=dtype),
        torch.ones(NUM_ROWS, in_features, dtype=dtype),
    )
    multiply: Any = PackedLinear(weight, None) if operators_work(dtype) else lambda rows: linear(rows, weight)

    def run() -> Tensor:
        with torch.inference_mode():
            return multiply(rows)  # type: ignore[no-any-return]

    return run
