"""What an engine is started with. Flags carry vLLM's names; no torch here."""

import os
import sys
from dataclasses import dataclass
from typing import Literal

from kvscope.events.types import MAX_NUM_BLOCKS

EMBEDDED_MODEL = "tiny-shakespeare"

MAX_SWAP_SPACE = 1 << 20  # GiB
MAX_BLOCK_SIZE = 1 << 16
MAX_NUM_SEQS = 1 << 20
MAX_TOKENS = 1 << 30  # in one step, or in one sequence; what is beyond 64 bits could not be published
DEFAULT_MAX_MODEL_LEN = 4096  # where the model names no limit, or one beyond what a small pool can hold

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
KvCacheDtype = Literal["auto", "fp8_e4m3"]
PreemptionPolicy = Literal["recompute", "swap", "auto"]
AdmissionPolicy = Literal["now", "worst-case", "watermark"]
AllocatorName = Literal["paged", "contiguous"]
BackendName = Literal["auto", "numba", "torch", "triton", "reference"]


def wait_for_threads_asleep() -> None:
    """Let torch's threads sleep while they wait for each other; call before torch is imported.

    OpenMP's default is to spin, and on a machine that does something else too, a spinning thread keeps the one it
    waits for from running: on two busy cores a step took 2,217 ms spinning and 13 ms asleep.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class ConfigError(ValueError):
    """A setting that cannot work. One line that names the fix; commands exit with 2."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`None` means: decide from the model and the machine."""

    model: str = EMBEDDED_MODEL
    block_size: int = 16
    num_gpu_blocks_override: int | None = None  # blocks in the pool
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    dtype: Dtype = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"  # the model's own, or 8 bits
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: BackendName = "auto"
    seed: int = 0
    enable_prefix_caching: bool = True
    swap_space: float = 0.0  # GiB of host memory for blocks of preempted requests
    preemption: PreemptionPolicy = "auto"
    admission: AdmissionPolicy = "now"
    allocator: AllocatorName = "paged"
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            self._check_at_least_1(name)
        for name in ("num_gpu_blocks_override", "max_model_len"):
            if getattr(self, name) is not None:
                self._check_at_least_1(name)
        for name, most in (
            ("block_size", MAX_BLOCK_SIZE),
            ("num_gpu_blocks_override", MAX_NUM_BLOCKS),
            ("max_num_seqs", MAX_NUM_SEQS),
            ("max_num_batched_tokens", MAX_TOKENS),
            ("max_model_len", MAX_TOKENS),
        ):
            if (getattr(self, name) or 0) > most:
                raise ConfigError(f"--{name.replace('_', '-')} is at most {most}, not {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"--seed is a whole number from 0 to {(1 << 63) - 1}, not {self.seed}")
        if not 0 <= self.swap_space <= MAX_SWAP_SPACE:
            raise ConfigError(f"--swap-space is a number of GiB from 0 to {MAX_SWAP_SPACE}, not {self.swap_space}")
        if self.preemption == "swap" and not self.swap_space:
            raise ConfigError("--preemption swap needs room on the host: --swap-space GIB")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization is a share above 0, up to 1, not {self.gpu_memory_utilization}"
            )

        self._check_allocator()

    def _check_at_least_1(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")

    def _check_allocator(self) -> None:
        paged_only = {
            f"--swap-space {self.swap_space:g}": self.swap_space > 0,
            f"--admission {self.admission}": self.admission != "now",
        }
        for flag, given in paged_only.items():
            if given and self.allocator == "contiguous":
                raise ConfigError(f"{flag} is for --allocator paged: contiguous reserves maxima and preempts nobody")


def use_prefix_caching(wanted: bool, allocator: AllocatorName) -> bool:
    """Whether there is a prefix cache; says so when it was wanted and cannot be."""
    if wanted and allocator == "contiguous":
        sys.stderr.write("kvscope: no prefix cache: --allocator contiguous shares no blocks\n")
        return False
    return wanted
