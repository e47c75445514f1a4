"""From a name to a model that is known to run correctly on paged KV.

A name is the embedded model, a model converted into the cache directory, a local directory, or a hub id. No
architecture is listed anywhere: the geometry of each layer is observed in a forward pass, and the paged path must
then reproduce the model's own logits, or the model is refused.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvscope.engine import attention
from kvscope.engine.attention import LayerGeometry, Probe
from kvscope.engine.block_tables import Extent
from kvscope.engine.config import ConfigError, EngineConfig
from kvscope.engine.model_hub import explain_failure, resolve_model
from kvscope.engine.model_runner import ModelRunner
from kvscope.engine.request import Sequence
from kvscope.kernels.backend import AttentionBackend

_NUM_PROBE_TOKENS = 23
_DEFAULT_NUM_THREADS = torch.get_num_threads()
_MIN_PARAMETERS_FOR_THREADS = 30_000_000  # below, waiting for another core costs more than it brings
# Paged and own logits may differ by rounding; a wrong mask, scale or position differs by far more.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.15, torch.bfloat16: 0.6}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A verified model. `max_model_len` is None where the configuration names no limit."""

    name: str
    model: Any
    tokenizer: Any
    layers: dict[int, LayerGeometry]
    max_model_len: int | None
    vocab_size: int
    eos_token_ids: frozenset[int]


def load_model(config: EngineConfig, backend: AttentionBackend) -> LoadedModel:
    """Load, observe, and verify against the backend that will run it.

    Raises:
        ConfigError: no such model, no tokenizer, or a model that paged attention cannot run; one line with the fix.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    attention.register()
    source = resolve_model(config.model)
    device = choose_device(config)
    tokenizer = _load_tokenizer(source, config.model)
    model = _load_weights(source, config, device)
    layers = observe_layers(model)
    verify_paged(model, layers, backend)
    text_config = model.config.get_text_config(decoder=True)
    return LoadedModel(
        name=config.model,
        model=model,
        tokenizer=tokenizer,
        layers=layers,
        max_model_len=getattr(text_config, "max_position_embeddings", None),
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=_eos_token_ids(model, tokenizer),
    )


def choose_device(config: EngineConfig) -> torch.device:
    """CUDA where there is one, unless told otherwise."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


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
    if len(probe.layers) != expected:
        raise ConfigError(
            f"{_architecture(model)}: {len(probe.layers)} of {expected} layers go through transformers' "
            "AttentionInterface; the others keep state that is not paged KV"
        )
    return dict(sorted(probe.layers.items()))


def verify_paged(model: Any, layers: dict[int, LayerGeometry], backend: AttentionBackend) -> None:
    """The model's own attention and ours must agree on a short text, computed in uneven chunks.

    Raises:
        ConfigError: they do not, so the model would be silently wrong.
    """
    token_ids = [
        (7 * i + 3) % min(model.config.get_text_config(decoder=True).vocab_size, 997) for i in range(_NUM_PROBE_TOKENS)
    ]
    _use_attention(model, "eager")  # not sdpa: in transformers 5.17 that ignores soft caps
    with torch.inference_mode():
        expected = (
            model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits[0, -1].float().cpu()
        )
    _use_attention(model, attention.PAGED_ATTENTION)
    runner = ModelRunner(model, layers, backend, num_blocks=8, block_size=4)
    sequence = Sequence("probe.0", 0, token_ids)
    sequence.block_table = [5, 0, 3, 7, 1, 6]
    for start, stop in ((0, 6), (6, 22), (22, 23)):
        logits = runner.run([Extent(sequence, start, stop)], [])
    difference = (logits["probe.0"] - expected).abs().max().item()
    limit = _TOLERANCE[model.dtype] * max(1.0, expected.abs().max().item() / 10)
    if not difference <= limit:
        raise ConfigError(
            f"{_architecture(model)} cannot run on paged KV: its logits would differ by {difference:.3g} from its own "
            f"attention's (allowed {limit:.3g})"
        )


def _load_tokenizer(source: str, name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers raises whatever its parsers do
        raise ConfigError(explain_failure(error, source, name, "tokenizer")) from None


def _load_weights(source: str, config: EngineConfig, device: torch.device) -> Any:
    try:
        dtype = _choose_dtype(source, config, device)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except ConfigError:
        raise
    except Exception as error:  # as above
        raise ConfigError(explain_failure(error, source, config.model, "model")) from None
    _choose_num_threads(model)
    return model.to(device).eval()


def _choose_num_threads(model: Any) -> None:
    """A small model runs on one thread. On two busy cores this was 9 ms instead of 150 ms a step."""
    if "OMP_NUM_THREADS" not in os.environ:
        small = model.num_parameters() < _MIN_PARAMETERS_FOR_THREADS
        torch.set_num_threads(1 if small else _DEFAULT_NUM_THREADS)


def _choose_dtype(source: str, config: EngineConfig, device: torch.device) -> torch.dtype:
    """float32 on a CPU, where half precision may be emulated; the checkpoint's own type on a GPU."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    if device.type == "cpu":
        return torch.float32
    own = getattr(AutoConfig.from_pretrained(source), "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.float16


def _use_attention(model: Any, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ConfigError(f"{_architecture(model)} does not go through transformers' AttentionInterface")


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int))


def _architecture(model: Any) -> str:
    return type(model).__name__
