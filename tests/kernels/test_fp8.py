"""KV in 8 bits: kernels read exactly what is stored, and what is stored is as near as three bits of fraction allow."""

from dataclasses import replace

import pytest
import torch

from kvscope.kernels.backend import BACKEND_NAMES, get_backend
from kvscope.kernels.batch import PagedBatch

FP8 = torch.float8_e4m3fn
ROUNDING = 2.0**-4  # of a value: half of the last of three bits of fraction
SMALLEST = 2.0**-10  # half of the smallest step, below 2^-6


def stored_in_8_bits(case):
    """The same case on fp8 caches, and one of what these hold; NaN stays NaN."""
    caches = {"key_cache": case.key_cache.to(FP8), "value_cache": case.value_cache.to(FP8)}
    held = [(keys.to(FP8).float(), values.to(FP8).float()) for keys, values in case.contiguous]
    return replace(case, **caches, contiguous=held)


def attend(name, case, sliding_window=None, soft_cap=None):
    return get_backend(name).attention(
        case.query, case.key_cache, case.value_cache, case.batch,
        scale=case.scale, sliding_window=sliding_window, soft_cap=soft_cap,
    )  # fmt: skip


@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(None, None), (7, None), (None, 3.0)])
@pytest.mark.parametrize("sizes", [{"block_size": 4, "head_size": 24}, {"block_size": 16, "value_head_size": 48}])
@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_attention_of_what_is_stored(make_case, name, sizes, sliding_window, soft_cap):
    case = stored_in_8_bits(make_case([1, 5, 1, 3], [70, 20, 3, 3], **sizes))
    expected = case.expected(sliding_window, soft_cap)
    error = attend(name, case, sliding_window, soft_cap).double() - expected
    assert error.norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_attention_of_what_was_meant(make_case, name):
    """The worst that rounding can do, in float64, for every output by itself.

    K is off by at most 1/16 of each element, so a score by d = scale * sum |q| |dk|; then no weight is off by more than
    a factor of exp(2 max d); and V is off by at most 1/16 too.
    """
    meant = make_case([1, 5, 1, 3], [70, 20, 3, 3], group_size=1, num_kv_heads=1)
    stored = stored_in_8_bits(meant)
    output, expected = attend(name, stored).double(), meant.expected()
    of_magnitudes = replace(meant, contiguous=[(keys, values.abs()) for keys, values in meant.contiguous]).expected()
    starts = meant.batch.query_start.tolist()
    for sequence, (keys, _) in enumerate(meant.contiguous):
        for token in range(starts[sequence], starts[sequence + 1]):
            off = ROUNDING * keys.abs().double() + SMALLEST
            d = (meant.query[token].abs().double() * off[:, 0]).sum(-1).max() * meant.scale
            grown = torch.exp(2 * d)
            bound = (grown * (1 + ROUNDING) - 1) * of_magnitudes[token] + grown * SMALLEST
            assert ((output[token] - expected[token]).abs() <= bound).all()
    assert (output - expected).norm() <= 0.06 * expected.norm()  # typically errors cancel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_writing_rounds_to_nearest(name, dtype):
    """Every magnitude from the smallest to the largest, odd and even, both signs; and NaN stays NaN."""
    magnitudes = torch.cat([torch.logspace(-11, 8.8, 1000, base=2.0), torch.tensor([0.0, 448.0, float("nan")])])
    values = torch.cat([magnitudes, -magnitudes, torch.zeros(42)]).to(dtype).view(-1, 2, 32)
    slots = torch.randperm(64)[: len(values)]
    caches = [torch.zeros(16, 2, 4, 32, dtype=FP8) for _ in range(2)]
    get_backend(name).write_kv(values, -values, *caches, slots)
    for sign, cache in zip((1, -1), caches, strict=True):
        written = sign * cache.transpose(1, 2).flatten(0, 1)[slots].double()
        meant = values.double()
        assert torch.equal(written.isnan(), meant.isnan())
        error = (written - meant).abs()[~meant.isnan()]
        assert (error <= torch.maximum(ROUNDING * meant.abs()[~meant.isnan()], torch.tensor(SMALLEST))).all()


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_blocks_are_copied_bit_for_bit(name):
    """All 256 bytes, NaN of both signs among them."""
    cache = torch.arange(256, dtype=torch.uint8).repeat(3).view(3, 2, 4, 32).view(FP8)
    before = cache.view(torch.uint8).clone()
    before[2] = before[0]
    cache.view(torch.uint8)[2] = 0
    get_backend(name).copy_blocks([cache], torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(cache.view(torch.uint8), before)


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_every_byte_is_read_as_torch_reads_it(name):
    """One position that is seen by itself: the output is its V. Triton's interpreter takes NaN for 480."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8).view(2, 1, 4, 32)
    keys = torch.zeros(2, 1, 4, 32).to(FP8)
    for position in range(8):
        batch = PagedBatch(
            query_start=torch.tensor([0, 1]).int(),
            context_lengths=torch.tensor([position + 1]).int(),
            block_tables=torch.tensor([[0, 1]]).int(),
            slot_mapping=torch.tensor([position]),
            max_query_length=1,
            max_context_length=position + 1,
        )
        backend = get_backend(name)
        output = backend.attention(torch.zeros(1, 1, 32), keys, values, batch, scale=1.0, sliding_window=1).view(-1)
        expected = values.transpose(1, 2).flatten(0, 2)[position].float()
        if name == "triton":
            expected = torch.where(expected.isnan(), torch.tensor([1.0, -1.0])[position // 4] * 480, expected)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=0, equal_nan=True)
