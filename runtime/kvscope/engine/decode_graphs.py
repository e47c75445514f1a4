"""Decode steps as CUDA graphs: the launches of a forward pass, captured once per batch size and replayed as one.

On a GPU the launches of a decode may take longer than its kernels. A graph repeats the same kernels with the same
numbers on the same addresses, so what changes from step to step lies in one buffer that stays where it is, filled by
one copy from pinned memory that nobody waits for. A batch is padded to the next size that was captured.

```
buffer   token ids | positions | slots | context lengths | block tables, one row each        `capacity` of each
row 0    a sequence
row 1    a sequence
row 2    padding: slot -1, a context of no positions: reads and writes nothing, and nobody reads its logits
```

Block copies, swapping and the choice of tokens stay outside, and so does a step in which a sequence has several tokens.

Not yet run on a device: the tests prove what the captured function does, and that it can be captured, not the capture.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvscope.engine.step_inputs import StepInputs
from kvscope.kernels.batch import PagedBatch

OFTEN = 3  # times that a batch size is met before it is captured, where not all are at the start
MAX_KEPT_BYTES = 1 << 27  # by those that are captured when met: those used last stay
MAX_BATCH_SIZE = 256  # larger batches are launched kernel by kernel


class Captured(NamedTuple):
    """A function that was captured: `replay` does again what it did then, which leaves its result in `output`."""

    replay: Callable[[], bool | None]  # False: by the function itself, which cannot be done again otherwise
    output: Tensor
    num_bytes: int = 0  # that it keeps, where that is known


Capture = Callable[[Callable[[], Tensor]], Captured]


class Forward(Protocol):
    """A forward pass over int64 `[num_tokens]` twice; returns logits, float32 `[num_tokens, vocab_size]`."""

    def __call__(self, token_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor: ...


class CudaCapture:
    """Captures into CUDA graphs that share one pool of memory, as no two of them run at once."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> Captured:
        """Run the function, which compiles its kernels and makes its workspaces; then capture it.

        Raises:
            RuntimeError: it waits for the device, or copies to or from memory that is not pinned.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = function()
        return Captured(graph.replay, output)


class DecodeInputs(NamedTuple):
    """What a decode reads, as parts of one buffer: int64 `[capacity]` thrice, int32 `[capacity]`, int32 tables."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    context_lengths: Tensor
    block_tables: Tensor


class DecodeGraphs:
    """The captured decodes of one model over one pool, and the buffer that they read."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        when_met: bool = False,
    ) -> None:
        """Captures all batch sizes that so many sequences need, each of at most `max_model_len` positions.

        Or each size, unpadded, when it has been met often enough.
        """
        self.num_replays = 0
        self._forward, self._capture = forward, capture
        sizes = [min(max_num_seqs, MAX_BATCH_SIZE)] if when_met else batch_sizes(max_num_seqs)
        self._capacity, self._max_blocks, self._max_context = sizes[-1], -(-max_model_len // block_size), max_model_len
        self._buffer = torch.zeros(self._length(self._capacity), dtype=torch.int64, device=device)
        self._inputs = self._parts(self._buffer)
        self._inputs.slot_mapping.fill_(-1)
        self._query_start = torch.arange(self._capacity + 1, dtype=torch.int32, device=device)
        # The largest first: what it took is there for the smaller ones.
        early = [] if when_met else sizes[::-1]
        self._captured = {size: capture(partial(self._decode, size)) for size in early}
        self._times_met: Counter[int] | None = Counter() if when_met else None

    def fits(self, step: StepInputs) -> bool:
        """Whether the step is a decode, and not larger than what was captured, or is to be."""
        num_seqs, num_blocks = step.block_tables.shape
        if step.max_query_length != 1 or num_seqs > self._capacity or num_blocks > self._max_blocks:
            return False
        if self._times_met is None:
            return True
        self._times_met[num_seqs] += 1
        return self._times_met[num_seqs] >= OFTEN

    def run(self, step: StepInputs) -> Tensor:
        """The logits of each sequence, float32 `[num_seqs, vocab_size]` on the device; valid until the next call."""
        host = self._on_host(step)
        self._buffer[: len(host)].copy_(host, non_blocking=True)
        if self._times_met is not None:
            self._meet(step.num_seqs, self._times_met)
        size = min(size for size in self._captured if size >= step.num_seqs)
        if self._captured[size].replay() is not False:
            self.num_replays += 1
        return self._captured[size].output[: step.num_seqs]

    def _meet(self, size: int, times_met: "Counter[int]") -> None:
        """Have this size captured, as the one that was used last."""
        captured = self._captured.pop(size, None) or self._capture(partial(self._decode, size))
        self._captured[size] = captured
        while len(self._captured) > 1 and sum(kept.num_bytes for kept in self._captured.values()) > MAX_KEPT_BYTES:
            oldest = next(iter(self._captured))
            del self._captured[oldest], times_met[oldest]

    def _decode(self, size: int) -> Tensor:
        """What is captured: reads nothing that changes from step to step but the buffer."""
        inputs = self._inputs
        batch = PagedBatch(
            query_start=self._query_start[: size + 1],
            context_lengths=inputs.context_lengths[:size],
            block_tables=inputs.block_tables[:size],
            slot_mapping=inputs.slot_mapping[:size],
            max_query_length=1,
            max_context_length=self._max_context,
        )
        return self._forward(inputs.token_ids[:size], inputs.positions[:size], batch)

    def _on_host(self, step: StepInputs) -> Tensor:
        """The front of a new buffer, up to the last sequence's table; torch reuses it when its copy has ended."""
        count, longest = step.block_tables.shape
        host = torch.empty(self._length(count), dtype=torch.int64, pin_memory=self._buffer.is_cuda)
        parts = self._parts(host)
        padded = (step.token_ids, 0), (step.positions, 0), (step.slot_mapping, -1), (step.context_lengths, 0)
        for part, (values, padding) in zip(parts, padded, strict=False):
            row = part.numpy()
            row[:count], row[count:] = values, padding
        parts.block_tables.numpy()[:count, :longest] = step.block_tables
        return host

    def _length(self, num_tables: int) -> int:
        """Of a buffer with so many block tables, in int64; two int32 take the room of one."""
        return 3 * self._capacity + -(-(self._capacity + num_tables * self._max_blocks) // 2)

    def _parts(self, buffer: Tensor) -> DecodeInputs:
        """Views of the buffer, or of the front of one."""
        capacity = self._capacity
        token_ids, positions, slot_mapping = buffer[: 3 * capacity].view(3, capacity)
        narrow = buffer[3 * capacity :].view(torch.int32)
        num_tables = (len(narrow) - capacity) // self._max_blocks
        tables = narrow[capacity : capacity + num_tables * self._max_blocks].view(num_tables, self._max_blocks)
        return DecodeInputs(token_ids, positions, slot_mapping, narrow[:capacity], tables)


def batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, and the multiples of 8, up to the first that holds them all."""
    sizes = [1, 2, 4, *range(8, MAX_BATCH_SIZE + 1, 8)]
    smaller = [size for size in sizes if size < max_num_seqs]
    return sizes[: len(smaller) + 1]
