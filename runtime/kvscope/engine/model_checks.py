"""Is this model right on paged KV? Observed and compared, never looked up by name of architecture."""

from typing import Any

import torch

from kvscope.engine import attention
from kvscope.engine.attention import LayerGeometry, Probe
from kvscope.engine.block_tables import Extent
from kvscope.engine.config import ConfigError
from kvscope.engine.decode_graphs import DecodeGraphs
from kvscope.engine.kv_scales import KvPeaks, measure_peaks
from kvscope.engine.model_runner import ModelRunner
from kvscope.engine.request import Sequence
from kvscope.kernels.backend import AttentionBackend

_NUM_PROBE_TOKENS = 23
# Paged and own logits may differ by rounding; a wrong mask, scale or position differs by far more.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.15, torch.bfloat16: 0.6}


def check_complete(report: dict[str, Any], name: str) -> None:
    """Every weight of the model must come from the checkpoint. transformers fills gaps with random numbers.

    Raises:
        ConfigError: weights are missing or have another shape; the first ones are named.
    """
    for what, key in (("missing", "missing_keys"), ("of another shape", "mismatched_keys")):
        names = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in report.get(key) or ())
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ConfigError(f"{name}: weights are {what}: {shown}; the checkpoint does not fit its config.json")


def observe_layers(model: Any) -> dict[int, LayerGeometry]:
    """Each layer's KV geometry, as seen by the attention function in one forward pass.

    Raises:
        ConfigError: some layers keep state elsewhere, or ask for what paged attention does not implement.
    """
    _use_attention(model, attention.PROBE_ATTENTION)
    probe = Probe()
    token_ids = torch.arange(2, device=model.device).unsqueeze(0)
    with torch.inference_mode():
        try:
            model(input_ids=token_ids, position_ids=token_ids, use_cache=False, probe=probe)
        except TypeError as error:
            raise ConfigError(
                f"{_architecture(model)} does not pass keyword arguments on to attention: {error}"
            ) from None
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    if not probe.layers or len(probe.layers) != expected:
        raise ConfigError(
            f"{_architecture(model)}: {len(probe.layers)} of {expected} layers go through transformers' "
            "AttentionInterface; the others keep state that is not paged KV"
        )
    return dict(sorted(probe.layers.items()))


def own_logits(model: Any) -> torch.Tensor:
    """What the model as transformers made it says after a short text: float32 `[vocab_size]`, on the CPU."""
    _use_attention(model, "eager")  # not sdpa: in transformers 5.17 that ignores soft caps
    with torch.inference_mode():
        token_ids = torch.tensor([_probe_tokens(model)], device=model.device)
        logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits[0, -1].float().cpu()
    if not torch.isfinite(logits).all():
        raise ConfigError(f"{_architecture(model)} gives logits that are not finite; its weights or --dtype are broken")
    return logits


def verify_paged(
    model: Any, layers: dict[int, LayerGeometry], backend: AttentionBackend, expected: torch.Tensor
) -> dict[int, KvPeaks]:
    """The logits of `own_logits` must come out on paged KV too, the text computed in uneven chunks.

    Returns how large K and V became in each layer.

    Raises:
        ConfigError: they do not, so the model would be silently wrong.
    """
    _use_attention(model, attention.PAGED_ATTENTION)
    runner = ModelRunner(model, layers, backend, num_blocks=8, block_size=4)
    sequence = Sequence("probe.0", 0, _probe_tokens(model))
    sequence.block_table = [5, 0, 3, 7, 1, 6]
    for start, stop in ((0, 6), (6, 22), (22, 23)):
        logits = runner.run([Extent(sequence, start, stop)], [])
    if too_far := _too_far(logits["probe.0"], expected, _TOLERANCE[model.dtype]):
        raise ConfigError(
            f"{_architecture(model)} cannot run on paged KV: its logits would differ {too_far} from its own attention's"
        )
    return {layer: measure_peaks(*cache) for layer, cache in runner.caches.items()}


def verify_replays(runner: ModelRunner, graphs: DecodeGraphs, num_positions: int) -> None:
    """A decode that is replayed must give the logits of the same decode launched kernel by kernel.

    Of the text of `own_logits`, as far as `num_positions` go. Leaves what nobody reads in the first blocks of the pool.

    Raises:
        ConfigError: it does not, so --cuda-graphs would be silently wrong.
    """
    tokens = _probe_tokens(runner.model)[:num_positions]
    sequence, last = Sequence("probe.0", 0, tokens), len(tokens) - 1
    sequence.block_table = list(range(last // runner.block_size + 1))
    if last:
        runner.run([Extent(sequence, 0, last)], [])
    replayed = runner.run([Extent(sequence, last, last + 1)], [])
    runner.graphs = None
    expected = runner.run([Extent(sequence, last, last + 1)], [])
    runner.graphs, graphs.num_replays = graphs, 0
    if too_far := _too_far(replayed["probe.0"], expected["probe.0"], _TOLERANCE[runner.model.dtype]):
        raise ConfigError(f"--cuda-graphs: the logits of a replayed step differ {too_far} from its own; leave it out")


def _too_far(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    """By how much, and what is allowed; None where that is not more."""
    difference, limit = (found - expected).abs().max().item(), tolerance * max(1.0, expected.abs().max().item() / 10)
    return None if difference <= limit else f"by {difference:.3g} (allowed {limit:.3g})"


def _probe_tokens(model: Any) -> list[int]:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return [(7 * i + 3) % min(vocab_size, 997) for i in range(_NUM_PROBE_TOKENS)]


def check_windows(model: Any, layers: dict[int, LayerGeometry], max_model_len: int) -> None:
    """Every window that the configuration promises must have been passed to attention, or never matter.

    The comparison of logits is shorter than most windows, so it cannot tell.

    Raises:
        ConfigError: some layers would see further than they were trained to.
    """
    config = model.config.get_text_config(decoder=True)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_model_len:
        raise ConfigError(
            f"{_architecture(model)} attends in chunks of {chunk} positions, which paged attention does not implement; "
            f"up to --max-model-len {chunk} it would be right"
        )
    window = getattr(config, "sliding_window", None)
    if window is None or window >= max_model_len:
        return
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers)
    promised = {layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"}
    if any(layers[layer].sliding_window is None for layer in promised & layers.keys()):
        raise ConfigError(
            f"{_architecture(model)} has a sliding window of {window} positions that it does not pass to attention; "
            f"up to --max-model-len {window} it would be right"
        )


def position_limit(config: Any) -> int | None:
    """How many positions the model can tell apart, whatever else is in the batch.

    Rotary embeddings of the kinds `longrope` and `dynamic` change for all sequences once one of them is long; they
    are right up to the length before that.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type") in ("longrope", "dynamic"):
            original = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(filter(None, (limit, original)), default=None)
    return limit


def _use_attention(model: Any, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ConfigError(f"{_architecture(model)} does not go through transformers' AttentionInterface")


def _architecture(model: Any) -> str:
    return type(model).__name__
