"""Decodes shared out over several programs, and one launch per phase: the same attention, whatever is launched."""

import pytest
import torch

from kvscope.kernels.triton_backend import Phase, TritonBackend
from kvscope.kernels.triton_tiles import MAX_SPLITS, NO_SPLITS, Splits, Tiles, compiled_splits

TILES = Tiles(block_m=16, tile=16)
TOLERANCE = 3e-6


def attend(backend, case, sliding_window=None, soft_cap=None):
    return backend.attention(
        case.query,
        case.key_cache,
        case.value_cache,
        case.batch,
        scale=case.scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def check(backend, case, sliding_window=None, soft_cap=None):
    output = attend(backend, case, sliding_window, soft_cap)
    assert output.isfinite().all()
    torch.testing.assert_close(output.double(), case.expected(sliding_window, soft_cap), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("splits", "sliding_window", "soft_cap"),
    [
        (Splits(1, 8), None, None),
        (Splits(2, 8), None, None),
        (Splits(4, 3), None, 2.0),
        (Splits(8, 64), None, None),
        (Splits(64, 1000), None, None),
        (Splits(4, 64), 1, None),
        (Splits(4, 64), 17, None),
        (Splits(8, 64), 40, 2.0),
    ],
)
@pytest.mark.parametrize("block_size", [4, 32])
def test_split_decodes(make_case, block_size, splits, sliding_window, soft_cap):
    """Contexts of one position, of a tile, of many: some are not split, some have fewer parts than were launched."""
    case = make_case([1] * 4, [1, 16, 50, 131], block_size=block_size, num_kv_heads=1, group_size=3)
    check(TritonBackend(TILES, splits), case, sliding_window, soft_cap)


@pytest.mark.parametrize("splits", [NO_SPLITS, Splits(4, 16)])
def test_one_launch_per_phase(make_case, splits):
    """Decodes between prefills, and sequences without a token: every one is computed, by one launch and no other."""
    case = make_case([5, 1, 0, 9, 1, 2], [5, 70, 9, 30, 3, 40], block_size=4, num_kv_heads=2, group_size=3)
    check(TritonBackend(TILES, splits, by_phase=True), case)


def test_prefills_alone_are_one_launch(make_case):
    case = make_case([4, 4], [4, 20], num_kv_heads=1)
    check(TritonBackend(TILES, Splits(4, 16), by_phase=True), case)


def test_a_value_head_of_another_size_and_heads_that_are_padded(make_case):
    case = make_case([1, 1], [90, 33], block_size=8, head_size=48, value_head_size=20, group_size=5)
    check(TritonBackend(TILES, Splits(8, 100)), case)


class PoisonedScratch(TritonBackend):
    """Keeps the scratch of its last launch, which begins as NaN."""

    def _new_parts(self, shape, value_head_size, like):
        self.parts = torch.full((*shape, value_head_size), float("nan"))
        self.lse = torch.full(shape, float("nan"))
        return self.parts, self.lse


def test_the_long_sequence_is_split_and_the_short_ones_are_not(make_case):
    case = make_case([1, 1, 1], [200, 10, 9], num_kv_heads=1)
    backend = PoisonedScratch(TILES, Splits(8, 8))
    check(backend, case)
    # 219 positions over 8 programs are 28 each, in tiles of 16 that is 32: seven parts of 200, and the rest whole.
    assert backend.lse.isfinite()[:, 0].sum(1).tolist() == [7, 0, 0]
    # Only what the window shows is shared out: 59 positions, 16 each; the last 40 of 200 begin at 160.
    check(backend, case, sliding_window=40)
    assert backend.lse.isfinite()[:, 0].sum(1).tolist() == [3, 0, 0]


@pytest.mark.parametrize(("phase", "mine"), [(Phase.DECODE, [False, True]), (Phase.PREFILL, [True, False])])
def test_a_launch_leaves_the_other_phase_alone(make_case, phase, mine):
    case = make_case([3, 1], [5, 70], num_kv_heads=1)
    output = torch.full_like(case.query, float("nan"))
    caches = (case.key_cache, case.value_cache)
    TritonBackend(TILES, Splits(4, 16))._launch(
        phase, output, case.query, *caches, case.batch, case.scale, sliding_window=None, soft_cap=None
    )
    prefill, decode = output[:3], output[3:]
    assert [prefill.isfinite().all(), decode.isfinite().all()] == mine
    assert [prefill.isnan().all(), decode.isnan().all()] == [not computed for computed in mine]


def test_unwritten_slots_change_no_bit(make_case):
    case = make_case([1, 1], [37, 90], block_size=16, num_kv_heads=1)
    backend = TritonBackend(TILES, Splits(4, 16))
    baseline = attend(backend, case.with_unwritten(0.0, garbage=0))
    for fill, garbage in ((float("nan"), 2**31 - 1), (float("inf"), -1), (3e38, -(2**31))):
        assert torch.equal(attend(backend, case.with_unwritten(fill, garbage)), baseline)


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "expected"),
    [
        (1, 8, 64),  # 264 programs wanted, 8 there: 33 each
        (1, 1, MAX_SPLITS),
        (4, 8, 16),
        (24, 8, 2),
        (32, 8, 1),  # 256 of 264: full
        (128, 8, 1),
    ],
)
def test_a_launch_is_made_for_as_many_splits_as_fill_the_device(num_seqs, num_kv_heads, expected):
    splits = compiled_splits(num_seqs=num_seqs, num_kv_heads=num_kv_heads, num_multiprocessors=132)
    assert splits.per_sequence == expected
