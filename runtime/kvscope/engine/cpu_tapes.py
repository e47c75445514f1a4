"""Decode steps on a CPU as tapes: what a forward pass calls, noted once per batch size, and done again without Python.

Between two multiplications a model's own code takes as long as the operations that it asks for. Nearly all of them are
compiled functions of addresses and numbers (`share_out`), and in the next step of as many sequences they are
the same: what differs lies in the buffer of `DecodeGraphs`. torch's operators in between are noted by a dispatch mode,
and are called again as well; those that only look at memory in another way need not be.

```
forward pass    embedding  angles | norm  multiply  rotate  write  attention  multiply  add  norm ... | logits
tape            torch             | one table of calls, run by one compiled loop                      | torch
```

What depends on values that Python has read cannot be noted. So a tape is run beside the forward pass twice, in the step
that it is of and in another one; if they differ by a bit, the forward pass is what will be run. So it is as soon as a
result has another shape than it had, since Python may have gone on by that.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvscope.engine.decode_graphs import Captured
from kvscope.kernels import cpu_layers
from kvscope.kernels.threads import Call, Program, recorded

MAX_TAPED_SEQS = 64  # with more, what lies between the multiplications matters less
NUM_COMPARED = 2  # replays: of the recorded step, and of another one
_ALIGNMENT = 64  # bytes: a cache line
_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}


class Operation(NamedTuple):
    """A call of one of torch's operators; without an output, one that writes into what it is given."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Tensor | None

    def run(self) -> None:
        """Do it again, with the result where it was. Raises ValueError: its shape depends on values."""
        found = self.function(*self.arguments, **self.options)
        if self.output is not None:
            if found.shape != self.output.shape:  # which may be what Python went on by
                raise ValueError(f"{self.function} gave {found.shape} after {self.output.shape}")
            self.output.copy_(found)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is called inside the block, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Call | Operation] = []
        self.made: dict[int, Tensor] = {}  # memory that is new, by its address; kept, so that none is used twice
        self.readable = True  # whether no value was handed to Python

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        output = function(*args, **options)
        outputs = tree_leaves(output)
        given = [value for value in tree_leaves((args, options)) if isinstance(value, Tensor) and not value.is_mkldnn]
        known = {_memory(tensor) for tensor in given}
        if function._schema.is_mutable:
            self.steps.append(Operation(function, args, options, None))
        elif not all(isinstance(tensor, Tensor) for tensor in outputs):
            self.readable = False
        elif any(_memory(tensor) not in known for tensor in outputs):
            self.readable &= len(outputs) == 1
            self.made[_memory(outputs[0])] = outputs[0]
            if _is_sum(function, args, options, outputs[0]):
                cpu_layers.add(args[0], args[1], outputs[0])  # which is noted like every call
            elif function._schema.name not in _ALLOCATIONS:
                self.steps.append(Operation(function, args, options, outputs[0]))
        return output


class Tape:
    """The steps of one forward pass, as `replay` of `Captured` does them again."""

    def __init__(self, forward: Callable[[], Tensor]) -> None:
        """Runs the forward pass once."""
        self._forward = forward
        self._num_replays = 0
        try:
            self._record()
        except Exception:  # whatever cannot be noted: an engine goes on without
            self.output, self.is_right = forward(), False
            self.num_bytes = self.output.nbytes

    def _record(self) -> None:
        recorder = Recorder()
        with recorder, recorded(recorder.steps.append):
            self.output = self._forward()
        self.is_right = recorder.readable
        self._arena = _share_memory(recorder, self.output)
        self.num_bytes = self._arena.nbytes + sum(made.untyped_storage().nbytes() for made in recorder.made.values())
        self._parts = list(_programs(recorder.steps))

    def replay(self) -> bool:
        """Leave in `output` what the forward pass would give now; whether without it."""
        self._num_replays += 1
        try:
            for part in self._parts if self.is_right else ():
                part.run()
        except ValueError:
            self.is_right = False
        if self._num_replays <= NUM_COMPARED or not self.is_right:
            expected = self._forward()
            self.is_right = self.is_right and torch.equal(expected, self.output)
            self.output.copy_(expected)
        return self.is_right


def record(forward: Callable[[], Tensor]) -> Captured:
    """What `DecodeGraphs` captures with on a CPU."""
    tape = Tape(forward)
    return Captured(tape.replay, tape.output, tape.num_bytes)


def _programs(steps: list[Call | Operation]) -> Iterator[Program | Operation]:
    """The same steps, with calls that follow each other as one."""
    for is_call, group in groupby(steps, lambda step: isinstance(step, Call)):
        if is_call:
            yield Program([step for step in group if isinstance(step, Call)])
        else:
            yield from (step for step in group if isinstance(step, Operation))


def _share_memory(recorder: Recorder, output: Tensor) -> Tensor:
    """Let results that only compiled calls use lie where earlier ones lay that are no longer needed.

    Changes the addresses in the calls; returns the memory that they now point into.
    """
    calls = [step for step in recorder.steps if isinstance(step, Call)]
    others = [step for step in recorder.steps if isinstance(step, Operation)]
    used = [value for value in tree_leaves((others, output)) if isinstance(value, Tensor) and not value.is_mkldnn]
    fixed = {_memory(tensor) for tensor in used}
    starts = sorted(recorder.made.keys() - fixed)
    sizes = [recorder.made[start].untyped_storage().nbytes() for start in starts]
    uses: dict[int, list[tuple[int, int]]] = {}  # (call, word), by the number of the memory
    for number, call in enumerate(calls):
        for place, word in enumerate(call.arguments):
            which = bisect_right(starts, word) - 1
            if which >= 0 and word < starts[which] + sizes[which]:
                uses.setdefault(which, []).append((number, place))
    placed: list[tuple[int, int, int]] = []  # (first byte, end, last call that uses it)
    offsets = {}
    for which, places in sorted(uses.items(), key=lambda use: use[1][0]):
        first, size = places[0][0], -(-sizes[which] // _ALIGNMENT) * _ALIGNMENT
        offset = 0
        for start, end, last in sorted(placed):
            if last >= first and start < offset + size and offset < end:
                offset = end
        placed.append((offset, offset + size, places[-1][0]))
        offsets[which] = offset
    arena = torch.empty(max((end for _, end, _ in placed), default=0) + _ALIGNMENT, dtype=torch.uint8)
    base = -(-arena.data_ptr() // _ALIGNMENT) * _ALIGNMENT
    for which, places in uses.items():
        for number, place in places:
            calls[number].arguments[place] += base + offsets[which] - starts[which]
    for start in starts:
        del recorder.made[start]
    return arena


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_sum(function: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> bool:
    """Whether `cpu_layers.add` gives the same."""
    if function is not torch.ops.aten.add.Tensor or options:
        return False
    return all(
        isinstance(given, Tensor)
        and given.shape == output.shape
        and given.dtype == output.dtype
        and given.dtype in cpu_layers.DTYPES
        and given.is_contiguous()
        for given in arguments
    )
