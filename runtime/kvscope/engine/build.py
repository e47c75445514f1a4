"""From a configuration to an engine: loads the model, sizes the pool, checks what cannot work."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch

from kvscope.engine.attention import LayerGeometry
from kvscope.engine.config import DEFAULT_MAX_MODEL_LEN, ConfigError, EngineConfig, use_prefix_caching
from kvscope.engine.cpu_tapes import MAX_TAPED_SEQS, record
from kvscope.engine.decode_graphs import CudaCapture
from kvscope.engine.engine import Engine
from kvscope.engine.host_memory import free_host_bytes
from kvscope.engine.kv_scales import FP8, KvScales, choose_scales
from kvscope.engine.model_checks import verify_replays
from kvscope.engine.model_loader import LoadedModel, choose_device, load_model
from kvscope.engine.model_runner import ModelRunner, bytes_per_slot
from kvscope.engine.sampler import choose_tokens, rank_tokens
from kvscope.events.types import MAX_NUM_BLOCKS, EngineInfo
from kvscope.kernels.backend import AttentionBackend, check_block_size, get_backend
from kvscope.transport.publisher import EventSink

GIB = 1 << 30
FP8_CAPABILITY = (8, 9)  # Ada: the first that converts e4m3
CPU_POOL_BYTES = GIB  # without a flag, the pool takes at most this much of a CPU's memory


@dataclass(frozen=True, slots=True)
class Prepared:
    """A loaded, verified model and the settings it will run with: everything that can be refused has been."""

    model: LoadedModel
    backend: AttentionBackend
    info: EngineInfo


def prepare(config: EngineConfig, *, name: str = "kvscope", loaded: LoadedModel | None = None) -> Prepared:
    """Load and check; `loaded` spares loading a model again.

    Raises:
        ConfigError: a setting cannot work with this model or machine.
    """
    backend = choose_backend(config)
    check_kv_cache_dtype(config)
    check_cuda_graphs(config, backend)
    model = loaded if loaded is not None else load_model(config, backend)
    return Prepared(model, backend, _describe(config, model, backend, name))


def build_engine(prepared: Prepared, sink: EventSink, *, free_order: Sequence[int] | None = None) -> Engine:
    """A ready engine; its first event has gone to the sink.

    Raises:
        ConfigError: --cuda-graphs, and the model cannot be captured, or a replay gives something else.
    """
    model, info = prepared.model, prepared.info
    runner = ModelRunner(
        model.model,
        model.layers,
        prepared.backend,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        num_host_blocks=info.num_host_blocks,
        scales=_choose_scales(model) if info.kv_cache_dtype == "fp8_e4m3" else None,
    )
    if info.cuda_graphs:
        _capture_decodes(runner, info)
    elif prepared.backend.name == "numba":
        seats = min(info.max_num_seqs, MAX_TAPED_SEQS)
        runner.capture_decodes(record, max_num_seqs=seats, max_model_len=info.max_model_len, when_met=True)
    return Engine(
        info,
        runner,
        model.tokenizer,
        sink,
        choose=choose_tokens,
        rank=rank_tokens,
        eos_token_ids=model.eos_token_ids,
        free_order=free_order,
    )


def choose_backend(config: EngineConfig) -> AttentionBackend:
    """Unless told otherwise: Triton on CUDA; on a CPU numba, or torch where numba cannot run, which is said."""
    name = config.attention_backend
    if name == "auto" and choose_device(config).type == "cpu":
        try:
            return get_backend("numba")
        except (ImportError, RuntimeError) as error:
            name = "torch"
            sys.stderr.write(f"kvscope: attention by torch, which is several times slower: no numba ({error})\n")
    elif name == "auto":
        name = "triton"
    if name == "numba" and choose_device(config).type != "cpu":
        raise ConfigError("--attention-backend numba runs on a CPU only; add --device cpu")
    try:
        check_block_size(name, config.block_size)
        return get_backend(name)
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(str(error)) from None


def check_kv_cache_dtype(config: EngineConfig) -> None:
    """Raises ConfigError where 8 bits are asked for and the GPU cannot convert them."""
    if config.kv_cache_dtype == "auto" or choose_device(config).type == "cpu":
        return
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is not None or capability < FP8_CAPABILITY:
        name, numbers = torch.cuda.get_device_name(), ".".join(map(str, capability))
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} needs an NVIDIA GPU of compute capability 8.9 or above, not "
            f"{name} ({numbers}); leave it out, or add --device cpu"
        )


def check_cuda_graphs(config: EngineConfig, backend: AttentionBackend) -> None:
    """Raises ConfigError where CUDA graphs are asked for and there is nothing that could hold them."""
    if config.cuda_graphs and choose_device(config).type == "cpu":
        raise ConfigError("--cuda-graphs needs a CUDA device, and the model runs on a CPU here; leave it out")
    if config.cuda_graphs and backend.name != "triton":
        raise ConfigError(f"--cuda-graphs needs --attention-backend triton, not {backend.name}")


def _capture_decodes(runner: ModelRunner, info: EngineInfo) -> None:
    try:
        graphs = runner.capture_decodes(CudaCapture(), max_num_seqs=info.max_num_seqs, max_model_len=info.max_model_len)
        verify_replays(runner, graphs, min(info.max_model_len, info.num_blocks * info.block_size))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--cuda-graphs: {info.model} cannot be captured ({reason}); leave it out") from None


def _choose_scales(model: LoadedModel) -> dict[int, KvScales]:
    return {layer: choose_scales(peaks, model.model.dtype) for layer, peaks in model.kv_peaks.items()}


def _describe(config: EngineConfig, model: LoadedModel, backend: AttentionBackend, name: str) -> EngineInfo:
    max_model_len = _max_model_len(config, model)
    slot_bytes = bytes_per_slot(model.layers, FP8 if config.kv_cache_dtype == "fp8_e4m3" else model.model.dtype)
    block_bytes = slot_bytes * config.block_size
    widest = max(model.layers.values(), key=lambda layer: layer.num_kv_heads * layer.key_size)
    return EngineInfo(
        name=name,
        model=model.name,
        device=str(model.model.device),
        dtype=str(model.model.dtype).removeprefix("torch."),
        attention_backend=backend.name,
        block_size=config.block_size,
        num_blocks=_num_blocks(config, model, block_bytes, max_model_len),
        bytes_per_block=block_bytes,
        num_layers=len(model.layers),
        num_kv_heads=widest.num_kv_heads,
        head_size=widest.key_size,
        vocab_size=model.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        seed=config.seed,
        kvscope_version=version("kvscope"),
        prefix_caching=use_prefix_caching(config.enable_prefix_caching, config.allocator),
        num_host_blocks=_num_host_blocks(config, block_bytes),
        preemption=config.preemption if config.swap_space else "recompute",
        admission=config.admission,
        allocator=config.allocator,
        sliding_window=common_window(model.layers),
        kv_cache_dtype=config.kv_cache_dtype,
        cuda_graphs=config.cuda_graphs,
    )


def common_window(layers: Mapping[int, LayerGeometry]) -> int | None:
    """How far back the layer looks that looks furthest, in positions; None: some layer looks at all of them."""
    windows = [layer.sliding_window for layer in layers.values()]
    return None if None in windows else max(window for window in windows if window is not None)


def _max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    limit = model.max_model_len
    if config.max_model_len is None:
        return min(limit or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN)
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(f"--max-model-len {config.max_model_len} is beyond the model's own limit of {limit}")
    return config.max_model_len


def _num_blocks(config: EngineConfig, model: LoadedModel, block_bytes: int, max_model_len: int) -> int:
    """What was asked for; else what memory allows, but no more than every sequence at full length needs."""
    available = _available_bytes(config, model.model.device) // block_bytes
    wanted = config.num_gpu_blocks_override
    if wanted is None:
        wanted = min(available, config.max_num_seqs * -(-max_model_len // config.block_size), MAX_NUM_BLOCKS)
    if wanted < 1:
        raise ConfigError(
            f"no memory is left for one block of {block_bytes} bytes; lower --block-size, raise "
            "--gpu-memory-utilization, or choose a smaller model"
        )
    if wanted * block_bytes > (room := _free_bytes(model.model.device)):
        raise ConfigError(
            f"a pool of {wanted} blocks takes {wanted * block_bytes / GIB:.1f} GiB, {room / GIB:.1f} GiB are free on "
            f"{model.model.device}; lower --num-gpu-blocks-override or --block-size"
        )
    return wanted


def _num_host_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks that --swap-space holds."""
    wanted = int(config.swap_space * GIB)
    if config.swap_space and wanted < block_bytes:
        raise ConfigError(f"--swap-space {config.swap_space:g} GiB holds no block of {block_bytes} bytes")
    if wanted > (room := _free_bytes(torch.device("cpu"))):
        raise ConfigError(f"--swap-space {config.swap_space:g}: {room / GIB:.1f} GiB of host memory are free")
    return min(wanted // block_bytes, MAX_NUM_BLOCKS)


def _free_bytes(device: torch.device) -> int:
    """Memory that a pool could take, at the most."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def _available_bytes(config: EngineConfig, device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_POOL_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return max(int(free - (1 - config.gpu_memory_utilization) * total), 0)
