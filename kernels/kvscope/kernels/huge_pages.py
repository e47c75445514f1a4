"""Large pages for the KV cache and the weights of a CPU. Each small page costs a table walk, and stops the prefetcher:
one core read 18 to 26 GB/s through small pages, 33 GB/s through large ones.
"""

import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 1 << 21
_MADV_COLLAPSE = 25  # Linux 6.1 and later: now, instead of some time in the background


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, in pages of 2 MiB where the system has some; as `torch.zeros` otherwise, and if it is small.

    Fresh memory of its own: what an allocator hands out again lies in small pages already.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].view(dtype).view(*shape)


def collapse(areas: Iterable[tuple[int, int]]) -> None:
    """Move memory that is in use, (address, number of bytes) each, into large pages, with what else lies in those.

    Contents and addresses stay. A wish: where the system has no large page left, or none at all, nothing changes.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for start, stop in _whole_pages(areas):
        for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
            madvise(start, stop - start, advice)


def _whole_pages(areas: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """From and to where large pages cover the areas; as few as can be, since each call waits for all cores."""
    merged: list[tuple[int, int]] = []
    for address, num_bytes in sorted(areas):
        start = address // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        stop = -(-(address + num_bytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
