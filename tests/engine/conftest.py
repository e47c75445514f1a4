"""Models loaded once per session, engines built around them, and a fake runner for what needs no model."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may look beyond this machine
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the commands do: see wait_for_threads_asleep

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import platformdirs
import pytest
import torch

from kvscope.engine.block_tables import BlockCopy, Extent
from kvscope.engine.build import build_engine, prepare
from kvscope.engine.config import EngineConfig
from kvscope.engine.engine import Engine
from kvscope.engine.model_loader import LoadedModel, load_model
from kvscope.engine.sampler import choose_tokens, rank_tokens
from kvscope.engine.sinks import AuditSink
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.events.types import EngineInfo
from kvscope.kernels.backend import get_backend

SMOLLM2 = "smollm2-135m-instruct"


class Fixture:
    """An engine and the sink that has seen all of its events."""

    def __init__(self, engine: Engine, sink: AuditSink) -> None:
        self.engine, self.sink = engine, sink

    def check(self) -> None:
        """Invariants 1 to 3, 6 to 8: nothing found, and the fold is the engine's own state."""
        assert self.sink.auditor.findings == []
        assert self.engine.check_integrity() == []
        assert self.sink.auditor.state == self.engine.state()

    def states(self) -> Iterator[EngineState]:
        """The fold after each batch so far; one object that changes."""
        state = EngineState()
        for batch in self.sink.batches:
            state = apply_batch(state, batch)
            yield state

    def run(self, *, checked: bool = True) -> int:
        """Step until nothing is left to do; returns the number of steps."""
        steps = 0
        while self.engine.has_work():
            self.engine.step()
            steps += 1
            if checked:
                self.check()
        return steps


class FakeTokenizer:
    """Words are numbers: the prompt `3 1 4` is the tokens 3, 1, 4."""

    eos_token_id = 0

    def __call__(self, prompt: str) -> Any:
        return type("Encoding", (), {"input_ids": [int(word) for word in prompt.split()]})()

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(f" {token_id}" for token_id in token_ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return f" {token_id}"


class FakeRunner:
    """Logits that depend on the whole context and nothing else, without a model. Notes every step it was given.

    It also plays the KV cache: each written slot holds (token, position), copies move slots, and before the context
    is used it is read back through the block table; so a wrong table, a lost copy or an overwritten slot changes the
    output or fails at once.
    """

    VOCABULARY = 50
    num_graph_steps = 0

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None) -> None:
        """With a window, of an extent's context only what its tokens look back to is there to be read."""
        self.block_size, self.window = block_size, window
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.host: dict[tuple[int, int], tuple[int, int]] = {}
        self.steps: list[tuple[list[tuple[str, int, int]], list[BlockCopy]]] = []

    def run(self, extents: Sequence[Extent], copies: Sequence[BlockCopy]) -> dict[str, torch.Tensor]:
        self.steps.append(([(e.sequence.sequence_id, e.start, e.stop) for e in extents], list(copies)))
        for source, target in copies:
            for slot in range(self.block_size):
                self.slots.pop((target, slot), None)
                if (source, slot) in self.slots:
                    self.slots[target, slot] = self.slots[source, slot]
        for sequence, start, stop in extents:
            for position, token in enumerate(sequence.tokens(start, stop), start):
                self.slots[self._place(sequence, position)] = (token, position)
        logits = {}
        for sequence, start, stop in extents:
            context = [(token, position) for position, token in enumerate(sequence.tokens(0, stop))]
            first = max(start - self.window + 1, 0) if self.window is not None else 0
            read = [self.slots[self._place(sequence, position)] for position in range(first, stop)]
            assert read == context[first:]
            if stop == sequence.num_tokens:
                generator = torch.Generator().manual_seed(hash(tuple(context)) & 0x7FFFFFFF)
                logits[sequence.sequence_id] = torch.randn(self.VOCABULARY, generator=generator)
        return logits

    def swap(self, to_host: Sequence[BlockCopy], from_host: Sequence[BlockCopy]) -> None:
        for device, host in to_host:
            for slot in range(self.block_size):
                self.host.pop((host, slot), None)
                if (device, slot) in self.slots:
                    self.host[host, slot] = self.slots[device, slot]
        for host, device in from_host:
            for slot in range(self.block_size):
                self.slots.pop((device, slot), None)
                if (host, slot) in self.host:
                    self.slots[device, slot] = self.host[host, slot]

    def _place(self, sequence: Any, position: int) -> tuple[int, int]:
        place = position // self.block_size - sequence.num_released
        assert place >= 0, f"{sequence.sequence_id} reads position {position}, which it has given up"
        return sequence.block_table[place], position % self.block_size


def fake_info(**changes: Any) -> EngineInfo:
    values = {
        "name": "fake",
        "model": "fake",
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "fake",
        "block_size": 4,
        "num_blocks": 6,
        "bytes_per_block": 1024,
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_size": 16,
        "vocab_size": FakeRunner.VOCABULARY,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "seed": 0,
        "kvscope_version": "0",
        "prefix_caching": False,
    }
    return EngineInfo(**{**values, **changes})


@pytest.fixture
def fake_engine() -> Callable[..., Fixture]:
    """An engine without a model: `fake_engine(num_blocks=6, free_order=[...])`."""

    def build(free_order: Sequence[int] | None = None, eos: frozenset[int] = frozenset(), **changes: Any) -> Fixture:
        info, sink = fake_info(**changes), AuditSink(keep=True)
        runner = FakeRunner(info.num_blocks, info.block_size, info.sliding_window)
        engine = Engine(
            info,
            runner,
            FakeTokenizer(),
            sink,
            choose=choose_tokens,
            rank=rank_tokens,
            free_order=free_order,
            eos_token_ids=eos,
        )
        return Fixture(engine, sink)

    return build


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """The embedded model."""
    return load_model(EngineConfig(), get_backend("torch"))


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32, as `make models` leaves it in the cache directory."""
    if not (platformdirs.user_cache_path("kvscope") / "models" / SMOLLM2 / "config.json").is_file():
        pytest.skip("the SmolLM2 weights are not there: make models")
    return load_model(EngineConfig(model=SMOLLM2, dtype="float32"), get_backend("torch"))


@pytest.fixture
def real_engine() -> Callable[..., Fixture]:
    """An engine on a loaded model: `real_engine(tiny, block_size=4)`."""

    def build(loaded: LoadedModel, free_order: Sequence[int] | None = None, **flags: Any) -> Fixture:
        sink = AuditSink(keep=True)
        engine = build_engine(prepare(EngineConfig(**flags), loaded=loaded), sink, free_order=free_order)
        return Fixture(engine, sink)

    return build
