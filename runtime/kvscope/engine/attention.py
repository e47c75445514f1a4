"""Our attention behind transformers' `AttentionInterface`: any model that goes through it runs on paged KV.

The step's metadata travels as the keyword argument `paged` through the model's forward; the layer is told apart by
the module's `layer_idx`. Nothing is global but the registration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from kvscope.engine.config import ConfigError
from kvscope.engine.kv_scales import KvScales
from kvscope.kernels.backend import AttentionBackend
from kvscope.kernels.batch import PagedBatch

PAGED_ATTENTION = "kvscope_paged"
PROBE_ATTENTION = "kvscope_probe"

# Keyword arguments that carry no meaning for a packed causal batch without dropout.
_HARMLESS = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "output_router_logits",
        "output_attentions",
        "output_hidden_states",
        "is_causal",
        "return_dict",
    }
)


class LayerGeometry(NamedTuple):
    """What one layer keeps per token position and how it attends."""

    num_kv_heads: int
    key_size: int
    value_size: int
    sliding_window: int | None
    soft_cap: float | None


class LayerCache(NamedTuple):
    """K `[num_blocks, num_kv_heads, block_size, key_size]`, V the same with `value_size`."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class PagedStep:
    """What attention needs to know about a step, beside the model's own tensors."""

    batch: PagedBatch
    caches: dict[int, LayerCache]
    backend: AttentionBackend
    scales: Mapping[int, KvScales] = field(default_factory=dict)  # where KV is stored in 8 bits


@dataclass(slots=True)
class Probe:
    """Collects each layer's geometry from one forward pass, instead of reading it out of configurations."""

    layers: dict[int, LayerGeometry] = field(default_factory=dict)


def paged_attention_forward(
    module: Any,
    query: torch.Tensor,  # [1, num_query_heads, num_tokens, key_size]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_size]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_size]
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write this step's K and V into their slots, then attend over the blocks. Returns `[1, tokens, heads, size]`."""
    cache, scales = paged.caches[module.layer_idx], paged.scales.get(module.layer_idx)
    if scales is not None:
        query, key, value = scales.shrink(query, key, value)
    paged.backend.write_kv(
        key[0].transpose(0, 1), value[0].transpose(0, 1), cache.keys, cache.values, paged.batch.slot_mapping
    )
    output = paged.backend.attention(
        query[0].transpose(0, 1),
        cache.keys,
        cache.values,
        paged.batch,
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window=sliding_window,
        soft_cap=softcap,
    )
    return (output if scales is None else scales.restore(output)).unsqueeze(0), None


def probe_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    probe: Probe,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Note the layer's geometry; refuse by name what paged attention would ignore. Returns zeros of the right shape.

    Raises:
        ConfigError: the layer asks for something that is not implemented.
    """
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise ConfigError(
            f"{type(module).__name__} uses {', '.join(unknown)}, which paged attention does not implement"
        )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise ConfigError(f"{type(module).__name__} is not causal; only decoder-only models can run")
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer in probe.layers:
        raise ConfigError(f"{type(module).__name__} does not say which layer it is (layer_idx)")
    if query.shape[1] % key.shape[1]:
        raise ConfigError(
            f"{type(module).__name__}: {query.shape[1]} query heads do not group over {key.shape[1]} KV heads"
        )
    probe.layers[layer] = LayerGeometry(key.shape[1], key.shape[-1], value.shape[-1], sliding_window, softcap)
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def register() -> None:
    """Make both implementations known to transformers; may be called again."""
    AttentionInterface.register(PAGED_ATTENTION, paged_attention_forward)
    AttentionInterface.register(PROBE_ATTENTION, probe_attention_forward)
