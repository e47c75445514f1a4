"""The compiled attention of a CPU against attention by its definition, in float64, relative in norm.

Few pairs of head sizes, since each costs a compilation; many lengths, block sizes, windows and caps. Every slot outside
the contexts, and so every block of another sequence, holds NaN.
"""

import gc
import itertools
import os
import subprocess
import sys

import pytest
import torch
from numba.core import event

from kvscope.kernels.backend import get_backend
from kvscope.kernels.huge_pages import HUGE_PAGE_BYTES, _whole_pages, collapse, huge_zeros
from kvscope.kernels.numba_backend import CompilationNotice, plan_tiles
from kvscope.kernels.numba_elements import cache_directory

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
SHAPES = [(64, 64, 3), (20, 48, 2)]  # head sizes of K and V, query heads per KV head
LENGTHS = [([1], [1]), ([1] * 5, [1, 15, 16, 17, 50]), ([19, 1, 7, 0, 2], [21, 33, 7, 9, 17])]


@pytest.fixture(scope="module")
def backend():
    return get_backend("numba")


def relative_error(backend, case, window=None, soft_cap=None):
    """Norm of the error over the norm of what is right; NaN where anything unwritten was read."""
    output = backend.attention(
        case.query,
        case.key_cache,
        case.value_cache,
        case.batch,
        scale=case.scale,
        sliding_window=window,
        soft_cap=soft_cap,
    )
    assert output.dtype == case.query.dtype
    expected = case.expected(window, soft_cap)
    return ((output.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("block_size", [1, 5, 16, 256])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_shape_is_within_a_hundred_thousandth(make_case, backend, lengths, shape, block_size):
    head_size, value_size, group_size = shape
    case = make_case(
        *lengths, block_size=block_size, head_size=head_size, value_head_size=value_size, group_size=group_size
    )
    for window, soft_cap in itertools.product((None, 1, 3, 16, 17, 1000), (None, 2.0)):
        assert relative_error(backend, case, window, soft_cap) <= LIMIT[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_half_precision(make_case, backend, lengths, dtype):
    case = make_case(*lengths, head_size=64, group_size=3, dtype=dtype)
    assert relative_error(backend, case) <= LIMIT[dtype]


def test_enough_work_is_shared_out_over_threads(make_case, backend, monkeypatch):
    monkeypatch.setattr("kvscope.kernels.numba_backend.MIN_WORK_PER_THREAD", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    case = make_case([1, 9, 1, 30], [200, 9, 3, 40], head_size=64, group_size=3)
    assert relative_error(backend, case) <= LIMIT[torch.float32]


def test_large_scores_do_not_overflow(make_case, backend):
    case = make_case([1, 3], [33, 20], head_size=64, group_size=3)
    case.query.mul_(1e30)
    output = backend.attention(case.query, case.key_cache, case.value_cache, case.batch, scale=case.scale)
    assert output.isfinite().all()


def test_halves_of_one_tensor(make_case, backend):
    """K and V as the halves of one tensor, the query as a part of a fused projection."""
    case = make_case([1, 4], [18, 21], head_size=64, group_size=3)
    num_blocks, num_kv_heads, block_size, head_size = case.key_cache.shape
    pool = torch.empty(num_blocks, 2, num_kv_heads, block_size, head_size)
    pool[:, 0], pool[:, 1] = case.key_cache, case.value_cache
    fused = torch.cat([case.query, case.query], dim=1)
    output = backend.attention(fused[:, : case.query.shape[1]], pool[:, 0], pool[:, 1], case.batch, scale=case.scale)
    torch.testing.assert_close(output.double(), case.expected(), rtol=0, atol=3e-6)


def test_a_cache_with_scattered_slots_is_refused(make_case, backend):
    case = make_case([1], [3])
    scattered = case.key_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous per block and head"):
        backend.attention(case.query, scattered, case.value_cache, case.batch, scale=1.0)


def test_tiles_cover_every_query_once_for_every_head(make_case):
    case = make_case([1, 19, 0, 2], [5, 30, 4, 2])
    tiles = plan_tiles(case.batch, 2).tiles
    covered = sorted((token + j, head) for token, count, _, _, head in tiles.tolist() for j in range(count))
    assert covered == [(token, head) for token in range(22) for head in range(2)]


def test_compiling_is_announced_once(capsys):
    notice = CompilationNotice()
    for _ in range(2):
        notice.notify(event.Event("numba:compile", event.EventStatus.START))
        notice.notify(event.Event("numba:compile", event.EventStatus.END))
    assert capsys.readouterr().err == ("kvscope: compiling attention for this machine, once; this takes some seconds\n")


@pytest.mark.parametrize("shape", [(3, 5), (1000, 3, 16, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_in_huge_pages_is_like_any_other(shape, dtype):
    cache = huge_zeros(shape, dtype)
    assert cache.shape == shape
    assert cache.is_contiguous()
    assert not cache.any()
    expected = torch.rand(shape).to(dtype)
    cache.copy_(expected)
    assert cache.equal(expected)
    last = cache[-1].clone()
    del cache
    assert last.equal(expected[-1])


def test_memory_moved_to_large_pages_keeps_its_contents():
    tensor = torch.arange(3_000_001, dtype=torch.int32)
    before, address = tensor.clone(), tensor.data_ptr()
    collapse([(address + 4, 4 * 3_000_000), (1 << 30, 8 << 20)])  # at the second there is nothing
    assert tensor.equal(before)
    assert tensor.data_ptr() == address


def test_large_pages_that_touch_are_asked_for_at_once():
    page = HUGE_PAGE_BYTES
    areas = [(9 * page, 1), (page + 5, page), (3 * page - 1, 2), (5 * page, page)]
    assert _whole_pages(areas) == [(page, 4 * page), (5 * page, 6 * page), (9 * page, 10 * page)]


def test_a_cache_that_is_gone_is_forgotten(make_case, backend):
    for _ in range(2):
        case = make_case([1], [9], head_size=64, group_size=3)
        assert relative_error(backend, case) <= LIMIT[torch.float32]
        known = len(backend._known_layouts)
        assert known >= 2
        del case
        gc.collect()
        assert len(backend._known_layouts) == known - 2


PLAINEST = """
import torch
from kvscope.kernels.blocked_weight import BlockedWeight
from kvscope.kernels.numba_attention import rows_at_once
weight, rows = torch.randn(64, 16).bfloat16(), torch.randn(2, 16).bfloat16()
blocks = weight.view(1, 64, 8, 2).permute(0, 2, 1, 3).contiguous()
found = BlockedWeight(blocks.data_ptr(), (64, 16), torch.bfloat16, None).multiply(rows)
assert (found.float() - rows.float() @ weight.float().T).norm() < 0.1
assert rows_at_once(64, 3) == 1
"""


def test_no_instruction_is_used_that_numba_was_told_to_do_without():
    """On a processor that has AVX512_BF16 this ended the process, without a word from Python."""
    command, environment = [sys.executable, "-c", PLAINEST], os.environ | {"NUMBA_CPU_NAME": "generic"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_compiled_code_is_kept_by_all_that_it_is_made_of(tmp_path):
    (tmp_path / "numba_attention.py").write_text("calls numba_rows")
    (tmp_path / "numba_rows.py").write_text("a")
    before = cache_directory(tmp_path)
    assert cache_directory(tmp_path) == before
    (tmp_path / "numba_rows.py").write_text("b")
    assert cache_directory(tmp_path) != before
