"""--kv-cache-dtype: 8 bits take a byte per value, lose little, and touch nothing where they were not asked for."""

from typing import Any

import pytest
import torch

from kvscope.dashboard.translation import slot_bytes
from kvscope.engine import build
from kvscope.engine.attention import PagedStep, paged_attention_forward
from kvscope.engine.block_tables import Extent
from kvscope.engine.build import build_engine, check_kv_cache_dtype, prepare
from kvscope.engine.config import ConfigError, EngineConfig
from kvscope.engine.kv_scales import FP8, HEADROOM, KvPeaks, choose_scales
from kvscope.engine.model_loader import LoadedModel
from kvscope.engine.request import Sequence
from kvscope.engine.sinks import AuditSink
from kvscope.events import types as ev
from kvscope.events.types import SamplingParams

PROMPTS = ["ROMEO:", "To be, or not to be, that is the question", "KING RICHARD III:\nNow is the winter", "a"]
# A token whose two best logits are this near may become another one: see `test_logits_lose_little`.
NEAR = 1.0


def engine_of(loaded: LoadedModel, **flags: Any) -> Any:
    return build_engine(prepare(EngineConfig(**flags), loaded=loaded), AuditSink(keep=True))


def logits_of(loaded: LoadedModel, **flags: Any) -> torch.Tensor:
    """After each of a long text's chunks, through the engine's own runner."""
    runner = engine_of(loaded, block_size=4, **flags)._runner
    tokens = loaded.tokenizer(" ".join(PROMPTS * 3)).input_ids
    sequence = Sequence("r.0", 0, [])
    rows = []
    for start in range(0, len(tokens), 7):
        sequence.prompt_token_ids = tokens[: start + 7]
        sequence.block_table = list(range(-(-len(sequence.prompt_token_ids) // 4)))
        rows.append(runner.run([Extent(sequence, start, sequence.num_tokens)], [])["r.0"])
    return torch.stack(rows)


def test_a_block_takes_a_quarter_of_float32(tiny: LoadedModel) -> None:
    own, small = (prepare(EngineConfig(kv_cache_dtype=dtype), loaded=tiny).info for dtype in ("auto", "fp8_e4m3"))
    assert (own.kv_dtype, small.kv_dtype, small.dtype) == (own.dtype, "fp8_e4m3", own.dtype)
    assert own.bytes_per_block == getattr(torch, own.dtype).itemsize * small.bytes_per_block
    place = slot_bytes(small, block_id=3, slot=2)
    assert place is not None
    assert place.size == small.head_size
    engine = engine_of(tiny, kv_cache_dtype="fp8_e4m3", swap_space=0.001)
    tensors = [tensor for cache in engine._runner.caches.values() for tensor in cache]
    assert {tensor.dtype for tensor in tensors} == {FP8}
    assert sum(tensor[0].nbytes for tensor in tensors) == small.bytes_per_block
    assert engine.info.num_host_blocks == int(0.001 * build.GIB) // small.bytes_per_block


def test_auto_is_the_models_own(tiny: LoadedModel) -> None:
    """No scale, no cast: the very tensors that a layer gives are what the kernels are given."""
    engine = engine_of(tiny)
    assert engine._runner._scales == {}
    assert {tensor.dtype for cache in engine._runner.caches.values() for tensor in cache} == {tiny.model.dtype}
    given: list[torch.Tensor] = []

    class Spy:
        def write_kv(self, key: torch.Tensor, value: torch.Tensor, *_: Any) -> None:
            given.extend((key, value))

        def attention(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            given.append(query)
            return query

    step = PagedStep(type("Batch", (), {"slot_mapping": None}), engine._runner.caches, Spy())  # type: ignore[arg-type]
    tensors = [torch.randn(1, heads, 5, 16) for heads in (4, 2, 2)]
    output, _ = paged_attention_forward(type("Layer", (), {"layer_idx": 0}), *tensors, None, paged=step)
    key, value, query = given
    for got, made in zip((query, key, value), tensors, strict=True):
        assert got.data_ptr() == made.data_ptr()
    assert torch.equal(output[0], query)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_logits_lose_little(tiny: LoadedModel, backend: str) -> None:
    own = logits_of(tiny, attention_backend=backend, dtype="float32")
    small = logits_of(tiny, attention_backend=backend, kv_cache_dtype="fp8_e4m3")
    assert 0 < (small - own).norm() < 0.06 * own.norm()  # 1/16 of every K and V, and errors cancel
    assert (small - own).abs().max() < NEAR / 2


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_under_pressure_as_alone(tiny: LoadedModel, mode: Any) -> None:
    """Copies on write, preemption, swap and prefix hits move bytes: answers stay those of a lone request."""
    params = SamplingParams(n=2, temperature=0.0, max_tokens=16)
    room = {"swap_space": 0.001} if mode == "swap" else {}
    flags = {"kv_cache_dtype": "fp8_e4m3", "block_size": 4, "preemption": mode, **room}
    crowded = engine_of(tiny, num_gpu_blocks_override=24, **flags)
    requests = [crowded.submit(prompt, params, f"r{i}") for i, prompt in enumerate(PROMPTS)]
    while crowded.has_work():
        crowded.step()
    events = [event for batch in crowded._sink.batches for event in batch.events]
    assert any(isinstance(event, ev.RequestPreempted) for event in events)
    assert any(isinstance(event, ev.BlockCopied) for event in events)
    assert any(isinstance(event, ev.BlocksSwappedIn) for event in events) == (mode == "swap")
    assert crowded._sink.auditor.findings == crowded.check_integrity() == []
    for prompt, request in zip(PROMPTS, requests, strict=True):
        alone = engine_of(tiny, **flags)
        expected = alone.submit(prompt, params, "r").sequences[0]
        while alone.has_work():
            alone.step()
        for sequence in request.sequences:
            pairs = zip(sequence.generated, expected.generated, expected.choice_margins, strict=False)
            parted = next((margin for ours, theirs, margin in pairs if ours != theirs), None)
            assert parted is None or parted < NEAR / 10


def test_scales_are_powers_of_two_with_headroom() -> None:
    """The peaks of three heads, one of which has written nothing."""
    peaks = torch.tensor([28.0, 1e-3, 0.0])
    scales = choose_scales(KvPeaks(peaks, 3 * peaks), torch.bfloat16)
    assert scales.keys.view(-1).tolist() == [0.5, 2.0**-14, 1.0]
    for peak, scale in zip(3 * peaks, scales.values.view(-1), strict=True):
        assert torch.log2(scale.float()).frac() == 0
        assert HEADROOM * peak <= 448 * scale
    huge = torch.tensor([1e6, -1e6, 3.0, float("nan")]).expand(1, 3, 2, 4)
    query, key, value = scales.shrink(torch.ones(1, 6, 2, 4), huge, huge)
    assert key[0, 0, 0].tolist()[:3] == [448.0, -448.0, 6.0]
    assert value[0, 0, 0].tolist()[:3] == [448.0, -448.0, 1.5]
    assert key.to(FP8).float().isnan().sum() == value.isnan().sum() == 3 * 2
    assert query[0, :, 0, 0].tolist() == [0.5, 0.5, 2.0**-14, 2.0**-14, 1.0, 1.0]
    assert scales.restore(torch.ones(2, 6, 4))[0, ::2, 0].tolist() == scales.values.view(-1).tolist()


@pytest.mark.parametrize(
    ("capability", "hip", "is_refused"), [((8, 0), None, True), ((8, 9), None, False), ((9, 4), "6.2", True)]
)
def test_a_gpu_that_cannot_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, is_refused: bool
) -> None:
    monkeypatch.setattr(build, "choose_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.version, "hip", hip)
    check_kv_cache_dtype(EngineConfig())
    if not is_refused:
        check_kv_cache_dtype(EngineConfig(kv_cache_dtype="fp8_e4m3"))
        return
    with pytest.raises(ConfigError, match=r"capability 8\.9 or above, not Some GPU \(\d\.\d\); leave it out") as caught:
        check_kv_cache_dtype(EngineConfig(kv_cache_dtype="fp8_e4m3"))
    assert "\n" not in str(caught.value)
