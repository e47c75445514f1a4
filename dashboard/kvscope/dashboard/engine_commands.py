"""The commands that start an engine: `run`, `serve` and `demo`. The only module here that imports kvscope.engine."""

import importlib.util
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from kvscope.dashboard import flags
from kvscope.dashboard.errors import INSTALL_ENGINE, CommandError
from kvscope.dashboard.terminal import leaving_at_once
from kvscope.engine.config import EMBEDDED_MODEL, ConfigError, EngineConfig, wait_for_threads_asleep
from kvscope.events.options import OPTION_NAMES, parse_options

DEFAULTS = EngineConfig()
_OPTION_WORD = re.compile(r"[A-Za-z_]+=")


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A model, then sampling options.", metavar="MODEL|KEY=VALUE", show_default=False),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="What to continue; may be repeated.", metavar="TEXT")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    record: flags.Record = None,
    record_max_size: flags.RecordMaxSize = None,
    force: flags.Force = False,
    block_size: flags.BlockSize = DEFAULTS.block_size,
    num_gpu_blocks_override: flags.NumGpuBlocksOverride = DEFAULTS.num_gpu_blocks_override,
    gpu_memory_utilization: flags.GpuMemoryUtilization = DEFAULTS.gpu_memory_utilization,
    max_num_seqs: flags.MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: flags.MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    max_model_len: flags.MaxModelLen = DEFAULTS.max_model_len,
    dtype: flags.Dtype = DEFAULTS.dtype,
    kv_cache_dtype: flags.KvCacheDtype = DEFAULTS.kv_cache_dtype,
    device: flags.Device = DEFAULTS.device,
    attention_backend: flags.AttentionBackend = DEFAULTS.attention_backend,
    seed: flags.Seed = DEFAULTS.seed,
    enable_prefix_caching: flags.EnablePrefixCaching = DEFAULTS.enable_prefix_caching,
    swap_space: flags.SwapSpace = DEFAULTS.swap_space,
    preemption: flags.Preemption = DEFAULTS.preemption,
    admission: flags.Admission = DEFAULTS.admission,
    allocator: flags.Allocator = DEFAULTS.allocator,
    cuda_graphs: flags.CudaGraphs = DEFAULTS.cuda_graphs,
) -> int:
    """Run prompts through the engine, without a dashboard; print outputs, token ids and the memory summary.

    MODEL is tiny-shakespeare (the embedded one), a directory, or a hub id. The first word is the model unless it is an
    option. Options: n, max_tokens, temperature (0 is greedy), top_k, top_p, seed, stop,
    ignore_eos, cache_salt; beam_width and length_penalty for beam search.

    \b
    kvscope run --prompt "O Romeo," n=2 max_tokens=32
    kvscope run ./my-model --prompt "Once upon a time" temperature=0 --json
    """
    model, options = _split_words(words or [])
    params = parse_options(options)
    if not prompt:
        raise CommandError("run needs a prompt: kvscope run --prompt TEXT")
    with _config_errors():
        config = EngineConfig(
            model=model,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            attention_backend=attention_backend,
            seed=seed,
            enable_prefix_caching=enable_prefix_caching,
            swap_space=swap_space,
            preemption=preemption,
            admission=admission,
            allocator=allocator,
            cuda_graphs=cuda_graphs,
        )
        _require_engine("run")
        from kvscope.engine import preflight

        preflight.check_run(model, record=record, force=force, max_bytes=record_max_size)
        wait_for_threads_asleep()
        with leaving_at_once():
            from kvscope.engine import commands

        return commands.run(
            config, prompt, params, as_json=as_json, record=record, force=force, max_bytes=record_max_size
        )


def serve(
    model: Annotated[str, typer.Argument(help="Embedded model, directory, or hub id.")] = EMBEDDED_MODEL,
    name: Annotated[str | None, typer.Option(help="What `attach` calls this engine.", metavar="NAME")] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="Listen on TCP (PORT and PORT+1) instead; off loopback only with keys.", metavar="tcp://ADDR:PORT"
        ),
    ] = None,
    key: flags.Key = None,
    allow: flags.Allow = None,
    no_control: flags.NoControl = False,
    record: flags.Record = None,
    record_max_size: flags.RecordMaxSize = None,
    force: flags.Force = False,
    start_paused: Annotated[bool, typer.Option("--start-paused", help="Run no step until told to.")] = False,
    max_steps_per_second: flags.MaxStepsPerSecond = None,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
    block_size: flags.BlockSize = DEFAULTS.block_size,
    num_gpu_blocks_override: flags.NumGpuBlocksOverride = DEFAULTS.num_gpu_blocks_override,
    gpu_memory_utilization: flags.GpuMemoryUtilization = DEFAULTS.gpu_memory_utilization,
    max_num_seqs: flags.MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: flags.MaxNumBatchedTokens = DEFAULTS.max_num_batched_tokens,
    max_model_len: flags.MaxModelLen = DEFAULTS.max_model_len,
    dtype: flags.Dtype = DEFAULTS.dtype,
    kv_cache_dtype: flags.KvCacheDtype = DEFAULTS.kv_cache_dtype,
    device: flags.Device = DEFAULTS.device,
    attention_backend: flags.AttentionBackend = DEFAULTS.attention_backend,
    seed: flags.Seed = DEFAULTS.seed,
    enable_prefix_caching: flags.EnablePrefixCaching = DEFAULTS.enable_prefix_caching,
    swap_space: flags.SwapSpace = DEFAULTS.swap_space,
    preemption: flags.Preemption = DEFAULTS.preemption,
    admission: flags.Admission = DEFAULTS.admission,
    allocator: flags.Allocator = DEFAULTS.allocator,
    cuda_graphs: flags.CudaGraphs = DEFAULTS.cuda_graphs,
) -> int:
    """Start an engine that dashboards attach to; Ctrl-C stops it.

    Its sockets lie in a private directory of yours: no port is open unless --listen asks for one. An address that other
    machines can reach needs keys: yours, and the --allow list of theirs.

    \b
    kvscope serve --block-size 4 --num-gpu-blocks-override 96
    kvscope serve HuggingFaceTB/SmolLM2-135M-Instruct --record run.mcap
    kvscope serve --listen tcp://0.0.0.0:5557 --allow alice.key
    """
    from kvscope.transport.keys import listening

    doors = listening(listen, key, allow or ())
    with _config_errors():
        config = EngineConfig(
            model=model,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            attention_backend=attention_backend,
            seed=seed,
            enable_prefix_caching=enable_prefix_caching,
            swap_space=swap_space,
            preemption=preemption,
            admission=admission,
            allocator=allocator,
            cuda_graphs=cuda_graphs,
        )
        _require_engine("serve")
        from kvscope.engine import preflight

        preflight.check_serve(model, name=name, listening=doors, record=record, force=force, max_bytes=record_max_size)
        if until_stdin_closes:
            _stop_when_stdin_closes()
        wait_for_threads_asleep()
        with leaving_at_once():
            from kvscope.engine import commands

        return commands.serve(
            config,
            name=name,
            listening=doors,
            read_only=no_control,
            record=record,
            force=force,
            max_bytes=record_max_size,
            start_paused=start_paused,
            max_steps_per_second=max_steps_per_second,
        )


def demo(
    lesson: Annotated[bool, typer.Option("--lesson", help="Six moments of a paged KV cache, with captions.")] = False,
    record: flags.Record = None,
    record_max_size: flags.RecordMaxSize = None,
    force: flags.Force = False,
    name: Annotated[str | None, typer.Option(help="The engine's name; demo-PID unless set.", metavar="NAME")] = None,
    allocator: flags.Allocator = DEFAULTS.allocator,
    max_steps_per_second: flags.MaxStepsPerSecond = None,
    ascii_only: flags.Ascii = False,
    theme: flags.Theme = None,
    colors: flags.Colors = None,
    no_mouse: flags.NoMouse = False,
) -> int:
    """Start an engine on the embedded model, open the dashboard on it, and send two prompts.

    The engine takes its time, 10 steps a second unless told otherwise. Without a terminal the same work is done
    headless, at full speed, and a summary printed.
    """
    _require_engine("demo")
    from kvscope.dashboard import demo as demonstration
    from kvscope.dashboard.opening import ScreenFlags

    return demonstration.demo(
        ScreenFlags(ascii_only, theme, colors, no_mouse),
        name=name,
        allocator=allocator,
        record=record,
        force=force,
        max_bytes=record_max_size,
        max_steps_per_second=max_steps_per_second,
        lesson=lesson,
    )


def _split_words(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The model and the option words; a first word that looks like an option leaves the embedded model."""
    if words and _OPTION_WORD.match(words[0]) is None and words[0] not in OPTION_NAMES:
        return words[0], words[1:]
    return EMBEDDED_MODEL, words


@contextmanager
def _config_errors() -> Iterator[None]:
    """A setting that cannot work is the user's to fix."""
    try:
        yield
    except ConfigError as error:
        raise CommandError(str(error)) from error


def _require_engine(command: str) -> None:
    """Raises CommandError when this is the base install."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        raise CommandError(f"{command} needs the engine, which is not installed here: {INSTALL_ENGINE}")


def _stop_when_stdin_closes() -> None:
    """End this process as SIGTERM would, once whoever started it is gone."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
