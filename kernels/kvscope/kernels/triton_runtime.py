"""How the Triton kernels run: compiled for the GPU, or interpreted on a machine without one."""

import importlib
import sys

import torch

KERNEL_MODULES = (
    "kvscope.kernels.triton_splits",
    "kvscope.kernels.triton_attention",
    "kvscope.kernels.triton_cache",
)


def load_kernels() -> bool:
    """Import the kernels, interpreted where there is no GPU; returns whether they are interpreted.

    Triton decides when a function is decorated, so the switch is held only around the import of our kernels:
    nothing else in the process, nor a child, is interpreted because of us. `TRITON_INTERPRET=1` in the environment
    has the same effect on a machine with a GPU. It does not matter who imported Triton before, or how: the kernels
    call nothing of its jitted standard library, which is decorated when Triton is first imported.

    Raises ImportError where Triton is not installed, RuntimeError where the kernels were imported to be compiled and
    there is no GPU to run them.
    """
    import triton

    already_loaded = all(name in sys.modules for name in KERNEL_MODULES)
    with triton.knobs.runtime.scope():
        if not already_loaded and not torch.cuda.is_available():
            triton.knobs.runtime.interpret = True
        for name in KERNEL_MODULES:
            importlib.import_module(name)
    interpreted = are_interpreted()
    if not interpreted and not torch.cuda.is_available():
        raise RuntimeError(
            "the Triton kernels were already imported for compilation and there is no CUDA device: "
            "ask for the triton backend before importing them, or set TRITON_INTERPRET=1"
        )
    return interpreted


def are_interpreted() -> bool:
    """Whether the imported kernels run in Triton's interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    from kvscope.kernels.triton_attention import paged_attention_kernel

    return isinstance(paged_attention_kernel, InterpretedFunction)
