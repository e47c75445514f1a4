"""Attention reads the slots of a sequence's context and nothing else, bit for bit."""

import pytest
import torch

from kvscope.kernels.backend import get_backend

NAMES = ("reference", "torch", "triton")
NAN, INFINITY = float("nan"), float("inf")


def attend(backend, case, sliding_window, soft_cap):
    return backend.attention(
        case.query,
        case.key_cache,
        case.value_cache,
        case.batch,
        scale=case.scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(None, None), (5, None), (None, 3.0)])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", NAMES)
def test_unwritten_slots_and_undefined_table_entries_change_no_bit(
    make_case, name, block_size, sliding_window, soft_cap
):
    """Tails of used blocks, blocks of nobody, and entries past the context: NaN, infinities, large and small."""
    query_lengths, contexts = [1, 1, 6, 1, 5], [1, block_size + 1, block_size + 2, 3 * block_size, 5]
    case = make_case(query_lengths, contexts, block_size=block_size, num_kv_heads=1)
    backend = get_backend(name)
    baseline = attend(backend, case.with_unwritten(0.0, garbage=0), sliding_window, soft_cap)
    assert baseline.isfinite().all()
    for fill, garbage in ((NAN, 2**31 - 1), (INFINITY, -1), (-INFINITY, 1), (3e38, -(2**31))):
        output = attend(backend, case.with_unwritten(fill, garbage), sliding_window, soft_cap)
        assert torch.equal(output, baseline), f"unwritten slots of {fill}, table entries of {garbage}"


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", [*NAMES, "numba"])
def test_what_fell_out_of_the_window_is_not_read(make_case, name, block_size):
    """Blocks before every query's window may be gone; the block in which it begins may not."""
    query_lengths, contexts = [1, 1, 6, 1, 21, 3], [80, 3 * block_size, 70, 5 * block_size + 1, 80, 2]
    for sliding_window in (1, 5, 17, block_size + 1, 2 * block_size):
        case = make_case(query_lengths, contexts, block_size=block_size)
        past = case.without_past(sliding_window)
        assert not torch.equal(past.batch.block_tables, case.batch.block_tables)
        output = attend(get_backend(name), past, sliding_window, None)
        assert torch.equal(output, attend(get_backend(name), case, sliding_window, None))


@pytest.mark.parametrize("name", NAMES)
def test_every_written_slot_counts(make_case, name):
    """The counterpart: a change in any slot of the context is seen by the sequence that owns it, and no other."""
    case = make_case([1, 1], [6, 5], block_size=4, num_kv_heads=1, group_size=1)
    backend = get_backend(name)
    baseline = attend(backend, case, None, None)
    for sequence, context_length in enumerate(case.batch.context_lengths.tolist()):
        for position in range(context_length):
            block = case.batch.block_tables[sequence, position // 4]
            for cache in (case.key_cache, case.value_cache):
                kept = cache[block, :, position % 4].clone()
                cache[block, :, position % 4] += 1.0
                changed = attend(backend, case, None, None)
                cache[block, :, position % 4] = kept
                assert not torch.equal(changed[sequence], baseline[sequence]), f"position {position} is not read"
                assert torch.equal(changed[1 - sequence], baseline[1 - sequence])


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_sees_no_later_token(make_case, name):
    case = make_case([8], [14], block_size=4, num_kv_heads=1)
    backend = get_backend(name)
    baseline = attend(backend, case, None, None)
    block = case.batch.block_tables[0, 13 // 4]
    case.key_cache[block, :, 13 % 4] += 5.0
    case.value_cache[block, :, 13 % 4] += 5.0
    changed = attend(backend, case, None, None)
    assert torch.equal(changed[:7], baseline[:7])
    assert not torch.equal(changed[7], baseline[7])


@pytest.mark.parametrize("name", NAMES)
def test_attention_writes_nothing(make_case, name):
    case = make_case([1, 3], [5, 9], block_size=4)
    tensors = {
        "query": case.query,
        "keys": case.key_cache,
        "values": case.value_cache,
        "table": case.batch.block_tables,
    }
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    attend(get_backend(name), case, 4, 2.0)
    for key, tensor in tensors.items():
        torch.testing.assert_close(tensor, before[key], rtol=0, atol=0, equal_nan=True, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_padding_tokens_stay_untouched(make_case, monkeypatch, name):
    """Nothing is stored for tokens past `query_start[-1]` (a captured graph has them), nor for rows that pad a tile."""
    case = make_case([1, 4], [9, 6], block_size=4, num_kv_heads=1, group_size=3)
    padded = torch.cat([case.query, case.query[:2]])

    new_empty = torch.Tensor.new_empty

    def new_nan(*arguments, **options):
        made = new_empty(*arguments, **options)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)
    output = get_backend(name).attention(padded, case.key_cache, case.value_cache, case.batch, scale=case.scale)
    assert output[:5].isfinite().all()
    assert output[5:].isnan().all()
