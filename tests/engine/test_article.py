"""The article's six situations, from the real engine on the real model: block size 4, six blocks, requests B and C.

The article assumes no cache that keeps KV after a request has ended, so the prefix cache is off.
"""

from typing import Any

import pytest
import torch

from kvscope.engine.attention import PagedStep
from kvscope.engine.intake import RequestRefusedError
from kvscope.engine.model_loader import LoadedModel
from kvscope.events import types as ev
from kvscope.events.state import WaitingReason
from kvscope.events.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
B_TOKENS, C_TOKENS = [11, 12, 13, 14, 15, 16], [31, 32, 33, 34, 35, 36]


@pytest.fixture
def article(real_engine: Any, tiny: LoadedModel) -> Any:
    """Six blocks of four slots; the free list is ordered so that B gets P3, P0 and C gets P1, P4, then P5, P2."""
    return real_engine(
        tiny, block_size=4, num_gpu_blocks_override=6, enable_prefix_caching=False, free_order=[3, 0, 1, 4, 5, 2]
    )


def submit(fixture: Any, name: str, tokens: list[int], **changes: Any) -> Any:
    params = SamplingParams(**{**{f: getattr(GREEDY, f) for f in GREEDY.__struct_fields__}, **changes})
    return fixture.engine.submit("", params, name, list(tokens))


def table(fixture: Any, sequence_id: str) -> list[int]:
    """As a viewer sees it: from the folded events."""
    return fixture.sink.auditor.state.sequence(sequence_id).block_table


def written(fixture: Any) -> int:
    return sum(fixture.sink.auditor.state.written_slots)


def last_events(fixture: Any, kind: type[ev.Event]) -> list[Any]:
    step = fixture.engine.step_number
    return [e for batch in fixture.sink.batches if batch.step == step for e in batch.events if isinstance(e, kind)]


def test_blocks_make_room_where_a_reserved_maximum_does_not(article: Any) -> None:
    reserved_maximum, capacity = 20, 24
    assert capacity - reserved_maximum == 4 < len(C_TOKENS)  # reserving for B's maximum, C cannot join
    submit(article, "B", B_TOKENS)
    article.engine.step()
    assert len(table(article, "B.0")) == 2
    assert written(article) == 6
    submit(article, "C", C_TOKENS)
    article.engine.step()  # B processes position 6, C its prompt, side by side
    state = article.sink.auditor.state
    assert len(table(article, "C.0")) == 2
    assert state.num_free_blocks() * 4 == 8
    assert written(article) == 7 + 6
    held_slots = sum(count > 0 for count in state.ref_counts) * 4
    assert (held_slots, held_slots - written(article)) == (16, 3)
    article.check()


def test_slots_are_reserved_before_they_are_written(article: Any) -> None:
    submit(article, "B", B_TOKENS)
    seen: list[tuple[int, int]] = []
    run = article.engine._runner.run

    def look(*args: Any) -> Any:
        state = article.sink.auditor.state
        seen.append((sum(count > 0 for count in state.ref_counts), sum(state.written_slots)))
        return run(*args)

    article.engine._runner.run = look
    article.engine.step()
    assert seen == [(2, 0)]
    assert written(article) == 6


def test_reserving_the_maximum_keeps_c_out(real_engine: Any, tiny: LoadedModel) -> None:
    """The figure's upper half, on a real engine: 20 of 24 slots are B's, so C, 6 tokens long, waits for its end."""
    fixture = real_engine(tiny, block_size=4, num_gpu_blocks_override=6, allocator="contiguous")
    b = submit(fixture, "B", B_TOKENS, max_tokens=15)
    fixture.engine.step()
    assert (len(table(fixture, "B.0")) * 4, written(fixture)) == (20, 6)
    c = submit(fixture, "C", C_TOKENS, max_tokens=2)  # one token more than its KV: two blocks, as in the figure
    fixture.engine.step()
    assert table(fixture, "C.0") == []
    assert fixture.sink.auditor.state.requests["C"].waiting == WaitingReason("reservation", 2, 1)
    num_steps = 2 + fixture.run()
    assert (len(b.sequences[0].generated), num_steps) == (15, 15 + 2)  # C runs when B has ended

    paged = real_engine(tiny, block_size=4, num_gpu_blocks_override=6, enable_prefix_caching=False)
    requests = [submit(paged, "B", B_TOKENS, max_tokens=15), submit(paged, "C", C_TOKENS, max_tokens=2)]
    assert paged.run() == 15  # C runs beside B
    assert [r.sequences[0].generated for r in requests] == [r.sequences[0].generated for r in (b, c)]


def test_tables_connect_token_order_to_places(article: Any) -> None:
    submit(article, "B", B_TOKENS)
    article.engine.step()
    submit(article, "C", C_TOKENS)
    article.engine.step()
    assert table(article, "B.0") == [3, 0]
    assert table(article, "C.0") == [1, 4]
    position = 6
    assert (position // 4, position % 4, table(article, "B.0")[position // 4]) == (1, 2, 0)  # L1, slot 2, P0


def test_growth_takes_a_block_only_at_a_boundary(article: Any) -> None:
    submit(article, "B", B_TOKENS)
    article.engine.step()
    submit(article, "C", C_TOKENS)
    article.engine.step()
    c_blocks = table(article, "C.0")
    article.engine.step()  # B: 7 -> 8
    assert article.sink.auditor.state.sequence("B.0").num_written == 8
    assert table(article, "B.0") == [3, 0]
    article.engine.step()  # B: 8 -> 9
    assert article.sink.auditor.state.sequence("B.0").num_written == 9
    assert table(article, "B.0") == [3, 0, 5]
    assert table(article, "C.0")[:2] == c_blocks == [1, 4]
    article.check()


def test_attention_reads_exactly_the_valid_positions(article: Any) -> None:
    """Every slot but the nine valid ones is poisoned; the logits do not change by a bit."""
    submit(article, "B", B_TOKENS)
    article.engine.step()
    submit(article, "C", C_TOKENS)
    for _ in range(2):
        article.engine.step()
    engine, runner = article.engine, article.engine._runner
    plan = engine._schedule()  # B processes position 8
    (extent,) = [extent for extent in plan.extents if extent.sequence.sequence_id == "B.0"]
    assert (extent.start, extent.stop) == (8, 9)
    block_table = extent.sequence.block_table
    assert block_table == [3, 0, 5]
    read = [(block_table[p // 4], p % 4) for p in range(extent.stop)]
    assert [sum(block == b for block, _ in read) for b in (3, 0, 5)] == [4, 4, 1]
    expected = runner.run([extent], [])["B.0"]
    for cache in runner.caches.values():
        for tensor in cache:
            for block in range(6):
                for slot in range(4):
                    if (block, slot) not in read:
                        tensor[block, :, slot] = float("nan")
    assert torch.equal(runner.run([extent], [])["B.0"], expected)
    for block, slot in read[:-1]:  # and each of the nine does matter (the last is written by the step itself)
        saved = runner.caches[0].values[block, :, slot].clone()
        runner.caches[0].values[block, :, slot] += 1.0
        assert not torch.equal(runner.run([extent], [])["B.0"], expected), (block, slot)
        runner.caches[0].values[block, :, slot] = saved


def test_attention_reads_blocks_in_place(article: Any) -> None:
    """The step's metadata names the blocks themselves; no gathered buffer exists between pool and kernel."""
    submit(article, "B", B_TOKENS)
    article.engine.step()
    seen: list[PagedStep] = []
    runner = article.engine._runner
    model = runner.model

    def spy(**kwargs: Any) -> Any:
        seen.append(kwargs["paged"])
        return model(**kwargs)

    spy.device, spy.dtype = model.device, model.dtype  # type: ignore[attr-defined]
    runner.model = spy
    article.engine.step()
    assert seen[0].batch.block_tables.tolist() == [[3, 0]]
    assert seen[0].batch.context_lengths.tolist() == [7]
    assert seen[0].caches is runner.caches


def test_candidates_share_then_split_when_written(real_engine: Any, tiny: LoadedModel) -> None:
    fixture = real_engine(tiny, block_size=4, num_gpu_blocks_override=6, enable_prefix_caching=False)
    submit(fixture, "r", B_TOKENS, n=2, temperature=0.8, seed=3)
    fixture.engine.step()
    state = fixture.sink.auditor.state
    assert table(fixture, "r.0") == table(fixture, "r.1") == [0, 1]
    assert state.ref_counts == [2, 2, 0, 0, 0, 0]
    runner = fixture.engine._runner
    before = [tensor[1].clone() for cache in runner.caches.values() for tensor in cache]

    fixture.engine.step()
    (copy,) = last_events(fixture, ev.BlockCopied)
    assert (copy.sequence_id, copy.logical_block, copy.source_block, copy.target_block, copy.num_slots) == (
        "r.0",
        1,
        1,
        2,
        2,
    )
    assert table(fixture, "r.0") == [0, 2]
    assert table(fixture, "r.1") == [0, 1]  # in place, no copy
    state = fixture.sink.auditor.state
    assert state.ref_counts == [2, 1, 1, 0, 0, 0]
    assert state.written_slots == [4, 3, 3, 0, 0, 0]
    after = [tensor for cache in runner.caches.values() for tensor in cache]
    for old, new in zip(before, after, strict=True):  # p4 and p5 preserved in both, bit for bit (invariant 6)
        assert torch.equal(new[1, :, :2], old[:, :2])
        assert torch.equal(new[2, :, :2], old[:, :2])
    fixture.run()
    assert fixture.engine.counters.copies == 1


def test_a_full_last_block_is_never_copied(real_engine: Any, tiny: LoadedModel) -> None:
    fixture = real_engine(tiny, block_size=4, num_gpu_blocks_override=8, enable_prefix_caching=False)
    submit(fixture, "r", [*B_TOKENS, 17, 18], n=2, temperature=0.8, seed=3)
    fixture.engine.step()
    fixture.engine.step()
    assert table(fixture, "r.0") == [0, 1, 2]
    assert table(fixture, "r.1") == [0, 1, 3]
    assert list(fixture.sink.auditor.state.ref_counts[:4]) == [2, 2, 1, 1]
    fixture.run()
    assert fixture.engine.counters.copies == 0


def test_shared_blocks_stay_until_the_last_holder_ends(real_engine: Any, tiny: LoadedModel) -> None:
    fixture = real_engine(tiny, block_size=4, num_gpu_blocks_override=6, enable_prefix_caching=False)
    request = submit(fixture, "r", B_TOKENS, n=2, temperature=0.8, seed=3)
    fixture.engine.step()
    fixture.engine.step()
    fixture.engine._begin("control")
    fixture.engine._generation.finish(request.sequences[0], "cancelled")
    fixture.engine._publish()
    state = fixture.sink.auditor.state
    assert state.ref_counts == [1, 1, 0, 0, 0, 0]  # P0 stays for candidate 2, P2 is back
    fixture.run()
    assert fixture.sink.auditor.state.ref_counts == [0] * 6


def test_the_chosen_token_has_no_kv_yet(article: Any) -> None:
    request = submit(article, "B", B_TOKENS, max_tokens=1)
    article.engine.step()
    assert len(request.sequences[0].generated) == 1
    (write,) = last_events(article, ev.SlotsWritten)
    assert (write.start, write.stop) == (0, 6)


def test_what_can_never_fit_is_refused_with_the_numbers(article: Any) -> None:
    with pytest.raises(
        RequestRefusedError, match="6 prompt tokens with n=1 max_tokens=20 can need 7 blocks; the pool has 6 of 4 slots"
    ):
        submit(article, "B", B_TOKENS, max_tokens=20)
    article.check()
