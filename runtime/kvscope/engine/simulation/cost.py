"""Time in a simulation: a clock that only moves when told, and a model of what a step costs.

    step = base + per_token x tokens computed + per_context_token x context tokens read

The base is reading the weights once, a token is its share of the matrix products, a context token is reading its KV:
the three terms of a decoder on one device. The defaults are an 8B model in bf16 (32 layers, 8 KV heads of 128) at
2 TB/s and 400 TFLOP/s: 16 GB / 2 TB/s = 8 ms, 16 GFLOP / 400 TFLOP/s = 40 us, 128 KiB / 2 TB/s = 66 ns. Nothing of
this was measured: a simulation is about memory, and its times are only as good as these three numbers.
"""

from collections.abc import Sequence

import msgspec

from kvscope.engine.block_tables import Extent

NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, BYTES_PER_VALUE = 32, 8, 128, 2
SWAP_BYTES_PER_S = 25e9  # PCIe 4.0 with 16 lanes carries about this much each way
BYTES_PER_SLOT = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_SIZE * BYTES_PER_VALUE  # K and V


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds; no layer looks back further than `window` positions, the token's own included."""

    base_ns: int = 8_000_000
    per_token_ns: int = 40_000
    per_context_token_ns: int = 66
    per_swapped_block_ns: int = 0
    window: int | None = None

    def of(self, extents: Sequence[Extent]) -> int:
        """What a step that computes these takes. An extent's context is every position up to its end, in the window."""
        num_tokens = sum(stop - start for _, start, stop in extents)
        num_context_tokens = sum(stop for _, _, stop in extents)
        if self.window is not None:
            num_context_tokens -= sum(max(start - self.window + 1, 0) for _, start, _ in extents)
        return self.base_ns + self.per_token_ns * num_tokens + self.per_context_token_ns * num_context_tokens

    def of_swap(self, num_blocks: int) -> int:
        """What moving these between device and host takes; the step waits for it."""
        return self.per_swapped_block_ns * num_blocks


class VirtualClock:
    """Calling it gives the time."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, elapsed_ns: int) -> None:
        self.now_ns += elapsed_ns

    def advance_to(self, moment_ns: int) -> None:
        """Nothing happens until then; a moment that has passed changes nothing."""
        self.now_ns = max(self.now_ns, moment_ns)
