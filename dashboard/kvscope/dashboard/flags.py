"""The flags of the commands that start an engine. They carry vLLM's names, so that a habit or a script carries over."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

BlockSize = Annotated[int, typer.Option(help="Slots (token positions) per block.", metavar="N")]
NumGpuBlocksOverride = Annotated[
    int | None,
    typer.Option(help="Blocks in the pool, on any device, instead of what the memory allows.", metavar="N"),
]
GpuMemoryUtilization = Annotated[
    float, typer.Option(help="Share of a GPU's memory for weights and pool.", metavar="SHARE")
]
MaxNumSeqs = Annotated[int, typer.Option(help="Sequences in one step, at most.", metavar="N")]
MaxNumBatchedTokens = Annotated[int, typer.Option(help="Tokens in one step, at most.", metavar="N")]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Prompt and output together, in tokens; the model's own limit unless set.", metavar="N"),
]
Dtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16"], typer.Option(help="Of weights and KV.", show_choices=True)
]
KvCacheDtype = Annotated[
    Literal["auto", "fp8_e4m3"], typer.Option(help="Of KV: as --dtype, or 8 bits with a scale per layer and head.")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")]
AttentionBackend = Annotated[
    Literal["auto", "numba", "torch", "triton", "reference"],
    typer.Option(help="Paged attention; triton on a CPU runs in Triton's interpreter, slowly."),
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep full blocks of ended requests, and reuse them for prompts that begin alike.",
    ),
]
SwapSpace = Annotated[
    float, typer.Option(help="Host memory for the KV of preempted requests, in GiB; 0: none.", metavar="GIB")
]
Preemption = Annotated[
    Literal["recompute", "swap", "auto"],
    typer.Option(help="What happens to the KV of a request that must give way; auto swaps what takes several steps."),
]
Admission = Annotated[
    Literal["now", "worst-case", "watermark"],
    typer.Option(help="Admit on the blocks needed now, at the most ever, or now with 1% of the pool to spare."),
]
Allocator = Annotated[
    Literal["paged", "contiguous"],
    typer.Option(help="Blocks as needed; or one run of blocks per sequence, reserved for its maximum, to compare."),
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs",
        help="Replay decodes as CUDA graphs, and copy inputs from pinned memory. Not yet run on a device.",
    ),
]
Seed = Annotated[int, typer.Option(help="Default seed of the sampling.", metavar="N")]

Record = Annotated[Path | None, typer.Option(help="Keep every event in FILE, for `kvscope replay`.", metavar="FILE")]


def number_within(low: float, high: float) -> Callable[[str], float]:
    """A parser of numbers in a closed range; typer's own lets `nan` through, which is in none."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise typer.BadParameter(f"{text!r} is not a number from {low:,} to {high:,}")
        return value

    return parse


def parse_size(text: str) -> int:
    """`500M` and `2GiB` in bytes; units are binary."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    size = int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ") if match is not None else 0
    if size < 1 << 16:
        raise typer.BadParameter(f"{text!r} is not a size from 64K on, such as 500M or 2G")
    return size


RecordMaxSize = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        help="Begin another file after this size, 64K or more (500M, 2G): run.0001.mcap, run.0002.mcap, ...",
        metavar="SIZE",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")]
Key = Annotated[
    Path | None, typer.Option(help="Your .key_secret file; the one of `kvscope keys new` unless set.", metavar="FILE")
]
ServerKey = Annotated[
    Path | None, typer.Option(help="The engine's .key file, for an engine on TCP with keys.", metavar="FILE")
]
Allow = Annotated[
    list[Path] | None,
    typer.Option(
        help="Let in who has the secret of this .key file, or of one in this folder; repeatable.", metavar="PATH"
    ),
]
NoControl = Annotated[
    bool, typer.Option("--no-control", help="Refuse prompts, pausing and every other control from everyone.")
]
Ascii = Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters only.")]
Theme = Annotated[
    str | None, typer.Option(help="auto, kvscope, kvscope-light, kvscope-ansi, ...", metavar="NAME", show_default=False)
]
Colors = Annotated[
    Literal["auto", "16", "256", "truecolor"] | None,
    typer.Option(help="How many colours the terminal has.", show_default=False),
]
NoMouse = Annotated[bool, typer.Option("--no-mouse", help="Leave the mouse to the terminal.")]
MaxStepsPerSecond = Annotated[
    float | None,
    typer.Option(
        parser=number_within(0.1, 1_000_000),
        help="Slow the engine down to what an eye can follow; 0.1 to 1,000,000.",
        metavar="N",
    ),
]
