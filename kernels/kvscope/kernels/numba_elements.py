"""What the compiled functions of a CPU know of single elements: bfloat16, which comes as uint16, and float32."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.registry import cpu_target
from numba.extending import overload
from platformdirs import user_cache_path


def cache_directory(sources: Path) -> Path:
    """Where what is compiled from this directory is kept: not in it, since it may be shared or read-only.

    numba compiles a function again when the file that it is in has changed. These are made of parts from several files,
    so the name depends on all of them.
    """
    parts = b"".join(path.read_bytes() for path in sorted(sources.glob("numba_*.py")))
    return user_cache_path("kvscope") / "numba" / hashlib.sha256(parts).hexdigest()[:16]


if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = str(cache_directory(Path(__file__).parent))

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered; NaN and infinities keep their meaning


@numba.njit(inline="never", cache=True)  # not part of what may be reordered: the remainder below must be exact
def exp(x: Any) -> Any:
    """exp of a float32 <= 0 to about 1 ulp, as 2^n * p(r) without branches, so that loops over it vectorise."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)  # ln 2 in two parts
    p = np.float32(1 / 5040)
    for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        p = p * r + np.float32(c)
    return p * np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


def target_has(feature: str) -> bool:
    """Whether compiled code may use it: this processor has it, and numba was not told to compile for another one."""
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{feature}" in features.split(",")


def wide(x: Any) -> Any:
    """An element as float32."""
    raise NotImplementedError


@overload(wide, strict=False)
def _wide_for(x: Any) -> Callable[..., Any]:
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def narrow(x: Any, like: Any) -> Any:
    """A float32 as the type of the element `like`, to the nearest, ties to even."""
    raise NotImplementedError


@overload(narrow, strict=False)
def _narrow_for(x: Any, like: Any) -> Callable[..., Any]:
    if like == types.uint16:

        def to_bfloat16(x: Any, like: Any) -> Any:
            bits = np.float32(x).view(np.uint32)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            return np.uint16((np.uint32(0x7FC00000) if is_nan else rounded) >> np.uint32(16))

        return to_bfloat16
    return lambda x, like: x


def rounded(x: Any, like: Any) -> Any:
    """A float32 rounded to the type of `like`, as float32."""
    raise NotImplementedError


@overload(rounded, strict=False)
def _rounded_for(x: Any, like: Any) -> Callable[..., Any]:
    return lambda x, like: wide(narrow(x, like))
