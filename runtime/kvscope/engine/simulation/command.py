"""What `kvscope simulate` does: builds the parts, runs, and prints what came of it."""

import contextlib
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvscope.engine import config
from kvscope.engine.config import (
    MAX_BLOCK_SIZE,
    AdmissionPolicy,
    AllocatorName,
    ConfigError,
    EngineConfig,
    PreemptionPolicy,
    use_prefix_caching,
)
from kvscope.engine.simulation.cost import (
    BYTES_PER_SLOT,
    HEAD_SIZE,
    NUM_KV_HEADS,
    NUM_LAYERS,
    SWAP_BYTES_PER_S,
    StepCost,
)
from kvscope.engine.simulation.recording import RecordingSink
from kvscope.engine.simulation.simulation import Simulation
from kvscope.engine.simulation.summary import summarize, summary_lines
from kvscope.engine.simulation.synthetic import make_trace, parse_synthetic
from kvscope.engine.simulation.trace import MAX_TOKENS, Trace
from kvscope.engine.simulation.trace_files import read_trace
from kvscope.events.types import MAX_NUM_BLOCKS, EngineInfo
from kvscope.transport.publisher import NullPublisher
from kvscope.transport.recording import Recorder, SeriesRecorder, check_recordable, open_recorder

GIB = 1 << 30
PROGRESS_INTERVAL_S = 0.2
MAX_STEP_US = 1e9
MAX_SPEED = 1e6


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the command was told. Exactly one of `trace` and `synthetic` is set."""

    trace: Path | None
    synthetic: str | None
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    prefix_caching: bool
    allocator: AllocatorName = "paged"
    sliding_window: int | None = None
    max_requests: int | None
    max_tokens: int | None = None
    max_waiting: int
    speed: float
    chunk_size: int
    step_us: float
    token_us: float
    context_us: float
    swap_space: float = 0.0
    preemption: PreemptionPolicy = "auto"
    admission: AdmissionPolicy = "now"

    def __post_init__(self) -> None:
        for flag, value, low, high in (
            ("--num-blocks (--num-gpu-blocks-override)", self.num_blocks, 1, MAX_NUM_BLOCKS),
            ("--block-size", self.block_size, 1, MAX_BLOCK_SIZE),
            ("--max-num-seqs", self.max_num_seqs, 1, config.MAX_NUM_SEQS),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, 1, config.MAX_TOKENS),
            ("--max-model-len", self.max_model_len, 2, 2 * MAX_TOKENS),
            ("--sliding-window", self.sliding_window, 1, 2 * MAX_TOKENS),
            ("--max-tokens", self.max_tokens, 1, MAX_TOKENS),
            ("--max-requests", self.max_requests, 1, 1 << 40),
            ("--max-waiting", self.max_waiting, 1, 1 << 30),
            ("--speed", self.speed, 1 / MAX_SPEED, MAX_SPEED),
            ("--hash-chunk", self.chunk_size, 1, MAX_TOKENS),
            ("--step-us", self.step_us, 0, MAX_STEP_US),
            ("--token-us", self.token_us, 0, MAX_STEP_US),
            ("--context-us", self.context_us, 0, MAX_STEP_US),
        ):
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{flag} is from {_figure(low)} to {_figure(high)}, not {value}")
        if self.synthetic is not None and self.max_requests is not None:
            raise ConfigError("--max-requests is for a trace file; of a made-up trace say --synthetic 'requests=N'")
        EngineConfig(  # its own rules, of what goes with what
            swap_space=self.swap_space,
            preemption=self.preemption,
            admission=self.admission,
            allocator=self.allocator,
        )
        if self.swap_space and not self.num_host_blocks:
            raise ConfigError(f"--swap-space {self.swap_space:g} GiB holds no block of {self.bytes_per_block} bytes")

    @property
    def bytes_per_block(self) -> int:
        return BYTES_PER_SLOT * self.block_size

    @property
    def num_host_blocks(self) -> int:
        return min(int(self.swap_space * GIB) // self.bytes_per_block, MAX_NUM_BLOCKS)


def _figure(limit: float) -> str:
    """A limit in plain digits: 0.000001, 1,000,000."""
    return f"{limit:,.6f}".rstrip("0").rstrip(".")


def simulate(
    settings: Settings, *, record: Path | None, force: bool, as_json: bool, max_bytes: int | None = None
) -> int:
    """Run it all. The exit code is 1 when the audit found something, or the recording stopped early.

    Raises:
        TraceError, OSError: the trace cannot be read.
        RecordingError: the recording cannot be written, or there is none to limit.
        KeyboardInterrupt: after what was simulated until then has been summed up.
    """
    check_recordable(record, force=force, max_bytes=max_bytes)  # before a long trace is read
    trace = _trace(settings)
    with contextlib.ExitStack() as stack:
        recorder = (
            stack.enter_context(contextlib.closing(open_recorder(record, force=force, max_bytes=max_bytes)))
            if record is not None
            else None
        )
        sink = RecordingSink(recorder) if recorder is not None else NullPublisher()
        cost = StepCost(
            base_ns=round(settings.step_us * 1000),
            per_token_ns=round(settings.token_us * 1000),
            per_context_token_ns=round(settings.context_us * 1000),
            per_swapped_block_ns=round(settings.bytes_per_block / SWAP_BYTES_PER_S * 1e9),
            window=settings.sliding_window,
        )
        simulation = Simulation(
            trace, make_info(settings, trace), sink, cost, settings.max_waiting, max_tokens=settings.max_tokens
        )
        started, started_cpu = time.perf_counter(), time.process_time()
        interrupted = _run(simulation, recorder)
        summary = summarize(simulation, real_s=time.perf_counter() - started, cpu_s=time.process_time() - started_cpu)
    lines = [msgspec.json.encode(summary).decode()] if as_json else summary_lines(summary)
    sys.stdout.write("\n".join(lines) + "\n")
    if interrupted:
        raise KeyboardInterrupt
    return 1 if summary.findings or (recorder is not None and recorder.error is not None) else 0


def _trace(settings: Settings) -> Trace:
    if settings.trace is not None:
        trace = read_trace(settings.trace, chunk_size=settings.chunk_size, max_requests=settings.max_requests)
    else:
        trace = make_trace(parse_synthetic(settings.synthetic or ""), settings.chunk_size)
    trace.hurry(settings.speed)
    return trace


def make_info(settings: Settings, trace: Trace) -> EngineInfo:
    """The engine that the settings describe."""
    return EngineInfo(
        name="simulation",
        model="simulation",
        device="none",
        dtype="bfloat16",
        attention_backend="none",
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        bytes_per_block=settings.bytes_per_block,
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        vocab_size=trace.vocab_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len or trace.longest(settings.max_tokens),
        seed=0,
        kvscope_version=version("kvscope"),
        prefix_caching=use_prefix_caching(settings.prefix_caching, settings.allocator),
        num_host_blocks=settings.num_host_blocks,
        preemption=settings.preemption if settings.swap_space else "recompute",
        admission=settings.admission,
        allocator=settings.allocator,
        sliding_window=settings.sliding_window,
    )


def _run(simulation: Simulation, recorder: Recorder | SeriesRecorder | None) -> bool:
    """Whether the user ended it early."""
    try:
        with _progress(len(simulation.trace)) as tell:
            for num_ended in simulation.steps():
                tell(num_ended)
                if recorder is not None and recorder.error is not None:
                    break
    except KeyboardInterrupt:
        simulation.engine.stop("interrupted")
        return True
    simulation.engine.stop("the trace has ended" if recorder is None or recorder.error is None else recorder.error)
    return False


@contextlib.contextmanager
def _progress(num_requests: int) -> Iterator["_Progress"]:
    """On a terminal, a line that is rewritten while it runs."""
    progress = _Progress(num_requests)
    try:
        yield progress
    finally:
        progress.clear()


class _Progress:
    """Calling it tells how many requests have ended."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._is_shown = sys.stderr.isatty()
        self._next = 0.0

    def __call__(self, num_ended: int) -> None:
        if self._is_shown and (now := time.monotonic()) >= self._next:
            self._next = now + PROGRESS_INTERVAL_S
            share = 100 * num_ended / self._num_requests
            sys.stderr.write(
                f"\r{num_ended:,} of {self._num_requests:,} requests, {share:.1f}%  (Ctrl-C ends it)\x1b[K"
            )
            sys.stderr.flush()

    def clear(self) -> None:
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
