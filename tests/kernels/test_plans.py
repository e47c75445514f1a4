"""What the backends decide before they compute: layout, chunks of decodes, tile sizes."""

from itertools import product

import pytest
import torch

from kvscope.kernels.layout import CacheLayout
from kvscope.kernels.torch_plan import MAX_CHUNK_ELEMENTS, plan_step
from kvscope.kernels.triton_tiles import MIN_DOT_ROWS, compiled_tiles, interpreted_tiles, next_power_of_two


def plan(case, sliding_window=None):
    return plan_step(case.batch, CacheLayout.of(case.key_cache), case.key_cache.shape[3], sliding_window)


def test_each_sequence_is_computed_once(make_case):
    case = make_case([1, 4, 1, 0, 1, 2], [9, 12, 30, 7, 1, 2], block_size=4)
    step = plan(case)
    decoded = torch.cat([chunk.tokens for chunk in step.decode_chunks])
    assert sorted(decoded.tolist()) == [0, 5, 6]
    assert [sequence.tokens for sequence in step.prefill_sequences] == [slice(1, 5), slice(7, 9)]


def test_a_short_context_is_not_padded_to_a_long_one(make_case):
    step = plan(make_case([1] * 4, [400, 10, 390, 9], block_size=4))
    assert [(chunk.tokens.tolist(), chunk.num_slots) for chunk in step.decode_chunks] == [([0, 2], 400), ([1, 3], 12)]


def test_chunks_fit_in_the_cache_of_a_cpu(make_case):
    case = make_case([1] * 6, [1000, 1001, 1002, 1003, 1004, 1005], num_kv_heads=8, group_size=1, head_size=32)
    step = plan(case)
    assert len(step.decode_chunks) > 1
    for chunk in step.decode_chunks:
        elements = len(chunk.tokens) * 8 * chunk.num_slots * 32
        assert elements <= MAX_CHUNK_ELEMENTS * 1.02  # up to a block per sequence of rounding


def test_a_window_gathers_its_own_blocks_only(make_case):
    case = make_case([1], [100], block_size=4, num_kv_heads=1)
    (chunk,) = plan(case, sliding_window=6).decode_chunks  # positions 94..99: L23 from its third slot, L24
    assert chunk.cache_rows.tolist() == case.batch.block_tables[0, 23:25].tolist()
    assert chunk.hidden.flatten().tolist() == [True, True, *[False] * 6]


def test_full_blocks_need_no_mask(make_case):
    (chunk,) = plan(make_case([1, 1], [16, 16], block_size=4)).decode_chunks
    assert chunk.hidden is None


def test_layout_of_a_half_of_a_pool():
    pool = torch.arange(5 * 2 * 3 * 4 * 8).view(5, 2, 3, 4, 8).float()
    layout = CacheLayout.of(pool[:, 1])
    assert layout == CacheLayout(block_size=4, num_kv_heads=3, rows_per_block=6, rows_per_head=1)
    rows = layout.rows(pool[:, 1])[layout.row_ids(torch.tensor([4, 2]))]  # [num_kv_heads, num_blocks, ...]
    assert torch.equal(rows.view(3, 2, 4, 8), pool[[4, 2], 1].transpose(0, 1))


@pytest.mark.parametrize("one_query", [True, False])
def test_tiles_hold_a_query_and_suit_the_matrix_units(one_query):
    for group_size, head_size, element_size in product((1, 3, 8, 32, 128), (16, 80, 128, 256), (2, 4)):
        tiles = compiled_tiles(
            one_query=one_query, group_size=group_size, head_size=head_size, element_size=element_size
        )
        assert tiles.block_m >= max(MIN_DOT_ROWS, group_size)
        assert tiles.block_m & (tiles.block_m - 1) == 0
        assert tiles.tile >= MIN_DOT_ROWS
        assert tiles.tile & (tiles.tile - 1) == 0


def test_interpreted_tiles_hold_small_steps_whole():
    tiles = interpreted_tiles(group_size=3, max_query_length=20, max_context_length=130)
    assert tiles[:2] == (128, 256)
    assert interpreted_tiles(group_size=3, max_query_length=10**6, max_context_length=10**6)[:2] == (512, 512)


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32), (80, 128)])
def test_next_power_of_two(n, power):
    assert next_power_of_two(n) == power
