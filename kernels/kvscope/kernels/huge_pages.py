"""Large pages for a KV cache on a CPU: its blocks lie scattered, and each small page costs a walk of page tables."""

import ctypes
import mmap

from torch import Tensor

HUGE_PAGE_BYTES = 1 << 21


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for large pages under the tensor; best before its memory is first touched. A hint: it may change nothing."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is None or tensor.device.type != "cpu":
        return
    first = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (tensor.data_ptr() + tensor.nbytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(advice))
