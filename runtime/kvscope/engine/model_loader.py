"""From a name to a model that is known to run correctly on paged KV.

A name is the embedded model, a model converted into the cache directory, a local directory, or a hub id. No
architecture is listed anywhere: the geometry of each layer is observed in a forward pass, and the paged path must
then reproduce the model's own logits, or the model is refused.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from kvscope.engine import attention
from kvscope.engine.attention import LayerGeometry
from kvscope.engine.config import DEFAULT_MAX_MODEL_LEN, ConfigError, EngineConfig
from kvscope.engine.dtype_probe import faster_dtype, typical_linear
from kvscope.engine.fast_layers import restore, speed_up
from kvscope.engine.kv_scales import KvPeaks
from kvscope.engine.model_checks import (
    check_complete,
    check_windows,
    observe_layers,
    own_logits,
    position_limit,
    verify_paged,
)
from kvscope.engine.model_hub import explain_failure, resolve_model
from kvscope.engine.packed_linears import pack_linears, watch_linears
from kvscope.kernels.backend import AttentionBackend

_DEFAULT_NUM_THREADS = torch.get_num_threads()
_MIN_PARAMETERS_FOR_THREADS = 30_000_000  # below, waiting for another core costs more than it brings


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
    kv_peaks: dict[int, KvPeaks]


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
    text_config = model.config.get_text_config(decoder=True)
    limit = position_limit(text_config)
    check_windows(model, layers, min(config.max_model_len or DEFAULT_MAX_MODEL_LEN, limit or DEFAULT_MAX_MODEL_LEN))
    with watch_linears(model) as calls:
        expected = own_logits(model)
    if device.type == "cpu":
        pack_linears(model, calls)
    kv_peaks = _verify_fast(model, layers, backend, expected)
    return LoadedModel(
        name=config.model,
        model=model,
        tokenizer=tokenizer,
        layers=layers,
        max_model_len=limit,
        vocab_size=int(model.get_input_embeddings().num_embeddings),
        eos_token_ids=_eos_token_ids(model, tokenizer),
        kv_peaks=kv_peaks,
    )


def _verify_fast(
    model: Any, layers: dict[int, LayerGeometry], backend: AttentionBackend, expected: Any
) -> dict[int, KvPeaks]:
    """Verify, on a CPU with the model's small operations replaced; if that is not right, then without."""
    undo = speed_up(model) if model.device.type == "cpu" else []
    try:
        return verify_paged(model, layers, backend, expected)
    except ConfigError:
        if not undo:
            raise
        restore(undo)
        return verify_paged(model, layers, backend, expected)


def choose_device(config: EngineConfig) -> torch.device:
    """CUDA where there is one, unless told otherwise."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _load_tokenizer(source: str, name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parsers do
        raise ConfigError(explain_failure(error, source, name, "tokenizer")) from None


def _load_weights(source: str, config: EngineConfig, device: torch.device) -> Any:
    try:
        dtype = _choose_dtype(source, config, device)
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    except ConfigError:
        raise
    except Exception as error:  # as above
        raise ConfigError(explain_failure(error, source, config.model, "model")) from None
    check_complete(report, config.model)
    _choose_num_threads(model)
    return model.to(device).eval()


def _choose_num_threads(model: Any) -> None:
    """A small model runs on one thread. On two busy cores this was 9 ms instead of 150 ms a step."""
    if "OMP_NUM_THREADS" not in os.environ:
        small = model.num_parameters() < _MIN_PARAMETERS_FOR_THREADS
        torch.set_num_threads(1 if small else _DEFAULT_NUM_THREADS)


def _choose_dtype(source: str, config: EngineConfig, device: torch.device) -> torch.dtype:
    """The checkpoint's own type on a GPU; on a CPU float32, or bfloat16 where that was tried and found faster."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    model_config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    own = getattr(model_config, "dtype", None)
    if device.type == "cpu":
        return _probe_dtype(model_config) if own in (torch.float16, torch.bfloat16) else torch.float32
    return own if isinstance(own, torch.dtype) else torch.float16


def _probe_dtype(model_config: Any) -> torch.dtype:
    """For a checkpoint of 16 bits, whose weights float32 makes no better. A small model gains nothing from less."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    if model.num_parameters() < _MIN_PARAMETERS_FOR_THREADS:
        return torch.float32
    dtype, milliseconds = faster_dtype(*typical_linear(model))
    figures = " and ".join(f"{took:.2f} ms in {str(kind)[6:]}" for kind, took in milliseconds.items())
    sys.stderr.write(f"kvscope: --dtype {str(dtype)[6:]}: a layer takes {figures} on this CPU\n")
    return dtype


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if isinstance(i, int))
