"""KV in 8 bits: what K and V are divided by before they are stored, so that fp8 holds them.

`fp8_e4m3` (Micikevicius et al., "FP8 Formats for Deep Learning", 2022) has 4 bits of exponent and 3 of fraction: every
value from 2^-6 to 448 is stored to 1/16 of itself or better, whatever its size, and smaller ones to 2^-10. So a scale
only has to bring values into that range, and need not be exact: one power of two per layer, KV head, and of K and V,
from the largest value that the model's check at loading has written. Larger ones come to be 448.

The kernels know nothing of scales. A score is linear in K, so the query is multiplied instead; an output is linear in
V, so it is multiplied afterwards. Powers of two change no bit of either.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448
HEADROOM = 8.0  # how much larger than at loading values may become; below them 1,800 times smaller is still exact
MIN_SCALE = 2.0**-14  # the smallest that float16 has whole


class KvPeaks(NamedTuple):
    """The largest magnitude of each KV head of one layer, `[num_kv_heads]`."""

    keys: Tensor
    values: Tensor


class KvScales(NamedTuple):
    """What K and V of one layer are divided by, `[num_kv_heads, 1, 1]` in the model's dtype."""

    keys: Tensor
    values: Tensor

    def shrink(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three for kernels that store K and V in 8 bits; each is `[1, num_heads, num_tokens, head_size]`."""
        group_size = query.shape[1] // key.shape[1]
        return (
            query * self.keys.repeat_interleave(group_size, 0),
            (key / self.keys).clamp(-FP8_MAX, FP8_MAX),
            (value / self.values).clamp(-FP8_MAX, FP8_MAX),
        )

    def restore(self, output: Tensor) -> Tensor:
        """What attention gives for V itself; `[num_tokens, num_query_heads, value_size]`."""
        return output * self.values.repeat_interleave(output.shape[1] // len(self.values), 0)[:, 0]


def measure_peaks(keys: Tensor, values: Tensor) -> KvPeaks:
    """Of what caches `[num_blocks, num_kv_heads, block_size, head_size]` hold."""
    return KvPeaks(*(cache.abs().amax(dim=(0, 2, 3)).float() for cache in (keys, values)))


def choose_scales(peaks: KvPeaks, dtype: torch.dtype) -> KvScales:
    """Powers of two, so that `HEADROOM` times the peak can be stored."""
    return KvScales(*(_choose(peak).to(dtype)[:, None, None] for peak in peaks))


def _choose(peak: Tensor) -> Tensor:
    wanted = (peak * (HEADROOM / FP8_MAX)).clamp(min=MIN_SCALE)
    return torch.where(peak > 0, torch.exp2(torch.ceil(torch.log2(wanted))), torch.ones_like(peak))
