"""Few rows times a weight in blocked order, against float64; the order is laid out here by hand."""

import math

import numba
import pytest
import torch
from torch import Tensor

from kvscope.kernels import blocked_weight, numba_tile
from kvscope.kernels.blocked_weight import FEW_ROWS, BlockedWeight, as_fast, choose_max_rows, choose_num_threads

NAN = float("nan")


def in_blocks(weight: Tensor) -> Tensor:
    """The weight as oneDNN lays it out, with NaN before and after it."""
    num_outputs, size = weight.shape
    if weight.dtype == torch.float32:
        blocks = weight.view(num_outputs // 64, 64, size).permute(0, 2, 1)
    else:
        blocks = weight.view(num_outputs // 64, 64, size // 2, 2).permute(0, 2, 1, 3)
    around = torch.full((64,), NAN, dtype=weight.dtype)
    return torch.cat([around, blocks.flatten(), around])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 16), (192, 48), (128, 80)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 16, 32, 75])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_product(dtype, num_rows, shape, has_bias, num_threads):
    torch.manual_seed(5)
    weight, rows, bias = torch.randn(shape).to(dtype), torch.randn(num_rows, shape[1]).to(dtype), None
    if has_bias:
        bias = torch.randn(shape[0]).to(dtype)
    memory = in_blocks(weight)
    blocked = BlockedWeight(memory[64:].data_ptr(), shape, dtype, bias)
    blocked.num_threads = num_threads
    expected = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert blocked.takes(rows)
    found = blocked.multiply(rows[None])[0]
    torch.testing.assert_close(found, expected.to(dtype), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_bfloat16_on_a_processor_that_does_not_multiply_it(monkeypatch):
    """Compiled here and now, for the other kind of processor; sums are those of the widened numbers."""
    asked = []
    monkeypatch.setattr(numba_tile, "target_has", asked.append)

    @numba.njit
    def multiply(weight, rows, sums):
        numba_tile.multiply_tile(5, weight, 0, rows, 0, 40, 0, sums)

    torch.manual_seed(6)
    weight, rows, sums = torch.randn(64, 80).bfloat16(), torch.randn(5, 80).bfloat16(), torch.zeros(5, 64)
    weight[1, 3], rows[2, 5], rows[3, 4] = 0.0, float("inf"), float("nan")
    pairs = [memory.contiguous().view(torch.int32).numpy().view("uint32") for memory in (in_blocks(weight)[64:], rows)]
    multiply(pairs[0], pairs[1].ravel(), sums.numpy().ravel())
    assert asked == ["avx512bf16"]
    torch.testing.assert_close(sums, (rows.double() @ weight.double().T).float(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("max_sums", [6, 24])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 6])
def test_many_and_few_registers(num_rows, max_sums, monkeypatch):
    """Compiled here and now, for either kind of processor: in few, a block's outputs are summed up part by part."""
    monkeypatch.setattr(numba_tile, "_MAX_SUMS", max_sums)

    @numba.njit
    def multiply(weight, rows, sums):
        numba_tile.multiply_tile(num_rows, weight, 0, rows, 0, 40, 0, sums)

    torch.manual_seed(7)
    weight, rows, sums = torch.randn(64, 40), torch.randn(num_rows, 40), torch.zeros(num_rows, 64)
    multiply(in_blocks(weight)[64:].numpy(), rows.numpy().ravel(), sums.numpy().ravel())
    torch.testing.assert_close(sums, (rows.double() @ weight.double().T).float(), rtol=1e-5, atol=1e-5)
    assert num_rows * numba_tile._columns_at_once(num_rows) <= 16 * max_sums


def test_takes_contiguous_rows_of_its_type_only():
    blocked = BlockedWeight(0, (64, 16), torch.float32, None)
    assert blocked.takes(torch.ones(1, 3000, 16))
    assert not blocked.takes(torch.ones(1, 0, 16))
    assert not blocked.takes(torch.ones(1, 16, dtype=torch.bfloat16))
    assert not blocked.takes(torch.ones(16, 2).T)


@pytest.mark.parametrize(("seconds", "chosen"), [((8, 4, 2), 4), ((8, 4, 3.9), 2), ((8, 7.5, 1), 1)])
def test_threads_are_taken_as_long_as_they_pay(seconds, chosen, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    times = dict(zip((1, 2, 4), seconds, strict=True))
    monkeypatch.setattr(blocked_weight, "_best_seconds", lambda weights, rows, num_threads: times[num_threads])
    large, small = (BlockedWeight(0, (num_outputs, 16), torch.float32, None) for num_outputs in (256, 64))
    choose_num_threads([large, small])
    assert (large.num_threads, small.num_threads) == (chosen, 1)


@pytest.mark.parametrize(
    ("own", "max_rows"), [({16: 1.0, 64: 1.0}, math.inf), ({16: 1.0, 64: 2.0}, 32), ({16: 2.0, 64: 1.0}, FEW_ROWS)]
)
def test_more_than_few_rows_are_left_to_who_is_faster(own, max_rows, monkeypatch, tmp_path):
    """And at the next start to the same, whoever is faster then."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    weight = BlockedWeight(0, (64, 16), torch.float32, None)
    monkeypatch.setattr(
        blocked_weight, "seconds", lambda functions, rows: 1.0 if functions == [torch.relu] else own[rows.shape[1]]
    )
    for times in (own, {16: 3.0 - own[16], 64: 3.0 - own[64]}):
        own = times
        weight.max_rows = 0
        choose_max_rows({weight: torch.relu})
        assert weight.takes(torch.ones(1, int(min(max_rows, 3000)), 16))
        assert weight.takes(torch.ones(1, int(min(max_rows, 3000)) + 1, 16)) == (max_rows == math.inf)


@pytest.mark.parametrize(
    ("ours", "answer"), [([5, 1], True), ([5, 5, 1], True), ([5] * 11 + [1], True), ([5] * 12, False)]
)
def test_a_no_is_not_the_work_of_chance(ours, answer, monkeypatch):
    times = iter([second for own in ours for second in (own, 2)])
    monkeypatch.setattr(blocked_weight, "seconds", lambda functions, rows: next(times))
    assert as_fast([torch.relu], [torch.relu], torch.ones(1)) is answer
    assert next(times, None) is None
