"""The compiled passes of `numba_layers` on torch tensors, shared out over the cores where there are many rows.

Tensors are float32 or bfloat16, all of one type, and contiguous along their last axis.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvscope.kernels.numba_layers import LayerFunctions, as_word, layer_functions
from kvscope.kernels.threads import share_out

DTYPES = (torch.float32, torch.bfloat16)
# Elements below which another core costs more than it brings; how many are taken at a time.
MIN_ELEMENTS_PER_THREAD = 1 << 13


def functions_for(dtype: torch.dtype) -> LayerFunctions:
    """Compiled when first asked for."""
    return layer_functions(dtype == torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """`x [..., size]`, contiguous, scaled to a mean square of 1 along the last axis, times `offset + weight [size]`."""
    size, output = x.shape[-1], torch.empty_like(x)
    addresses = x.data_ptr(), weight.data_ptr(), output.data_ptr()
    arguments = *addresses, size, as_word(epsilon), as_word(offset)
    by_rows(functions_for(x.dtype).rms_norm, arguments, x.numel() // size, size)
    return output


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, `[1, num_rows, size]`; both may be columns of wider rows."""
    _, num_rows, size = gate.shape
    output = torch.empty(gate.shape, dtype=gate.dtype)
    arguments = gate.data_ptr(), gate.stride(1), up.data_ptr(), up.stride(1), output.data_ptr(), size
    by_rows(functions_for(gate.dtype).silu_and_multiply, arguments, num_rows, size)
    return output


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`x [1, num_heads, num_tokens, size]` turned by the angles of its tokens' positions, `[1, num_tokens, size]`.

    The result lies token by token, as attention reads it.
    """
    _, num_heads, num_tokens, size = x.shape
    output = torch.empty((1, num_tokens, num_heads, size), dtype=x.dtype)
    inputs = x.data_ptr(), x.stride(2), x.stride(1), cosines.data_ptr(), sines.data_ptr()
    arguments = *inputs, output.data_ptr(), num_heads, size // 2
    by_rows(functions_for(x.dtype).rotate, arguments, num_tokens, num_heads * size)
    return output.transpose(1, 2)


def add(left: Tensor, right: Tensor, output: Tensor) -> None:
    """`left + right`, all contiguous and of one shape, into `output`."""
    size = left.shape[-1]
    arguments = left.data_ptr(), right.data_ptr(), output.data_ptr(), size
    by_rows(functions_for(left.dtype).add, arguments, left.numel() // size, size)


def by_rows(function: Any, arguments: Sequence[int], num_rows: int, row_size: int) -> None:
    """Call a function of `layer_functions` for all rows, by one thread where there are few."""
    num_threads = max(min(torch.get_num_threads(), num_rows * row_size // MIN_ELEMENTS_PER_THREAD), 1)
    grain = max(MIN_ELEMENTS_PER_THREAD // row_size, 1)
    share_out(function, arguments, num_rows, grain, num_threads)
