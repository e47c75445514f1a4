"""An endless stream of block events on a large pool, for benchmarks/dashboard.py.

Long sequences hold half of the pool for good; short ones take blocks, write them and give them back in turns. Each
cell of the grid stands for `group` blocks of which exactly half are held for good, so one block more changes its shade.

    scattered   one block of every cell comes and goes, neighbouring cells have different owners: every line changes
    clustered   the blocks that come and go are a tenth of the pool side by side, owners are long stretches
"""

import random
from collections import deque
from collections.abc import Iterator

from kvscope.events import types as ev
from kvscope.events.types import Batch, EngineInfo, SamplingParams

BLOCK_SIZE, NUM_LONG, NUM_SHORT, BLOCKS_PER_SHORT = 16, 64, 256, 8
EPOCH = b"dashboard-bench!"


def make_info(num_blocks: int) -> EngineInfo:
    return EngineInfo(
        name="bench", model="none", device="cpu", dtype="float32", attention_backend="torch", block_size=BLOCK_SIZE,
        num_blocks=num_blocks, bytes_per_block=1 << 20, num_layers=4, num_kv_heads=2, head_size=32, vocab_size=1024,
        max_num_seqs=512, max_num_batched_tokens=8192, max_model_len=1 << 24, seed=0, kvscope_version="0",
    )  # fmt: skip


class Load:
    """Batches of a pool of `num_blocks`; `time_ns` of a batch is up to the caller."""

    def __init__(self, num_blocks: int, group: int, *, scattered: bool, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.num_blocks, self._scattered, self._group = num_blocks, scattered, group
        self.step = 0
        self._long, loose = self._share_out()
        self._random.shuffle(loose)
        self._free = deque(loose)
        self._blocks: dict[str, list[int]] = {f"s{number}.0": [] for number in range(NUM_SHORT)}
        self._turns = self._take_turns()

    def _share_out(self) -> tuple[list[list[int]], list[int]]:
        """The blocks of the long sequences, and those that come and go."""
        long: list[list[int]] = [[] for _ in range(NUM_LONG)]
        loose = []
        num_groups = self.num_blocks // self._group
        for number in range(num_groups):
            start = number * self._group
            half = start + self._group // 2
            owner = self._random.randrange(NUM_LONG) if self._scattered else number * NUM_LONG // num_groups
            long[owner] += range(start, half)
            if self._scattered:
                loose.append(half)
            elif number < num_groups // 10:
                loose += range(half, half + min(10, self._group - self._group // 2))
        return long, loose

    def begin(self, time_ns: int = 0) -> list[Batch]:
        """The engine starts, everybody is admitted, and the long sequences get their blocks."""
        events: list[ev.Event] = [ev.EngineStarted(wall_time_ns=1, schema_version=1, info=make_info(self.num_blocks))]
        names = [f"l{number}" for number in range(NUM_LONG)] + [name.removesuffix(".0") for name in self._blocks]
        for name in names:
            events.append(
                ev.RequestSubmitted(
                    request_id=name, prompt="a prompt", prompt_token_ids=[1, 2], prompt_pieces=["a", " prompt"],
                    params=SamplingParams(max_tokens=1 << 20),
                )
            )  # fmt: skip
            events.append(ev.RequestAdmitted(request_id=name))
        batches = [self._batch(events, time_ns)]
        for number, table in enumerate(self._long):
            name = f"l{number}.0"
            batches.append(
                self._batch(
                    [
                        ev.BlocksAllocated(sequence_id=name, first_logical_block=0, block_ids=table),
                        ev.SlotsWritten(sequence_id=name, start=0, stop=len(table) * BLOCK_SIZE),
                    ],
                    time_ns,
                )
            )
        return batches

    def next(self, num_block_events: int, time_ns: int = 0) -> Batch:
        """A batch of so many block events: a block reserved, written, or given back."""
        events: list[ev.Event] = []
        while num_block_events > 0:
            event, count = next(self._turns)
            events.append(event)
            num_block_events -= count
        return self._batch(events, time_ns)

    def _batch(self, events: list[ev.Event], time_ns: int) -> Batch:
        self.step += 1
        return Batch(epoch=EPOCH, step=self.step, phase="commit", time_ns=time_ns, events=tuple(events))

    def _take_turns(self) -> Iterator[tuple[ev.Event, int]]:
        """Short sequences grow block by block; one that is long enough gives its blocks back."""
        while True:
            for name, blocks in self._blocks.items():
                if len(blocks) >= BLOCKS_PER_SHORT or not self._free:
                    if blocks:
                        self._free += blocks
                        given = [*blocks]
                        yield ev.BlocksReleased(sequence_id=name, block_ids=given, freed_block_ids=given), len(given)
                        blocks.clear()
                    continue
                block_id = self._free.popleft()
                yield ev.BlocksAllocated(sequence_id=name, first_logical_block=len(blocks), block_ids=[block_id]), 1
                start = len(blocks) * BLOCK_SIZE
                blocks.append(block_id)
                yield ev.SlotsWritten(sequence_id=name, start=start, stop=start + BLOCK_SIZE), 1
