"""Decodes with rows that stand for nobody: they read nothing, write nothing, and give zeros."""

from dataclasses import fields, replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kvscope.kernels.triton_backend import TritonBackend
from kvscope.kernels.triton_tiles import NO_SPLITS, Splits, Tiles

TILES = Tiles(block_m=16, tile=16)


def padded(case, num_rows):
    """The case with that many rows of padding behind it, whose queries and table entries are anything but zeros."""
    batch = case.batch
    return replace(
        case,
        query=torch.cat([case.query, torch.full((num_rows, *case.query.shape[1:]), 7.0)]),
        batch=replace(
            batch,
            query_start=torch.arange(batch.num_seqs + num_rows + 1).int(),
            context_lengths=torch.cat([batch.context_lengths, torch.zeros(num_rows).int()]),
            block_tables=torch.cat([batch.block_tables, torch.full((num_rows, batch.block_tables.shape[1]), 2**30)]),
            slot_mapping=torch.cat([batch.slot_mapping, torch.full((num_rows,), -1)]),
        ),
    )


@pytest.mark.parametrize("splits", [NO_SPLITS, Splits(8, 1000)])
@pytest.mark.parametrize(("block_size", "sliding_window"), [(4, None), (32, 17), (1, 1)])
def test_padding_gives_zeros_and_changes_nobody(make_case, splits, block_size, sliding_window):
    case = make_case([1, 1], [50, 3], block_size=block_size, num_kv_heads=1)
    longer = padded(case, 3)
    backend = TritonBackend(TILES, splits)
    options = {"scale": case.scale, "sliding_window": sliding_window}
    output = backend.attention(longer.query, case.key_cache, case.value_cache, longer.batch, **options)
    torch.testing.assert_close(output[:2].double(), case.expected(sliding_window), rtol=0, atol=3e-6)
    assert torch.equal(output[2:], torch.zeros_like(output[2:]))


@pytest.mark.filterwarnings("error")  # a division by zero, which has no defined result on a GPU
@pytest.mark.parametrize("splits", [NO_SPLITS, Splits(4, 16)])
def test_nothing_but_padding(make_case, splits):
    """What a graph is captured on, before any step has filled its buffers."""
    case = padded(make_case([1], [5], num_kv_heads=1), 2)
    batch = replace(case.batch, context_lengths=torch.zeros(3).int())
    output = TritonBackend(TILES, splits).attention(case.query, case.key_cache, case.value_cache, batch, scale=1.0)
    assert torch.equal(output, torch.zeros_like(output))


@pytest.mark.parametrize("block_size", [1, 4, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_padding_is_written_nowhere(block_size, dtype):
    """Every byte of both caches, NaN before, is as it was, but for those of the one token that has a slot."""
    caches = [torch.full((5, 2, block_size, 16), float("nan")).to(dtype) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    slot = 3 * block_size + block_size // 2
    TritonBackend().write_kv(
        torch.randn(3, 2, 16), torch.randn(3, 2, 16), *caches, torch.tensor([-1, slot, -1], dtype=torch.int64)
    )
    for cache, old in zip(caches, before, strict=True):
        assert not cache[3, :, block_size // 2].float().isnan().any()
        cache[3, :, block_size // 2] = old[3, :, block_size // 2]
        assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))


class Launches:
    """Stands for a kernel: notes with which grid and numbers it would be launched, whatever the tensors hold."""

    def __init__(self):
        self.noted = []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.noted.append(
            (grid, [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args], constants)
        )


def test_the_launches_of_a_decode_are_known_without_its_content(make_case, monkeypatch):
    """As compiled for a GPU, on tensors that have shapes and nothing else: to ask one for a value is an error."""
    launches, backend = Launches(), TritonBackend(splits=Splits(8, 264))
    backend.interpreted = False
    for name in ("triton_attention.paged_attention_kernel", "triton_splits.combine_splits_kernel"):
        monkeypatch.setattr(f"kvscope.kernels.{name}", launches)
    monkeypatch.setattr("kvscope.kernels.triton_cache.write_kv_kernel", launches)
    case = padded(make_case([1, 1], [50, 3], num_kv_heads=2), 2)
    with FakeTensorMode() as fake:
        tensors = {field.name: getattr(case.batch, field.name) for field in fields(case.batch)}
        batch = replace(case.batch, **{k: fake.from_tensor(t) for k, t in tensors.items() if torch.is_tensor(t)})
        query, keys, values = map(fake.from_tensor, (case.query, case.key_cache, case.value_cache))
        with pytest.raises(DataDependentOutputException):
            batch.context_lengths[0].item()
        for longest in (1, 50):
            backend.write_kv(query[:, :2], query[:, 2:], keys, values, batch.slot_mapping)
            backend.attention(query, keys, values, replace(batch, max_context_length=longest), scale=1.0)
    assert [grid for grid, *_ in launches.noted] == 2 * [(1,), (4, 2, 8), (4, 4)]
    assert launches.noted[:3] == launches.noted[3:]
