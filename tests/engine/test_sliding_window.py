"""Blocks that fell out of every layer's sliding window are given up, and nothing that is still read ever is."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvscope.analysis.ledger import Bookkeeper
from kvscope.analysis.pool_meter import PoolMeter
from kvscope.engine import build
from kvscope.engine.attention import LayerGeometry
from kvscope.engine.block_pool import BlockPool
from kvscope.engine.block_tables import BlockTables, Extent
from kvscope.engine.config import EngineConfig
from kvscope.engine.intake import RequestRefusedError
from kvscope.engine.model_hub import resolve_model
from kvscope.engine.model_loader import LoadedModel, load_model
from kvscope.engine.request import Sequence
from kvscope.events import transposed
from kvscope.events import types as ev
from kvscope.events.codec import encode_batch
from kvscope.events.fold import apply_batch, apply_event, begin_batch
from kvscope.events.fold_transposed import apply_transposed
from kvscope.events.state import EngineState
from kvscope.events.types import SamplingParams
from kvscope.kernels.backend import get_backend
from kvscope.transport.timetravel.survey import held_after
from kvscope.transport.timetravel.watch import lets_go_of

from .test_architectures import SMALL, save

WINDOW = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def tiny_model(config: Any, directory: Path) -> LoadedModel:
    save(config, directory)
    return load_model(EngineConfig(model=str(directory), dtype="float32"), get_backend("torch"))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    config = transformers.MistralConfig(**{**SMALL, "sliding_window": WINDOW, "max_position_embeddings": 512})
    return tiny_model(config, tmp_path_factory.mktemp("mistral"))


@pytest.fixture
def stress(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stress campaign, on engines whose free blocks hold nothing but NaN."""
    spec = importlib.util.spec_from_file_location("stress", Path(__file__).parents[1] / "campaigns" / "stress.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "build_engine", lambda *args: poison(build.build_engine(*args)))
    return module


def poison(engine: Any) -> Any:
    """Before each forward pass every block that nobody holds or keeps is filled with NaN."""
    runner, pool, run = engine._runner, engine.scheduler.pool, engine._runner.run

    def poisoned(*args: Any) -> Any:
        nobodys = [b for b, refs in enumerate(pool.ref_counts) if not refs and not pool.is_cached(b)]
        for tensor in (tensor for cache in runner.caches.values() for tensor in cache):
            tensor[nobodys] = float("nan")
        return run(*args)

    runner.run = poisoned
    return engine


def given_up(fixture: Any) -> list[ev.BlocksOutOfWindow]:
    return [e for batch in fixture.sink.batches for e in batch.events if isinstance(e, ev.BlocksOutOfWindow)]


def test_equal_to_transformers_with_poisoned_free_blocks(stress: Any, mistral: LoadedModel) -> None:
    """Both preemption modes, prefix hits, candidates and beams, on a fraction of the memory."""
    rows = stress.stress(mistral, num_requests=12, max_tokens=24, pool=0.2)
    assert [failure for row in rows for failure in row.failures()] == []
    assert all(row.ties < row.sequences // 4 for row in rows)


@pytest.mark.parametrize("backend", ["reference", "torch", "numba"])
def test_chunked_prefill_and_decode_on_every_backend(
    real_engine: Callable[..., Any], mistral: LoadedModel, stress: Any, backend: str
) -> None:
    """A prompt and its output are many windows long; P0, which stands in for what is gone, is another's or NaN."""
    job = stress.Job("To be, or not to be, that is the question. " * 5, GREEDY)
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(mistral.name), dtype=torch.float32).eval()
    expected = stress.reference(model, mistral, job)
    flags = {"enable_prefix_caching": False, "num_gpu_blocks_override": 16, "attention_backend": backend}
    fixture = real_engine(mistral, block_size=4, max_num_batched_tokens=11, **flags)
    poison(fixture.engine)
    requests = [fixture.engine.submit(job.prompt, GREEDY, f"r{i}") for i in range(2)]
    assert len(requests[0].prompt_token_ids) + GREEDY.max_tokens > 16 * 4, "longer than the whole pool"
    fixture.run()
    for request in requests:
        assert set(stress.compare(request, expected)) <= {"equal", "tie"}
    assert len(given_up(fixture)) > 30


def test_what_is_held_is_bounded_by_the_window(fake_engine: Callable[..., Any]) -> None:
    """Decode: the window's blocks and one; chunked prefill: a chunk's more."""
    for window, block_size, chunk in ((16, 4, 8), (5, 4, 3), (1, 2, 5), (7, 1, 64), (10, 3, 1)):
        sizes = {"num_blocks": 128, "max_num_batched_tokens": chunk, "max_model_len": 256}
        fixture = fake_engine(block_size=block_size, sliding_window=window, **sizes)
        fixture.engine.submit("", SamplingParams(max_tokens=120), "r", list(range(1, 41)))
        fixture.run()
        blocks = -(-window // block_size)
        for state in fixture.states():
            sequence = state.requests["r"].sequences[0] if state.requests else None
            if sequence is not None and sequence.block_table:
                is_decoding = len(sequence.token_ids) > 0
                assert len(sequence.block_table) <= blocks + 2 + (0 if is_decoding else chunk // block_size)
                if state.phase == "commit":
                    assert len(sequence.block_table) <= max(blocks, -(-2 // block_size)) + 1
                    assert sequence.num_released > 0 or sequence.num_written < window + 2 * block_size


@pytest.mark.parametrize(("window", "first_read"), [(None, 0), (1, 9), (2, 9), (3, 8), (10, 1), (11, 0), (12, 0)])
def test_only_what_no_layer_reads_is_given_up(window: int | None, first_read: int) -> None:
    """Blocks of one slot, 10 of 11 positions computed: the next token is the eleventh."""
    events: list[ev.Event] = []
    tables = BlockTables(BlockPool(16, 1), events, window=window)
    sequence = Sequence("r.0", 0, [1] * 11)
    tables.prepare(Extent(sequence, 0, 10))
    sequence.num_computed = 10
    tables.release_out_of_window(sequence)
    assert (sequence.num_released, len(sequence.block_table)) == (first_read, 10 - first_read)
    assert len(events) == (2 if first_read else 1)
    assert tables.check_integrity([sequence]) == []


def test_integrity_says_what_was_given_up_too_early() -> None:
    tables = BlockTables(BlockPool(16, 4), [], window=6)
    sequence = Sequence("r.0", 0, [1] * 9)
    tables.prepare(Extent(sequence, 0, 8))
    sequence.num_computed = 8
    tables.pool.release(sequence.block_table[:1])
    sequence.block_table, sequence.num_released = sequence.block_table[1:], 1
    assert tables.check_integrity([sequence]) == ["r.0 has given up L0-L0, its next token reads from 3 on"]


@pytest.mark.parametrize(("window", "block_size", "most"), [(1, 1, 4), (2, 1, 4), (3, 1, 5), (8, 4, 4), (9, 4, 5)])
def test_most_that_a_sequence_holds(window: int, block_size: int, most: int) -> None:
    """The window's blocks and one at either end; those of a step's tokens come once, however many sequences."""
    tables = BlockTables(BlockPool(16, block_size), [], window=window)
    assert tables.most_held(1, 0) == most
    assert tables.most_held(3, 5 * block_size) == 3 * most + 5


def test_a_request_larger_than_the_pool_runs_alone_and_beside_others(fake_engine: Callable[..., Any]) -> None:
    """The worst case is window and chunk, not the length: 4 blocks of 4 for 12 + 60 positions."""
    sizes = {"block_size": 4, "sliding_window": 8, "max_num_batched_tokens": 4, "max_model_len": 128}
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    alone = fake_engine(num_blocks=5, admission="worst-case", **sizes)
    request = alone.engine.submit("", params, "r", [1, 2, 3] * 4)
    alone.run()
    assert len(request.sequences[0].generated) == 60
    with pytest.raises(RequestRefusedError, match="can need 5 blocks; the pool has 4"):
        fake_engine(num_blocks=4, **sizes).engine.submit("", params, "r", [1, 2, 3] * 4)

    beside = fake_engine(num_blocks=10, admission="worst-case", **sizes)
    for name in "abc":
        beside.engine.submit("", params, name, [1, 2, 3] * 4)
    beside.engine.step()
    assert [request.request_id for request in beside.engine.scheduler.running] == ["a"]
    beside.engine.step()
    beside.engine.step()
    beside.engine.step()
    assert [request.request_id for request in beside.engine.scheduler.running] == ["a", "b"]
    beside.run()
    assert beside.engine.counters.preemptions == 0


def test_the_recorded_form_folds_to_the_same_state(
    fake_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches on their side, folded column by column, without what has fallen out of the window."""
    monkeypatch.setattr(transposed, "MIN_GROUP", 1)
    fixture = fake_engine(num_blocks=24, sliding_window=6, prefix_caching=True)
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True)
    for name in "ab":
        fixture.engine.submit("", params, name, [1, 2, 3] * 3)
    fixture.run()
    state = EngineState()
    for batch in fixture.sink.batches:
        data = transposed.transpose(encode_batch(batch))
        whole = transposed.read_transposed(data) if data is not None else None
        state = apply_batch(state, batch) if whole is None else apply_transposed(state, whole)
    assert state == fixture.engine.state()
    assert len(given_up(fixture)) > 10


def test_accounts_kept_event_by_event_are_those_of_the_state(fake_engine: Callable[..., Any]) -> None:
    """Of the pool, of what is held, and of tokens that lie in several blocks, although the first of them are gone."""
    fixture = fake_engine(num_blocks=14, sliding_window=10, num_host_blocks=40, preemption="swap")
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True, temperature=0.0)
    for name in "abc":
        fixture.engine.submit("", params, name, [1, 2, 3] * 3)
    fixture.run()
    state, meter, held, most_duplicates = EngineState(), PoolMeter(), 0, 0
    for batch in fixture.sink.batches:
        begin_batch(state, batch)
        for event in batch.events:
            meter.before_event(state, event)
            state = apply_event(state, event)
            meter.after_event(state, event)
            held = held_after(held, state, event)
            if isinstance(event, ev.BlocksReleased | ev.BlocksOutOfWindow | ev.BlocksSwappedOut):
                assert all(lets_go_of(block_id).matches(event) for block_id in event.block_ids)
        fresh = PoolMeter()
        fresh.on_state(state)
        assert meter.figures == fresh.figures
        assert held == meter.figures.held
        duplicates = Bookkeeper().draw_up(state).duplicates
        assert duplicates == count_duplicates(state)
        is_behind = any(sequence.num_released for r in state.requests.values() for sequence in r.sequences)
        most_duplicates = max(most_duplicates, duplicates if is_behind else 0)
    assert most_duplicates > 1
    assert state.counters.blocks_swapped_in > 0


def count_duplicates(state: EngineState) -> int:
    """Full blocks whose tokens, from the first on, are those of another held block; from the definition."""
    holders: dict[tuple[int, ...], set[int]] = {}
    for request in state.requests.values():
        for sequence in request.sequences:
            tokens = [*request.prompt_token_ids, *sequence.token_ids]
            for logical, block_id in enumerate(sequence.block_table, sequence.num_released):
                if sequence.num_written >= (logical + 1) * 4:
                    holders.setdefault(tuple(tokens[: (logical + 1) * 4]), set()).add(block_id)
    return sum(len(blocks) - 1 for blocks in holders.values())


def test_a_hit_needs_the_whole_chain(fake_engine: Callable[..., Any]) -> None:
    """What fell out of the window stays cached; a hit walks the chain, and gives the far part back at once."""
    fixture = fake_engine(num_blocks=10, sliding_window=6, prefix_caching=True, max_model_len=64)
    prompt = list(range(1, 34))
    fixture.engine.submit("", SamplingParams(max_tokens=2), "a", prompt)
    fixture.run()
    fixture.engine.submit("", SamplingParams(max_tokens=2), "b", prompt)
    fixture.engine.step()
    fixture.check()
    batch = next(b for b in fixture.sink.batches if any(isinstance(e, ev.BlocksReused) for e in b.events))
    [reused] = [e for e in batch.events if isinstance(e, ev.BlocksReused)]
    [gone] = [e for e in batch.events if isinstance(e, ev.BlocksOutOfWindow)]
    assert len(reused.block_ids) == 8
    assert gone.block_ids == gone.cached_block_ids == reused.block_ids[:6]
    fixture.run()

    # Evicts L5 and L4, which were given up first; L6 and L7, the window's own, are kept and of no use.
    fixture.engine.submit("", SamplingParams(max_tokens=2), "other", [40] * 15)
    fixture.run()
    fixture.engine.submit("", SamplingParams(max_tokens=2), "c", prompt)
    fixture.run()
    lookup = [e for b in fixture.sink.batches for e in b.events if isinstance(e, ev.PrefixLookup)][-1]
    assert (lookup.request_id, lookup.num_hit_tokens, lookup.miss) == ("c", 16, "evicted")


def test_one_layer_that_sees_everything_keeps_everything(
    real_engine: Callable[..., Any], tmp_path: Path, fake_engine: Callable[..., Any]
) -> None:
    full, near, far = (LayerGeometry(2, 16, 16, window, None) for window in (None, 4, 9))
    assert build.common_window({0: near, 1: full}) is None
    assert build.common_window({0: near, 1: far, 2: near}) == 9
    values = {**SMALL, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
    mixed = tiny_model(transformers.Gemma2Config(**values), tmp_path)
    fixture = real_engine(mixed, block_size=4)
    assert fixture.engine.info.sliding_window is None
    fixture.engine.submit("To be, or not to be, that is the question", GREEDY, "r")
    fixture.run()
    assert given_up(fixture) == []

    contiguous = fake_engine(num_blocks=16, sliding_window=4, allocator="contiguous")
    contiguous.engine.submit("", SamplingParams(max_tokens=20, ignore_eos=True), "r", [1] * 9)
    contiguous.run()
    assert given_up(contiguous) == []


def test_the_model_says_how_far_it_looks_back(mistral: LoadedModel) -> None:
    assert build.prepare(EngineConfig(), loaded=mistral).info.sliding_window == WINDOW
