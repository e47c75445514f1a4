"""Every backend against attention by its definition, in float64."""

import pytest
import torch

from kvscope.kernels.backend import AttentionBackend, get_backend
from kvscope.kernels.triton_tiles import Tiles

EAGER = ("reference", "torch")
# Tiles as small as a GPU's, so that one context takes several: the default of the interpreter holds it whole.
SMALL_TILES = Tiles(block_m=16, tile=16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def backend_named(name: str, tiles: Tiles | None = None) -> AttentionBackend:
    """A backend; with tiles, the Triton one with those."""
    if tiles is None:
        return get_backend(name)
    from kvscope.kernels.triton_backend import TritonBackend

    return TritonBackend(tiles)


def check(backend, case, sliding_window=None, soft_cap=None):
    """The backend's output is finite, has the right shape and dtype, and is close to the definition."""
    output = backend.attention(
        case.query,
        case.key_cache,
        case.value_cache,
        case.batch,
        scale=case.scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    assert output.dtype == case.query.dtype
    assert output.isfinite().all()
    torch.testing.assert_close(
        output.double(), case.expected(sliding_window, soft_cap), rtol=0, atol=TOLERANCE[case.query.dtype]
    )


def edge_contexts(block_size):
    """Context lengths around the edges of a block."""
    return [1, block_size - 1, block_size, block_size + 1, 3 * block_size + 2]


def mixed_lengths(block_size):
    """Query and context lengths of decodes at block edges, a chunk on top of a context, a whole prompt, two tokens."""
    contexts = edge_contexts(block_size)
    return [1] * len(contexts) + [block_size + 3, 7, 2], [*contexts, 2 * block_size + 5, 7, block_size + 1]


@pytest.mark.parametrize("group_size", [1, 2, 4, 8])
@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("name", EAGER)
def test_mixed_batch_of_every_shape(make_case, name, block_size, head_size, group_size):
    case = make_case(*mixed_lengths(block_size), block_size=block_size, head_size=head_size, group_size=group_size)
    check(get_backend(name), case)


@pytest.mark.parametrize(
    ("block_size", "head_size", "group_size", "tiles"),
    [
        (4, 16, 1, SMALL_TILES),
        (16, 32, 3, SMALL_TILES),
        (32, 64, 2, SMALL_TILES),
        (4, 80, 4, None),
        (16, 256, 8, None),
        (32, 128, 1, None),
        (16, 64, 3, Tiles(block_m=32, tile=64)),
        (1, 32, 2, Tiles(block_m=16, tile=32)),
        (64, 96, 1, Tiles(block_m=64, tile=32)),
    ],
)
def test_mixed_batch_in_triton(make_case, block_size, head_size, group_size, tiles):
    num_queries, contexts = mixed_lengths(max(block_size, 2))
    case = make_case(
        num_queries, contexts, block_size=block_size, head_size=head_size, group_size=group_size, num_kv_heads=1
    )
    check(backend_named("triton", tiles), case)


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize(("name", "tiles"), [("reference", None), ("torch", None), ("triton", SMALL_TILES)])
def test_decode_at_block_edges(make_case, name, tiles, block_size):
    contexts = edge_contexts(block_size)
    case = make_case([1] * len(contexts), contexts, block_size=block_size, group_size=3)
    check(backend_named(name, tiles), case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", EAGER)
def test_element_types(make_case, name, dtype):
    check(get_backend(name), make_case([1, 1, 9, 5], [33, 16, 9, 30], head_size=64, group_size=3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_element_types_in_triton(make_case, dtype):
    case = make_case([1, 9, 5], [33, 9, 30], head_size=64, num_kv_heads=1, group_size=3, dtype=dtype)
    check(backend_named("triton"), case)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("sliding_window", [None, 1, 3, 16, 17, 1000])
@pytest.mark.parametrize("name", EAGER)
def test_sliding_window_and_soft_cap(make_case, name, sliding_window, soft_cap):
    case = make_case([1, 1, 1, 20, 9, 1], [1, 17, 50, 40, 9, 32], group_size=2)
    check(get_backend(name), case, sliding_window, soft_cap)


@pytest.mark.parametrize(
    ("sliding_window", "soft_cap", "block_size", "tiles"),
    [
        (1, None, 16, SMALL_TILES),
        (3, 2.0, 4, SMALL_TILES),
        (16, None, 32, SMALL_TILES),
        (17, None, 4, None),
        (17, 2.0, 16, SMALL_TILES),
        (1000, 2.0, 16, None),
        (None, 2.0, 16, SMALL_TILES),
    ],
)
def test_sliding_window_and_soft_cap_in_triton(make_case, sliding_window, soft_cap, block_size, tiles):
    case = make_case([1, 20, 9, 1], [50, 40, 9, 32], num_kv_heads=1, block_size=block_size)
    check(backend_named("triton", tiles), case, sliding_window, soft_cap)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("name", [*EAGER, "triton"])
def test_value_heads_of_another_size(make_case, name, soft_cap):
    case = make_case([1, 1, 6], [19, 4, 21], block_size=4, head_size=48, value_head_size=20)
    check(get_backend(name), case, soft_cap=soft_cap)


@pytest.mark.parametrize("name", [*EAGER, "triton"])
def test_one_token(make_case, name):
    case = make_case([1], [1], head_size=16, group_size=1, num_kv_heads=1)
    check(get_backend(name), case)


@pytest.mark.parametrize(("name", "tiles"), [("reference", None), ("torch", None), ("triton", SMALL_TILES)])
def test_sequences_without_a_token_in_this_step(make_case, name, tiles):
    case = make_case([0, 1, 0, 0, 5, 1, 0], [9, 9, 20, 1, 21, 3, 7], block_size=4, num_kv_heads=1)
    check(backend_named(name, tiles), case)


@pytest.mark.parametrize("name", [*EAGER, "triton"])
def test_large_scores_do_not_overflow(make_case, name):
    case = make_case([1, 3], [33, 20], num_kv_heads=1)
    case.query.mul_(1e4)
    case.key_cache.mul_(1e2)
    for keys, _ in case.contiguous:
        keys.mul_(1e2)
    # Scores near 1e6: the softmax picks one position, and float32 may pick another one only where two tie.
    output = get_backend(name).attention(case.query, case.key_cache, case.value_cache, case.batch, scale=case.scale)
    torch.testing.assert_close(output.double(), case.expected(), rtol=0, atol=0.3)


@pytest.mark.parametrize("name", [*EAGER, "triton"])
def test_strided_query_and_caches(make_case, name):
    """K and V as the halves of one tensor, the query as a part of a fused projection."""
    case = make_case([1, 4], [18, 21], head_size=32)
    num_blocks, num_kv_heads, block_size, head_size = case.key_cache.shape
    pool = torch.empty(num_blocks, 2, num_kv_heads, block_size, head_size)
    pool[:, 0], pool[:, 1] = case.key_cache, case.value_cache
    fused = torch.cat([case.query, case.query], dim=1)
    output = get_backend(name).attention(
        fused[:, : case.query.shape[1]], pool[:, 0], pool[:, 1], case.batch, scale=case.scale
    )
    torch.testing.assert_close(output.double(), case.expected(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_cache_with_scattered_slots_is_refused(make_case, name):
    case = make_case([1], [3])
    scattered = case.key_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous per block and head"):
        get_backend(name).attention(case.query, scattered, case.value_cache, case.batch, scale=1.0)


@pytest.mark.parametrize("name", [*EAGER, "triton"])
def test_a_backend_serves_inside_and_outside_of_inference_mode(make_case, name):
    backend, case = get_backend(name), make_case([1, 4], [18, 21], dtype=torch.float16)
    with torch.inference_mode():
        check(backend, case)
    check(backend, case)


@pytest.mark.parametrize("name", [*EAGER, "triton"])
def test_one_backend_serves_step_after_step(make_case, name):
    """Steps of the same shape with other tables and contexts: nothing of the last step is kept."""
    backend = get_backend(name)
    for contexts in ([9, 20], [20, 9], [21, 10]):
        check(backend, make_case([1, 3], contexts, block_size=4))
