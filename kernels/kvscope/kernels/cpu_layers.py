"""The compiled passes of `numba_layers` on torch tensors, shared out over the cores where there are many rows.

Tensors are float32 or bfloat16, all of one type, and contiguous along their last axis.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvscope.kernels.numba_layers import LayerFunctions, layer_functions
from kvscope.kernels.threads import even_stretches, share_out

DTYPES = (torch.float32, torch.bfloat16)
# Elements below which waking another core costs more than it brings.
MIN_ELEMENTS_PER_THREAD = 1 << 16


def functions_for(dtype: torch.dtype) -> LayerFunctions:
    """Compiled when first asked for."""
    return layer_functions(dtype == torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """`x [..., size]`, contiguous, scaled to a mean square of 1 along the last axis, times `offset + weight [size]`."""
    size, output = x.shape[-1], torch.empty_like(x)
    addresses = x.data_ptr(), weight.data_ptr(), output.data_ptr()
    _by_rows(functions_for(x.dtype).rms_norm, x.numel() // size, size, *addresses, size, epsilon, offset)
    return output


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, `[1, num_rows, size]`; both may be columns of wider rows."""
    _, num_rows, size = gate.shape
    output = torch.empty(gate.shape, dtype=gate.dtype)
    inputs = gate.data_ptr(), gate.stride(1), up.data_ptr(), up.stride(1)
    _by_rows(functions_for(gate.dtype).silu_and_multiply, num_rows, size, *inputs, output.data_ptr(), size)
    return output


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`x [1, num_heads, num_tokens, size]` turned by the angles of its tokens' positions, `[1, num_tokens, size]`.

    The result lies token by token, as attention reads it.
    """
    _, num_heads, num_tokens, size = x.shape
    output = torch.empty((1, num_tokens, num_heads, size), dtype=x.dtype)
    inputs = x.data_ptr(), x.stride(2), x.stride(1), cosines.data_ptr(), sines.data_ptr()
    rotation = functions_for(x.dtype).rotate
    _by_rows(rotation, num_tokens, num_heads * size, *inputs, output.data_ptr(), num_heads, size // 2)
    return output.transpose(1, 2)


def _by_rows(function: Callable[..., None], num_rows: int, row_size: int, *arguments: float) -> None:
    """Call the function for all rows, in stretches."""
    if num_rows * row_size < 2 * MIN_ELEMENTS_PER_THREAD:
        function(0, num_rows, *arguments)
        return
    stretches = even_stretches(num_rows, MIN_ELEMENTS_PER_THREAD // row_size)
    share_out(lambda _, first, last: function(first, last, *arguments), stretches)
