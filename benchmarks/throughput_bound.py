"""What the linear layers alone would allow: a bound for any engine that uses the same multiplications here."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from throughput_peers import Job

from kvscope.engine.packed_linears import LinearPart, PackedLinear

PEAK_SIZE = 2048  # of the square matrices whose product counts as the machine's peak
COPIED_BYTES = 1 << 28


class LinearsAlone:
    """A competitor that does the linear layers of the same jobs, each token's once, all there at once, nothing else.

    No attention, norms, Python between layers, scheduling or sampling; rows of logits only where a token is chosen.
    """

    def __init__(self, model: Any) -> None:
        """Of a model of the engine's: its layers are packed already."""
        modules = [module for module in model.modules() if isinstance(module, PackedLinear | LinearPart)]
        packed = [module._shared.fused if isinstance(module, LinearPart) else module for module in modules]
        self._head = model.get_output_embeddings()
        self._head_size = self._head.weight.shape[1]  # here: of a packed layer it is a copy
        self._layers = [layer for layer in dict.fromkeys(packed) if layer is not self._head]
        self._dtype = model.dtype

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Tokens of the right number, all of them 0."""
        self.step(sum(len(job.prompt) for job in jobs), len(jobs))
        for number in range(1, max(job.new_tokens for job in jobs)):
            going_on = sum(job.new_tokens > number for job in jobs)
            self.step(going_on, going_on)
        return [[0] * job.new_tokens for job in jobs]

    def step(self, num_tokens: int, num_chosen: int) -> None:
        """The multiplications of a step of so many tokens, of which so many get a row of logits."""
        inputs = {size: torch.ones(1, num_tokens, size, dtype=self._dtype) for size in self._input_sizes()}
        for layer in self._layers:
            layer(inputs[layer._packed.shape[1]])
        self._head(torch.ones(1, num_chosen, self._head_size, dtype=self._dtype))

    def _input_sizes(self) -> set[int]:
        return {layer._packed.shape[1] for layer in self._layers}


@torch.inference_mode()
def describe_machine(dtype: torch.dtype, clock: Callable[[], float] = time.perf_counter) -> str:
    """GFLOP/s of one large product, packed or not, and GB/s of one large copy, read and written: the best of some."""
    matrix = torch.full((PEAK_SIZE, PEAK_SIZE), 0.5, dtype=dtype)
    packed, source = PackedLinear(matrix, None), torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    seconds = min(_best(lambda: matrix @ matrix, clock), _best(lambda: packed(matrix), clock))
    bandwidth = 2 * COPIED_BYTES / _best(lambda: target.copy_(source), clock)
    return (
        f"machine: {2 * PEAK_SIZE**3 / seconds / 1e9:.0f} GFLOP/s in one product, {bandwidth / 1e9:.0f} GB/s in a copy"
    )


def _best(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(4):
        started = clock()
        work()
        times.append(clock() - started)
    return min(times)
