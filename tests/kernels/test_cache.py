"""Writing K and V into slots, and copying whole blocks."""

from itertools import pairwise

import pytest
import torch

from kvscope.kernels.backend import get_backend

NAMES = ("reference", "torch", "numba", "triton")
NAN = float("nan")


@pytest.mark.parametrize(
    ("new_dtype", "cache_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_write_casts_and_touches_its_slots_alone(name, new_dtype, cache_dtype):
    num_blocks, num_kv_heads, block_size, head_size, value_head_size = 7, 3, 4, 20, 8
    random = torch.Generator().manual_seed(0)
    slots = torch.randperm(num_blocks * block_size, generator=random)[:11]
    key = torch.randn(11, num_kv_heads, head_size, generator=random).to(new_dtype)
    value = torch.randn(11, num_kv_heads, value_head_size, generator=random).to(new_dtype)
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_size), NAN, dtype=cache_dtype)
    value_cache = torch.full((num_blocks, num_kv_heads, block_size, value_head_size), NAN, dtype=cache_dtype)

    get_backend(name).write_kv(key, value, key_cache, value_cache, slots)

    for new, cache in ((key, key_cache), (value, value_cache)):
        by_slot = cache.transpose(1, 2).flatten(0, 1)  # [num_slots, num_kv_heads, head_size]
        assert torch.equal(by_slot[slots], new.to(cache_dtype))
        others = torch.ones(len(by_slot), dtype=torch.bool)
        others[slots] = False
        assert by_slot[others].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_write_takes_a_part_of_a_fused_projection(name):
    fused = torch.randn(5, 6, 16, generator=torch.Generator().manual_seed(1))
    key_cache, value_cache = torch.zeros(2, 2, 4, 16), torch.zeros(2, 2, 4, 16)
    slots = torch.tensor([7, 0, 3, 4, 1])
    get_backend(name).write_kv(fused[:, 2:4], fused[:, 4:], key_cache, value_cache, slots)
    assert torch.equal(key_cache.transpose(1, 2).flatten(0, 1)[slots], fused[:, 2:4])
    assert torch.equal(value_cache.transpose(1, 2).flatten(0, 1)[slots], fused[:, 4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_write_takes_elements_that_lie_apart(name, dtype):
    """K and V of a projection that has them side by side, element by element."""
    fused = torch.randn(5, 2, 16, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    key_cache, value_cache = torch.zeros(2, 2, 4, 16, dtype=dtype), torch.zeros(2, 2, 4, 16, dtype=dtype)
    slots = torch.tensor([7, 0, 3, 4, 1])
    get_backend(name).write_kv(fused[..., 0], fused[..., 1], key_cache, value_cache, slots)
    assert torch.equal(key_cache.transpose(1, 2).flatten(0, 1)[slots], fused[..., 0])
    assert torch.equal(value_cache.transpose(1, 2).flatten(0, 1)[slots], fused[..., 1])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_attention_reads(make_case, name):
    """A step as the engine runs it: write this step's tokens, then attend."""
    case = make_case([1, 6], [18, 9], block_size=4, num_kv_heads=1)
    starts = case.batch.query_start.tolist()
    num_queries = [end - start for start, end in pairwise(starts)]
    new = [(k[-n:], v[-n:]) for (k, v), n in zip(case.contiguous, num_queries, strict=True)]
    slots = case.batch.slot_mapping
    for cache in (case.key_cache, case.value_cache):
        cache.transpose(1, 2)[slots // 4, slots % 4] = NAN
    backend = get_backend(name)
    backend.write_kv(
        torch.cat([k for k, _ in new]), torch.cat([v for _, v in new]), case.key_cache, case.value_cache, slots
    )
    output = backend.attention(case.query, case.key_cache, case.value_cache, case.batch, scale=case.scale)
    torch.testing.assert_close(output.double(), case.expected(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_copy_keeps_every_bit_and_leaves_the_other_blocks(name, dtype):
    """Half of the slots hold NaN, with payloads: a copy of a block with unwritten slots must not disturb them."""
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    random = torch.Generator().manual_seed(2)
    limit = torch.iinfo(integers)
    caches = [
        torch.randint(limit.min, limit.max, (9, 2, 4, size), generator=random, dtype=integers).view(dtype)
        for size in (20, 20, 12)
    ]
    for cache in caches:
        cache[:, :, 2:] = NAN
    before = [cache.view(integers).clone() for cache in caches]
    source, target = torch.tensor([3, 3, 0]), torch.tensor([8, 1, 5])

    get_backend(name).copy_blocks(caches, source, target)

    for cache, old in zip(caches, before, strict=True):
        now = cache.view(integers)
        assert torch.equal(now[target], old[source])
        untouched = [0, 2, 3, 4, 6, 7]
        assert torch.equal(now[untouched], old[untouched])


@pytest.mark.parametrize("name", NAMES)
def test_copy_within_the_halves_of_one_pool(name):
    pool = torch.randn(6, 2, 3, 4, 16, generator=torch.Generator().manual_seed(3))
    before = pool.clone()
    get_backend(name).copy_blocks([pool[:, 0], pool[:, 1]], torch.tensor([2]), torch.tensor([4]))
    assert torch.equal(pool[4], before[2])
    assert torch.equal(pool[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_write_or_copy(name):
    cache, none = torch.zeros(2, 1, 4, 16), torch.empty(0, dtype=torch.int64)
    backend = get_backend(name)
    backend.copy_blocks([cache], none, none)
    backend.write_kv(torch.empty(0, 1, 16), torch.empty(0, 1, 16), cache, cache.clone(), none)
    assert not cache.any()
