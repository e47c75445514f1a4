"""Compiles the kernels ahead of time for GPUs that need not be there, and looks at what came out.

Does the code still compile, how much shared memory and how many registers does it take, does anything spill, how wide
are the loads, and do the matrix units work? The last four are read from PTX and from `cuobjdump`, for NVIDIA only.

`python -m kvscope.kernels.aot [TARGET ...]` prints a table. Not in a process where the kernels are interpreted.
"""

import math
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

from kvscope.kernels.triton_tiles import compiled_tiles, next_power_of_two

# Backend, architecture and warp size, as Triton's GPUTarget takes them.
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
FP8, FP8_TARGETS = "fp8e4nv", ("sm_90", "sm_100")  # float8_e4m3fn; sm_80 has none, AMD's CDNA 3 another one
ELEMENT_SIZES = {"fp16": 2, "bf16": 2, "fp32": 4}
GROUP_SIZE = 3  # SmolLM's: not a power of two, so that rows are padded


class AttentionShape(NamedTuple):
    """One specialisation of the attention kernel."""

    one_query: bool
    dtype: str
    head_size: int
    block_size: int
    sliding_window: int | None = None
    has_soft_cap: bool = False
    num_splits: int = 1
    cache: str | None = None  # Triton's name of what K and V are stored as; None: `dtype`

    def __str__(self) -> str:
        variant = f"{' window' if self.sliding_window else ''}{' softcap' if self.has_soft_cap else ''}"
        if self.num_splits > 1:
            variant += f" splits {self.num_splits}"
        variant += f" on {self.cache}" if self.cache is not None else ""
        phase = "decode" if self.one_query else "prefill"
        return f"{phase} {self.dtype} head {self.head_size} block {self.block_size}{variant}"


class CompiledShape(NamedTuple):
    """What came out of one compilation."""

    target: str
    kernel: str
    shared_bytes: int
    binary_bytes: int
    elapsed_seconds: float
    machine_code: "MachineCode | None"
    """None for a target that is not NVIDIA's."""


class MachineCode(NamedTuple):
    """What the compiler made of one kernel for an NVIDIA GPU."""

    registers: int
    """Per thread, 255 at most."""
    stack_bytes: int
    """Per thread; more than none means that registers were spilled to memory."""
    copy_bytes: frozenset[int]
    """Widths of the asynchronous copies from global to shared memory, in bytes per thread: K and V, 16 at best."""
    has_matrix_operations: bool


# Every element type with every head size, every block size with every variant: the corners, not the full product.
ATTENTION_SHAPES = [
    *(
        AttentionShape(one_query, dtype, head_size, 16)
        for one_query, dtype, head_size in product((True, False), ELEMENT_SIZES, (32, 64, 128))
    ),
    *(
        AttentionShape(one_query, "bf16", 64, block_size, window, has_soft_cap)
        for one_query, (block_size, window, has_soft_cap) in product(
            (True, False),
            ((4, None, False), (4, 128, False), (32, None, True), (32, 128, True), (128, None, False), (16, 128, True)),
        )
    ),
    AttentionShape(True, "fp16", 80, 16),
    AttentionShape(False, "fp16", 80, 16),
    *(AttentionShape(True, "bf16", head_size, 16, num_splits=splits) for head_size in (64, 128) for splits in (4, 64)),
    AttentionShape(True, "bf16", 128, 16, 128, True, num_splits=16),
    *(AttentionShape(one_query, "bf16", size, 16, cache=FP8) for one_query, size in product((True, False), (64, 128))),
]


def compile_all(
    targets: Iterable[str] = TARGETS, shapes: Iterable[AttentionShape] = tuple(ATTENTION_SHAPES)
) -> Iterator[CompiledShape]:
    """Compile each shape of the attention kernel, the KV write and the block copy for each target, one at a time.

    Raises KeyError for a target not in `TARGETS`, RuntimeError where the kernels are interpreted in this process, and
    whatever Triton raises for code it cannot compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from kvscope.kernels.triton_runtime import are_interpreted

    if are_interpreted():
        raise RuntimeError("the kernels are interpreted in this process: compile them in one without TRITON_INTERPRET")
    shapes = list(shapes)
    for target in targets:
        gpu = GPUTarget(*TARGETS[target])
        has_fp8 = target in FP8_TARGETS
        for name, source, options in _sources([s for s in shapes if has_fp8 or s.cache != FP8], has_fp8=has_fp8):
            started = time.perf_counter()
            compiled = triton.compile(source, target=gpu, options=options)
            yield CompiledShape(
                target=target,
                kernel=name,
                shared_bytes=compiled.metadata.shared,
                binary_bytes=len(compiled.asm["cubin" if gpu.backend == "cuda" else "hsaco"]),
                elapsed_seconds=time.perf_counter() - started,
                machine_code=_inspect(compiled.asm) if gpu.backend == "cuda" else None,
            )


def _inspect(code: dict[str, Any]) -> MachineCode:
    """Read PTX (text) and cubin (bytes). The tool that lists resources ships inside Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code["cubin"])
        file.flush()
        listing = subprocess.run(  # noqa: S603 (our own file, Triton's own tool)
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", listing))
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)", code["ptx"])
    return MachineCode(
        registers=int(usage["REG"]),
        stack_bytes=int(usage["STACK"]) + int(usage["LOCAL"]),
        copy_bytes=frozenset(int(width, 0) for width in copies),
        has_matrix_operations=bool(re.search(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)", code["ptx"])),
    )


def _sources(shapes: Iterable[AttentionShape], *, has_fp8: bool) -> Iterator[tuple[str, Any, dict[str, int]]]:
    """Name, Triton source and compile options of everything to compile."""
    from kvscope.kernels.triton_attention import paged_attention_kernel
    from kvscope.kernels.triton_cache import copy_blocks_kernel, write_kv_kernel
    from kvscope.kernels.triton_splits import combine_splits_kernel

    for shape in shapes:
        tiles = compiled_tiles(
            one_query=shape.one_query,
            group_size=GROUP_SIZE,
            head_size=shape.head_size,
            element_size=ELEMENT_SIZES[shape.dtype],
        )
        pointers = dict.fromkeys(("output", "query"), f"*{shape.dtype}")
        pointers |= dict.fromkeys(("key_cache", "value_cache"), f"*{shape.cache or shape.dtype}")
        constants = _attention_constants(shape, tiles.block_m, tiles.tile)
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": True}
        yield f"attention {shape}", _source(paged_attention_kernel, pointers, constants), options
        if shape.num_splits > 1:
            kept = {name: value for name, value in constants.items() if name in combine_splits_kernel.arg_names}
            source = _source(combine_splits_kernel, {"output": f"*{shape.dtype}"}, kept)
            yield f"combine {shape}", source, {"enable_fp_fusion": True}

    row_constants = {"NUM_KV_HEADS": 3, "ROWS": 16}
    for new, cache in (("fp32", "bf16"), ("bf16", "bf16"), *([("bf16", FP8)] if has_fp8 else [])):
        pointers = {"key": f"*{new}", "value": f"*{new}", "key_cache": f"*{cache}", "value_cache": f"*{cache}"}
        head = {"HEAD_SIZE": 64, "VALUE_HEAD_SIZE": 64, "HEAD_PAD": 64, "VALUE_PAD": 64, "BLOCK_SIZE": 16}
        yield (
            f"write {new} to {cache}",
            _source(write_kv_kernel, pointers, row_constants | head),
            {"enable_fp_fusion": True},
        )
    copy_constants = {"NUM_KV_HEADS": 3, "ROW_SIZE": 1024, "ROWS": 1, "COLUMNS": 1024}
    yield "copy", _source(copy_blocks_kernel, {"cache": "*i16"}, copy_constants), {"enable_fp_fusion": True}


def _attention_constants(shape: AttentionShape, block_m: int, tile: int) -> dict[str, Any]:
    import triton.language as tl

    head_pad = next_power_of_two(shape.head_size)
    return {
        "GROUP": GROUP_SIZE,
        "HEAD_SIZE": shape.head_size,
        "VALUE_HEAD_SIZE": shape.head_size,
        "BLOCK_SIZE": shape.block_size,
        "SLIDING_WINDOW": shape.sliding_window,
        "HAS_SOFT_CAP": shape.has_soft_cap,
        "ONE_QUERY": shape.one_query,
        "SKIP_ONE_QUERY": not shape.one_query,
        "NUM_SPLITS": shape.num_splits,
        "SEQS_PAD": 16,
        "BLOCK_M": block_m,
        "GROUP_ROWS": next_power_of_two(GROUP_SIZE),
        "TILE": tile,
        "HEAD_PAD": head_pad,
        "VALUE_PAD": head_pad,
        "DOT_DTYPE": {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[shape.dtype],
    }


# Every stride but the table's counts whole heads.
ALIGNED_STRIDES = ("output_stride", "query_stride", "key_", "value_", "stride")
POINTER_TYPES = {
    "partial_output": "*fp32",
    "partial_lse": "*fp32",
    "query_start": "*i32",
    "context_lengths": "*i32",
    "block_tables": "*i32",
    "slot_mapping": "*i64",
    "source_ids": "*i64",
    "target_ids": "*i64",
}


def _source(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> Any:
    """What a launch would compile: pointers and strides known to be multiples of 16, except those of the table."""
    from triton.compiler import ASTSource

    types = POINTER_TYPES | pointers | dict.fromkeys(("score_scale", "soft_cap"), "fp32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and (signature[name].startswith("*") or name.startswith(ALIGNED_STRIDES))
    }
    return ASTSource(kernel, signature, constants, aligned)


def main(targets: list[str]) -> None:
    """Compile for the given targets (all by default) and print one line per kernel."""
    started = time.perf_counter()
    widest = max(len(f"attention {shape}") for shape in ATTENTION_SHAPES)
    write = sys.stdout.write
    write(f"{'target':8} {'kernel':{widest}} {'shared':>8} {'binary':>8} {'registers':>9} {'stack':>6} {'time':>7}\n")
    count = 0
    for done in compile_all(targets or TARGETS):
        count += 1
        shared, binary = f"{done.shared_bytes / 1024:.1f} K", f"{math.ceil(done.binary_bytes / 1024)} K"
        code = done.machine_code
        registers, stack = (code.registers, code.stack_bytes) if code else ("", "")
        write(
            f"{done.target:8} {done.kernel:{widest}} {shared:>8} {binary:>8} {registers:>9} {stack:>6} "
            f"{done.elapsed_seconds:>5.2f} s\n"
        )
    write(f"{count} kernels compiled in {time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])
