"""`kvscope simulate`: the engine's scheduler and pool on a trace, without a model. Works on the base install."""

from pathlib import Path
from typing import Annotated

import typer

from kvscope.dashboard import flags
from kvscope.dashboard.errors import CommandError


def simulate(
    trace: Annotated[
        Path | None, typer.Argument(help="A trace file; its format is detected.", show_default=False)
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(help="A made-up trace instead, in quotes; its names are above.", metavar="'NAME=NUMBER ...'"),
    ] = None,
    record: flags.Record = None,
    record_max_size: flags.RecordMaxSize = None,
    force: flags.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    num_blocks: Annotated[
        int, typer.Option("--num-gpu-blocks-override", "--num-blocks", help="Blocks in the pool.", metavar="N")
    ] = 10_000,
    block_size: flags.BlockSize = 16,
    max_num_seqs: flags.MaxNumSeqs = 64,
    max_num_batched_tokens: flags.MaxNumBatchedTokens = 2_048,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Prompt and output together, in tokens; the trace's longest unless set.", metavar="N"),
    ] = None,
    enable_prefix_caching: flags.EnablePrefixCaching = True,
    swap_space: flags.SwapSpace = 0.0,
    preemption: flags.Preemption = "auto",
    admission: flags.Admission = "now",
    allocator: flags.Allocator = "paged",
    sliding_window: Annotated[
        int | None,
        typer.Option(help="No layer looks back further, in positions; blocks before that are given up.", metavar="N"),
    ] = None,
    max_requests: Annotated[int | None, typer.Option(help="Only the first N of the file.", metavar="N")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="What every request asks for, ending as in the trace; just that unless set.", metavar="N"),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests in the queue; later ones wait outside of it.", metavar="N")
    ] = 1_000,
    speed: Annotated[float, typer.Option(help="Requests arrive this many times as fast.", metavar="X")] = 1.0,
    hash_chunk: Annotated[int, typer.Option(help="Prompt tokens per hash id.", metavar="N")] = 512,
    step_us: Annotated[float, typer.Option(help="Virtual time of a step.", metavar="US")] = 8_000.0,
    token_us: Annotated[float, typer.Option(help="... and of each token it computes.", metavar="US")] = 40.0,
    context_us: Annotated[float, typer.Option(help="... and of each context token it reads.", metavar="US")] = 0.066,
) -> int:
    """Run a trace through scheduler and block pool, without a model, on a virtual clock; sum it up.

    Events and recordings are those of an engine that serves: replay, check, stats and diff work on them.

    Formats: CSV with the columns arrival_s,prompt_tokens,output_tokens[,hash_ids]; Mooncake's JSON lines; Azure's LLM
    inference CSV. Equal hash ids are equal chunks of prompts, for the prefix cache.

    Synthetic: requests, rate (per second; 0: all at once), prompt and output (mean tokens), prefixes (that many
    beginnings in common), seed. The same words make the same trace.

    A step takes --step-us + --token-us per computed token + --context-us per token of context, in the
    window if there is one. The defaults are estimates for an 8B model on one device, and measure nothing. Swapped
    blocks take their bytes at 25 GB/s.

    \b
    kvscope simulate conversation_trace.jsonl --num-gpu-blocks-override 100000
    kvscope simulate AzureLLMInferenceTrace_conv.csv --max-requests 2000 --record azure.mcap
    kvscope simulate --synthetic "requests=5000 rate=20 prompt=600 output=200 prefixes=8" --json
    """
    from kvscope.engine.config import ConfigError
    from kvscope.engine.simulation import command
    from kvscope.engine.simulation.trace import TraceError

    if trace is not None and synthetic is not None:
        raise CommandError("simulate takes a trace file or --synthetic, not both")
    if trace is None and synthetic is None:
        raise CommandError("simulate needs a trace: kvscope simulate FILE, or --synthetic 'requests=1000 rate=20'")
    try:
        return command.simulate(
            command.Settings(
                trace=trace,
                synthetic=synthetic,
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                prefix_caching=enable_prefix_caching,
                swap_space=swap_space,
                preemption=preemption,
                admission=admission,
                allocator=allocator,
                sliding_window=sliding_window,
                max_requests=max_requests,
                max_tokens=max_tokens,
                max_waiting=max_waiting,
                speed=speed,
                chunk_size=hash_chunk,
                step_us=step_us,
                token_us=token_us,
                context_us=context_us,
            ),
            record=record,
            force=force,
            max_bytes=record_max_size,
            as_json=as_json,
        )
    except (ConfigError, TraceError) as error:
        raise CommandError(str(error)) from error
