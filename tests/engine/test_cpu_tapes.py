"""Decode steps on a CPU as tapes: a replay gives what the forward pass gives, and what cannot be noted is noticed."""

import random

import pytest
import torch
import transformers

from kvscope.engine import cpu_tapes, decode_graphs
from kvscope.engine.build import build_engine, prepare
from kvscope.engine.config import EMBEDDED_MODEL, EngineConfig
from kvscope.engine.cpu_tapes import Tape, record
from kvscope.engine.decode_graphs import OFTEN
from kvscope.engine.packed_linears import PackedLinear
from kvscope.events.types import SamplingParams
from kvscope.kernels import cpu_layers
from kvscope.kernels.backend import get_backend
from kvscope.kernels.threads import Program, recorded
from kvscope.transport.publisher import NullPublisher

from .test_architectures import RUNS
from .test_decode_graphs import MAX_MODEL_LEN, ONE_HEAD, decode_of, lengths_of, runner_of, step_both_ways

NUM_WARM_UPS = OFTEN + 1  # the last of them is the one in which a tape is compared


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.parametrize("name", ["llama", "gemma2, soft cap, every other layer with window 8"])
def test_replays_equal_the_forward_pass(name: str) -> None:
    """For every size of batch, in any order, over any contents; nothing of the model's Python is needed."""
    config_class, values = RUNS[name]
    runner = runner_of(getattr(transformers, config_class)(**values), get_backend("numba"))
    graphs = runner.capture_decodes(record, max_num_seqs=3, max_model_len=MAX_MODEL_LEN, when_met=True)
    for count in (2, 1, 3):
        for seed in range(NUM_WARM_UPS):
            runner.run(decode_of(runner, lengths_of(count), seed), [])
    assert graphs.num_replays == 3 * (NUM_WARM_UPS - OFTEN + 1)
    for seed, count in enumerate((3, 1, 2, 3)):
        step_both_ways(runner, decode_of(runner, lengths_of(count + seed)[:count], 10 + seed))


def test_a_step_that_is_rare_or_of_many_sequences_is_not_taped() -> None:
    runner = runner_of(transformers.LlamaConfig(**ONE_HEAD), get_backend("numba"))
    graphs = runner.capture_decodes(record, max_num_seqs=2, max_model_len=MAX_MODEL_LEN, when_met=True)
    for count, times in ((1, OFTEN - 1), (3, OFTEN + 1)):
        for seed in range(times):
            runner.run(decode_of(runner, lengths_of(count), seed), [])
    assert graphs.num_replays == 0


@torch.inference_mode()
def test_what_python_reads_is_not_replayed() -> None:
    x = torch.ones(3)
    tape = Tape(lambda: x * x.sum().item())
    assert not tape.is_right
    x.fill_(2)
    tape.replay()
    assert tape.output.tolist() == [12, 12, 12]


@torch.inference_mode()
def test_what_python_reads_behind_the_back_of_torch_shows_in_another_step() -> None:
    x = torch.ones(3)
    values = x.numpy()
    tape = Tape(lambda: x + float(values[0]))
    for value, expected in ((1, 2), (2, 4), (3, 6)):
        x.fill_(value)
        tape.replay()
        assert tape.output.tolist() == 3 * [expected]
    assert not tape.is_right


@torch.inference_mode()
def test_what_is_written_behind_the_back_of_torch_shows_at_once() -> None:
    x = torch.ones(3)

    def forward() -> torch.Tensor:
        y = x + 1
        y.numpy()[:] *= 2
        return y + 1

    tape = Tape(forward)
    tape.replay()
    assert (tape.is_right, tape.output.tolist()) == (False, [5, 5, 5])


@torch.inference_mode()
def test_a_shape_that_depends_on_values_ends_a_tape() -> None:
    """Without reading one: a loop over what is found goes round as often as it did when the tape was made."""
    x = torch.tensor([1, 0, 2, 0])

    def forward() -> torch.Tensor:
        return sum(x.nonzero(), torch.zeros(1))

    tape = Tape(forward)
    found = []
    for values in ([1, 0, 2, 0], [0, 3, 0, 4], [0, 0, 0, 5], [0, 0, 6, 7]):
        x.copy_(torch.tensor(values))
        found.append((tape.replay(), tape.output.item()))
    assert found == [(True, 2), (True, 4), (False, 3), (False, 5)]


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(8))
def test_memory_that_is_shared_is_never_needed_any_more(seed: int) -> None:
    """Sums of any two earlier ones, which may be views or be read by torch, in one program or cut into several."""
    draw = random.Random(seed)
    inputs = [torch.empty(2, 64).random_(-3, 3) for _ in range(3)]
    choices = [(draw.random(), draw.random(), draw.random() < seed / 20) for _ in range(60)]

    def forward() -> torch.Tensor:
        sums = list(inputs)
        for left, right, by_torch in choices:
            x, y = (sums[int(share * len(sums))] for share in (left, right))
            sums.append(torch.minimum(x, y) if by_torch else (x.view(128) + y.view(128)).view(2, 64))
        return sums[-1]

    tape = Tape(forward)
    for _ in range(3):
        for given in inputs:
            given.random_(-3, 3)
        tape.replay()
        assert torch.equal(tape.output, forward())
    assert tape.is_right


def test_calls_of_one_program_are_done_in_order_by_all_threads() -> None:
    rows, calls = torch.ones(5000, 8), []
    with recorded(calls.append):
        for _ in range(5):
            cpu_layers.add(rows, rows, rows)
    assert rows.eq(32).all()
    program = Program(calls)
    for power in (10, 15):
        program.run()
        assert rows.eq(2**power).all()


def test_an_engine_on_a_cpu_replays_its_decodes() -> None:
    config = EngineConfig(model=EMBEDDED_MODEL, device="cpu", dtype="float32", num_gpu_blocks_override=16)
    engine = build_engine(prepare(config), NullPublisher())
    request = engine.submit("", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), "r", [5, 6, 7])
    while engine.has_work():
        engine.step()
    assert engine.num_graph_steps == 11 - (OFTEN - 1)
    assert len(request.sequences[0].generated) == 12


@torch.inference_mode()
def test_a_multiplication_of_onednn_is_replayed() -> None:
    """Its weight lies in an order of its own, which says nothing of its memory."""
    linear, x = PackedLinear(torch.rand(48, 32), None), torch.rand(3, 32)
    tape = Tape(lambda: linear.operator(x))
    for _ in range(3):
        x.random_(-3, 3)
        tape.replay()
        assert torch.equal(tape.output, linear.operator(x))
    assert tape.is_right


@torch.inference_mode()
def test_what_cannot_be_noted_is_done_without_a_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_tapes, "_memory", lambda tensor: 1 / 0)
    x = torch.ones(3)
    tape = Tape(lambda: x + 1)
    x.fill_(2)
    tape.replay()
    assert (tape.is_right, tape.output.tolist()) == (False, [3, 3, 3])


def test_steps_that_are_not_replayed_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(transformers.LlamaConfig(**ONE_HEAD), get_backend("numba"))
    graphs = runner.capture_decodes(record, max_num_seqs=2, max_model_len=MAX_MODEL_LEN, when_met=True)
    monkeypatch.setattr(cpu_tapes, "_memory", lambda tensor: 1 / 0)
    for seed in range(OFTEN + 2):
        runner.run(decode_of(runner, lengths_of(2), seed), [])
    assert graphs.num_replays == 0


def test_tapes_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size that was met longest ago goes, and has to be met as often again."""
    runner = runner_of(transformers.LlamaConfig(**ONE_HEAD), get_backend("numba"))
    sizes = [record(lambda count=count: torch.ones(count, 999) + 1).num_bytes for count in (1, 3)]
    assert sizes[0] >= 4 * 999
    assert 2 * sizes[0] < sizes[1]
    monkeypatch.setattr(decode_graphs, "MAX_KEPT_BYTES", 3)
    capture = lambda forward: record(forward)._replace(num_bytes=len(forward()))  # noqa: E731
    graphs = runner.capture_decodes(capture, max_num_seqs=3, max_model_len=MAX_MODEL_LEN, when_met=True)
    replays = []
    for count in (1, 2, 3, 3, 1, 1):
        for seed in range(OFTEN - 1):
            runner.run(decode_of(runner, lengths_of(count), seed), [])
        replays.append(graphs.num_replays)
        runner.run(decode_of(runner, lengths_of(count), OFTEN), [])
    assert replays == [0, 1, 2, 5, 6, 9]
