"""--cuda-graphs, all but the capture itself: a tape on the CPU holds the steps that a CUDA graph would hold."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves

from kvscope.engine import build, model_loader
from kvscope.engine.attention import PAGED_ATTENTION, register
from kvscope.engine.block_tables import Extent
from kvscope.engine.build import check_cuda_graphs, prepare
from kvscope.engine.config import ConfigError, EngineConfig
from kvscope.engine.decode_graphs import Captured, batch_sizes
from kvscope.engine.kv_scales import KvScales
from kvscope.engine.model_checks import observe_layers
from kvscope.engine.model_loader import LoadedModel, load_model
from kvscope.engine.model_runner import ModelRunner
from kvscope.engine.report import text_report
from kvscope.engine.request import Sequence
from kvscope.engine.service import EngineService
from kvscope.engine.step_inputs import pack_inputs
from kvscope.events.types import SamplingParams
from kvscope.kernels.backend import get_backend
from kvscope.kernels.triton_tiles import Splits

from . import tape
from .conftest import fake_info
from .test_architectures import RUNS, SMALL, save

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 200, 40
ONE_HEAD = {**SMALL, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def runner_of(config: Any, backend: Any, **options: Any) -> ModelRunner:
    """A random model as transformers made it, on a pool that holds nothing but NaN."""
    register()
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    layers = observe_layers(model)
    model.set_attn_implementation(PAGED_ATTENTION)
    runner = ModelRunner(model, layers, backend, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **options)
    for tensor in tensors_of(runner):
        tensor.fill_(float("nan"))
    return runner


def tensors_of(runner: ModelRunner) -> list[torch.Tensor]:
    return [tensor for cache in runner.caches.values() for tensor in cache]


def decode_of(runner: ModelRunner, lengths: list[int], seed: int) -> list[Extent]:
    """One token each of sequences of these lengths; what they have read before is random, every other slot is NaN."""
    random = torch.Generator().manual_seed(seed)
    free = torch.randperm(NUM_BLOCKS, generator=random).tolist()
    extents = []
    for tensor in tensors_of(runner):
        tensor.fill_(float("nan"))
    for number, length in enumerate(lengths):
        sequence = Sequence(f"s{number}.0", 0, torch.randint(1, 1000, (length,), generator=random).tolist())
        sequence.block_table = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        extents.append(Extent(sequence, length - 1, length))
        for position, tensor in product(range(length - 1), tensors_of(runner)):
            row = tensor[sequence.block_table[position // BLOCK_SIZE], :, position % BLOCK_SIZE]
            row.copy_(torch.randn(row.shape, generator=random))
    return extents


def step_both_ways(runner: ModelRunner, extents: list[Extent]) -> None:
    """The captured step gives the logits of the eager one, and writes the slots that the eager one writes, no other."""
    graphs, before = runner.graphs, [tensor.clone() for tensor in tensors_of(runner)]
    assert graphs is not None
    runner.graphs = None
    expected = runner.run(extents, [])
    after = [tensor.clone() for tensor in tensors_of(runner)]
    for tensor, old in zip(tensors_of(runner), before, strict=True):
        tensor.copy_(old)
    runner.graphs, replays = graphs, graphs.num_replays
    model, runner.model = runner.model, None  # what was captured needs no Python of it
    found = runner.run(extents, [])
    runner.model = model
    assert graphs.num_replays == replays + 1
    assert found.keys() == expected.keys()
    for name, row in expected.items():
        torch.testing.assert_close(found[name], row, rtol=0, atol=1e-4)
    for tensor, eager, old in zip(tensors_of(runner), after, before, strict=True):
        written = bits(eager) != bits(old)
        assert written.any()
        assert torch.equal(bits(tensor)[~written], bits(old)[~written])
        torch.testing.assert_close(tensor.float()[written], eager.float()[written], rtol=0.13, atol=1e-5)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 4: torch.int32}[tensor.itemsize])


def lengths_of(count: int) -> list[int]:
    return [1 + (7 * number + count) % MAX_MODEL_LEN for number in range(count)]


def test_every_batch_size_from_one_tape_each() -> None:
    """Sizes and contents change from step to step, upwards and downwards; a step says nothing about the next one."""
    runner = runner_of(transformers.LlamaConfig(**ONE_HEAD), tape.DeviceOnly())
    runner.capture_decodes(tape.capture, max_num_seqs=20, max_model_len=MAX_MODEL_LEN)
    assert runner.graphs is not None
    for count in (*range(1, 21), 3, 17, 1):
        extents = decode_of(runner, lengths_of(count), seed=count)
        if count % 2 == 0:  # a prompt of which this token is not the last: nothing is chosen
            extents[0].sequence.prompt_token_ids.append(1)
        step_both_ways(runner, extents)
        inputs = runner.graphs._inputs
        assert set(inputs.slot_mapping[count:].tolist()) <= {-1}
        assert not inputs.context_lengths[count:].any()


@pytest.mark.parametrize(("splits", "scales"), [(None, None), (Splits(2, 16), 0.25)])
def test_the_kernels_that_a_gpu_would_launch(
    monkeypatch: pytest.MonkeyPatch, splits: Splits | None, scales: float | None
) -> None:
    """The same grids and numbers for every batch of a size, with and without splits, KV whole or in 8 bits."""
    backend = tape.triton_backend(monkeypatch, splits)
    size = torch.full((1, 1, 1), scales or 1.0)
    kv_scales = {layer: KvScales(size, size) for layer in range(2)} if scales else None
    runner = runner_of(transformers.MistralConfig(**{**ONE_HEAD, "sliding_window": 8}), backend, scales=kv_scales)
    runner.capture_decodes(tape.capture, max_num_seqs=4, max_model_len=MAX_MODEL_LEN)
    for count in (3, 1):
        step_both_ways(runner, decode_of(runner, lengths_of(count), seed=count))


@pytest.mark.parametrize("name", [*RUNS, "mixtral"])
def test_transformers_own_code_can_be_captured(name: str) -> None:
    experts = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
    config_class, values = {**RUNS, "mixtral": ("MixtralConfig", experts)}[name]
    runner = runner_of(getattr(transformers, config_class)(**values), tape.DeviceOnly())
    runner.capture_decodes(tape.capture, max_num_seqs=2, max_model_len=MAX_MODEL_LEN)
    step_both_ways(runner, decode_of(runner, [9, 23], seed=1))


def test_a_model_that_asks_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic rotary embeddings look at the positions, from Python."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    runner = runner_of(transformers.LlamaConfig(**{**ONE_HEAD, "rope_parameters": rope}), tape.DeviceOnly())
    monkeypatch.setattr(build, "CudaCapture", lambda: tape.capture)
    with pytest.raises(
        ConfigError, match=r"--cuda-graphs: lab cannot be captured \(operation not permitted .*\); leave"
    ):
        build._capture_decodes(runner, fake_info(model="lab"))


@pytest.mark.parametrize("num_positions", [1, 3, 200])
def test_a_replay_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch, num_positions: int) -> None:
    """A capture that goes wrong on somebody's device, without an error."""
    runner = runner_of(transformers.LlamaConfig(**ONE_HEAD), tape.DeviceOnly())
    info = fake_info(max_num_seqs=2, max_model_len=num_positions, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    monkeypatch.setattr(build, "CudaCapture", lambda: tape.capture)
    build._capture_decodes(runner, info)
    assert runner.graphs is not None
    assert runner.num_graph_steps == 0, "the check is no step of the engine's"
    monkeypatch.setattr(build, "CudaCapture", lambda: lambda f: Captured(lambda: None, f()))
    with pytest.raises(ConfigError, match=r"^--cuda-graphs: the logits of a replayed step differ by .* \(allowed .*\)"):
        build._capture_decodes(runner, info)


@pytest.mark.parametrize(
    ("lengths", "is_decode"),
    [([5, 9], True), ([5, 9, 2], False), ([MAX_MODEL_LEN], True), ([MAX_MODEL_LEN + 1], False)],
)
def test_what_does_not_fit_is_launched_as_ever(lengths: list[int], is_decode: bool) -> None:
    runner = runner_of(transformers.LlamaConfig(**ONE_HEAD), tape.DeviceOnly())
    runner.capture_decodes(tape.capture, max_num_seqs=2, max_model_len=MAX_MODEL_LEN)
    assert runner.graphs is not None
    extents = decode_of(runner, lengths, seed=3)
    runner.run(extents, [])
    assert runner.graphs.num_replays == is_decode
    runner.run([Extent(extents[0].sequence, lengths[0] - 2, lengths[0]), *extents[1:]], [])
    assert runner.graphs.num_replays == is_decode


def is_new(arguments: Any, result: Any) -> bool:
    """Whether the result is memory that none of the arguments has."""
    before, after = (
        {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
        for tree in (arguments, result)
    )
    return not after <= before


def test_a_step_allocates_nothing_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the replay: one buffer on the host, one copy of it, and views."""
    runner = runner_of(transformers.LlamaConfig(**ONE_HEAD), tape.DeviceOnly())
    runner.capture_decodes(tape.capture, max_num_seqs=8, max_model_len=MAX_MODEL_LEN)
    graphs = runner.graphs
    assert graphs is not None
    graphs._captured = {size: Captured(lambda: None, torch.zeros(size, 5)) for size in graphs._captured}
    step = pack_inputs(decode_of(runner, [3, 9, 30], seed=4), BLOCK_SIZE)
    monkeypatch.setattr(tape, "HOST_BOUND", ())
    with tape.Tape() as recorded, torch.inference_mode():
        graphs.run(step)
    names = [function.overloadpacket.__name__ for function, *_ in recorded.calls]
    assert names.count("empty") == names.count("copy_") == 1
    made = [function for function, args, _, result in recorded.calls if is_new(args, result)]
    assert [function.overloadpacket.__name__ for function in made] == ["empty"]


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 4]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 24]),
        (1000, [1, 2, 4, *range(8, 257, 8)]),
    ],
)
def test_batch_sizes(max_num_seqs: int, sizes: list[int]) -> None:
    assert batch_sizes(max_num_seqs) == sizes


def test_refused_without_cuda_or_with_other_kernels(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = EngineConfig(cuda_graphs=True)
    check_cuda_graphs(EngineConfig(), get_backend("torch"))
    with pytest.raises(ConfigError, match=r"^--cuda-graphs needs a CUDA device"):
        prepare(wanted)
    monkeypatch.setattr(build, "choose_device", lambda _: torch.device("cuda"))
    check_cuda_graphs(wanted, get_backend("triton"))
    with pytest.raises(ConfigError, match=r"^--cuda-graphs needs --attention-backend triton, not reference$"):
        check_cuda_graphs(wanted, get_backend("reference"))
    monkeypatch.undo()
    monkeypatch.setattr(build, "check_cuda_graphs", lambda *_: None)
    assert [prepare(config, loaded=tiny).info.cuda_graphs for config in (EngineConfig(), wanted)] == [False, True]


# --- whole engines ------------------------------------------------------------------------------------------------

PROMPTS = ["ROMEO:", "To be, or not to be, that is the question", "KING RICHARD III:\nNow is the winter", "a"]
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batches that grow and shrink": ({}, {}),
    "candidates": ({}, {"n": 4, "temperature": 1.0, "seed": 3}),
    "beams": ({}, {"beam_width": 3}),
    "preempted and recomputed": ({}, {"n": 2}),
    "preempted and swapped": ({"swap_space": 0.001, "preemption": "swap"}, {"n": 2}),
    "more than were captured": ({}, {"n": 5}),
}


def plain(config: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Loaded as on a GPU: every module is transformers' own."""
    monkeypatch.setattr(model_loader, "pack_linears", lambda *_: None)
    monkeypatch.setattr(model_loader, "speed_up", lambda _: [])
    save(config, directory)
    return load_model(EngineConfig(model=str(directory), dtype="float32"), get_backend("torch"))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        config = transformers.MistralConfig(**{**SMALL, "num_hidden_layers": 2, "sliding_window": 8})
        yield plain(config, tmp_path_factory.mktemp("mistral"), monkeypatch)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield plain(transformers.LlamaConfig(**ONE_HEAD), tmp_path_factory.mktemp("llama"), monkeypatch)


def generate(real_engine: Callable[..., Any], loaded: LoadedModel, flags: Any, options: Any, capture: Any) -> Any:
    """Four prompts that come one after the other, twice: the second time they find their prefixes. Twelve sequences."""
    fixture = real_engine(loaded, block_size=4, max_num_seqs=32, max_model_len=96, **flags)
    engine = fixture.engine
    engine._runner._backend = tape.DeviceOnly()
    if capture is not None:
        engine._runner.capture_decodes(capture, max_num_seqs=20, max_model_len=96)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **options})
    requests = []
    for number, prompt in enumerate(PROMPTS + PROMPTS[:2]):
        requests.append(engine.submit(prompt, params, f"r{number}"))
        for _ in range(3):
            engine.step()
            fixture.check()
    fixture.run()
    return fixture, [(s.generated, s.choice_margins) for request in requests for s in request.sequences]


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_the_same_tokens(
    real_engine: Callable[..., Any], request: pytest.FixtureRequest, architecture: str, name: str
) -> None:
    flags, options = SCENARIOS[name]
    loaded, is_preempted = request.getfixturevalue(architecture), name.startswith("preempted")
    if is_preempted:
        flags = {**flags, "num_gpu_blocks_override": {"llama": 26, "mistral": 14}[architecture]}
    _, expected = generate(real_engine, loaded, flags, options, None)
    fixture, found = generate(real_engine, loaded, flags, options, tape.capture)
    for (tokens, _), (wanted, margins) in zip(found, expected, strict=True):
        assert tokens == wanted or min(margins) < 1e-4
    engine = fixture.engine
    assert 0 < engine.num_graph_steps < engine.step_number
    assert f"steps, {engine.num_graph_steps} of them replayed" in text_report(engine, [], [])
    assert EngineService(engine).stats()["graph_steps"] == engine.num_graph_steps
    assert (engine.counters.preemptions > 0) == is_preempted
    assert (engine.counters.copies > 0) == ("n" in options or "beam_width" in options)
    assert engine.counters.prefix_hit_tokens > 0 or is_preempted
