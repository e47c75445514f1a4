"""`kvscope demo`: an engine on the embedded model with a pool small enough to watch, and two prompts.

With a terminal it opens the dashboard; without one it does the same work headless and prints a summary.
"""

import importlib
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from kvscope.dashboard.engine_process import EngineProcess
from kvscope.dashboard.errors import CommandError, ExitCode
from kvscope.dashboard.glyphs import UNICODE
from kvscope.dashboard.opening import ScreenFlags, open_dashboard
from kvscope.dashboard.terminal import exiting_on_signals, has_terminal, keys_unheard, require_screen
from kvscope.dashboard.viewer import Connected
from kvscope.events.options import split_prompt
from kvscope.events.text import counted
from kvscope.events.types import BlocksAllocated
from kvscope.transport.recording import check_recordable
from kvscope.transport.recording.tap import Tap
from kvscope.transport.source import Source, Status, View
from kvscope.transport.timetravel import History

# Blocks of 4 slots, as in the article: small enough that sharing and copying happen within a line of verse.
SERVE_ARGUMENTS = ("--block-size", "4", "--num-gpu-blocks-override", "48", "--max-num-seqs", "16")
# The pool of which the lesson speaks: 24 slots, and no prefix cache that keeps blocks after their request.
LESSON_ARGUMENTS = ("--block-size", "4", "--num-gpu-blocks-override", "6", "--no-enable-prefix-caching")
# The first has two candidates and a prompt that does not fill its last block: it is shared, then copied on write.
SCRIPTED_PROMPTS = (
    "O Romeo, Romeo, wherefore art thou n=2 max_tokens=64 temperature=0.8 seed=1",
    "KING RICHARD: Now is the winter max_tokens=96 temperature=0.8 seed=2",
)
WATCHABLE_STEPS_PER_SECOND = 10.0
STALL_TIMEOUT_S = 60.0
SYNC_TIMEOUT_S = 10.0
POLL_S = 0.05


def demo(
    flags: ScreenFlags,
    *,
    name: str | None,
    allocator: str,
    record: Path | None,
    force: bool,
    max_bytes: int | None = None,
    max_steps_per_second: float | None,
    lesson: bool = False,
) -> int:
    """Run the demonstration; the engine is stopped on every way out. The exit code."""
    if lesson and allocator != "paged":
        raise CommandError(f"demo --lesson is about paging; without it, --allocator {allocator}")
    check_recordable(record, force=force, max_bytes=max_bytes)
    on_screen = has_terminal()
    if on_screen:
        require_screen("demo")
    elif lesson:
        raise CommandError("demo --lesson needs a terminal", ExitCode.USAGE)
    if max_steps_per_second is None and on_screen:
        max_steps_per_second = WATCHABLE_STEPS_PER_SECOND
    arguments = [*(LESSON_ARGUMENTS if lesson else SERVE_ARGUMENTS), "--allocator", allocator]
    if max_steps_per_second is not None:
        arguments += ["--max-steps-per-second", str(max_steps_per_second)]
    if record is not None:
        arguments += ["--record", str(record), *(["--force"] if force else [])]
        arguments += ["--record-max-size", str(max_bytes)] if max_bytes is not None else []
    with exiting_on_signals(), EngineProcess(name or f"demo-{os.getpid()}", arguments) as engine:
        with keys_unheard() if on_screen else nullcontext():
            if on_screen:
                importlib.import_module("kvscope.dashboard.app")  # loads while the engine does
            _wait_until_ready(engine)
            source = _connect(engine)
        try:
            if not on_screen:
                return _run_headless(source, engine)
            return open_dashboard(
                source, "tiny-shakespeare", flags, scripted_prompts=() if lesson else SCRIPTED_PROMPTS, lesson=lesson
            )
        finally:
            source.close()


def _wait_until_ready(engine: EngineProcess) -> None:
    """Wait with a progress line on stderr: one that counts on a terminal, a single one elsewhere."""
    live = sys.stderr.isatty()

    def show(elapsed_s: float) -> None:
        if live:
            print(f"\rkvscope: loading tiny-shakespeare  {elapsed_s:3.0f} s", end="", file=sys.stderr, flush=True)

    if not live:
        print("kvscope: loading tiny-shakespeare", file=sys.stderr, flush=True)
    try:
        engine.wait_until_ready(show)
    finally:
        if live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _connect(engine: EngineProcess) -> Connected:
    from kvscope.transport.client import EngineClient
    from kvscope.transport.discovery import resolve

    history, tap = History(), Tap()
    return Connected(EngineClient(resolve(engine.name), View(history, tap)).connect(), history, tap)


def _run_headless(source: Source, engine: EngineProcess) -> int:
    _wait_until_live(source, engine)
    request_ids = [_submit(source, prompt) for prompt in SCRIPTED_PROMPTS]
    _wait_until_finished(source, engine, request_ids)
    print(*summary_lines(source, request_ids), sep="\n")
    return ExitCode.FAILURE if source.view.findings else ExitCode.OK


def _wait_until_live(source: Source, engine: EngineProcess) -> None:
    """Block until the engine's state has arrived, so that the first event is seen too."""
    deadline = time.monotonic() + SYNC_TIMEOUT_S
    while source.view.status is not Status.LIVE:
        if not engine.is_running():
            raise engine.failure()
        if time.monotonic() > deadline:
            raise CommandError(f"no state from the engine within {SYNC_TIMEOUT_S:.0f} s", ExitCode.FAILURE)
        time.sleep(POLL_S)


def _submit(source: Source, prompt_line: str) -> str:
    if source.control is None:
        raise CommandError("the engine takes no requests", ExitCode.FAILURE)
    prompt, params = split_prompt(prompt_line)
    options = {name: value for name in params.__struct_fields__ if (value := getattr(params, name)) is not None}
    reply = source.control.submit(prompt, options).result(timeout=SYNC_TIMEOUT_S)
    if not reply.ok:
        raise CommandError(f"the engine refused {prompt!r}: {reply.error}", ExitCode.FAILURE)
    return reply.request_id


def _wait_until_finished(source: Source, engine: EngineProcess, request_ids: list[str]) -> None:
    """Block until every request has finished. Raises CommandError when the engine is gone or makes no more steps."""
    last_step, moved_at = -1, time.monotonic()
    while True:
        with source.view.lock:
            state, status = source.view.state, source.view.status
            finished = all(
                request_id in state.requests and state.requests[request_id].status == "finished"
                for request_id in request_ids
            )
            step = state.step
        if finished:
            return
        if not engine.is_running():
            raise engine.failure()
        if status is Status.ENDED:
            raise CommandError("the engine stopped before the requests were finished", ExitCode.FAILURE)
        if step != last_step:
            last_step, moved_at = step, time.monotonic()
        if time.monotonic() - moved_at > STALL_TIMEOUT_S:
            raise CommandError(f"no step for {STALL_TIMEOUT_S:.0f} s; gave up", ExitCode.FAILURE)
        time.sleep(POLL_S)


def _shown(text: str) -> str:
    """In quotes; a line break looks as it does on the screen."""
    return repr(text.replace("␊", UNICODE.newline))


def summary_lines(source: Source, request_ids: list[str]) -> list[str]:
    """What happened, in plain text: outputs, tokens, blocks by state, copies, and what the auditor found."""
    view = source.view
    with view.lock:
        state, counters, findings = view.state, view.state.counters, list(view.findings)
        info = state.info
        if info is None:
            raise CommandError("the engine has not announced itself", ExitCode.FAILURE)
        requests = [state.requests[request_id] for request_id in request_ids]
        allocated = [len(entry.event.block_ids) for entry in view.log if isinstance(entry.event, BlocksAllocated)]
        num_handed_out = sum(allocated) + counters.copies
        free, cached = state.num_free_blocks(), state.num_cached_blocks()
        held = info.num_blocks - free - cached
        lines = [f"engine     {info.model} on {info.device}, {info.dtype}, {info.attention_backend} attention"]
        for request in requests:
            lines += [
                f"{sequence.sequence_id:<10} {_shown(request.prompt)} -> {_shown(sequence.text)}"
                for sequence in request.sequences
            ]
        prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    audit = "ok" if not findings else f"{len(findings)} findings"
    return [
        *lines,
        f"requests   {len(requests)} finished, {sum(len(request.sequences) for request in requests)} sequences",
        f"tokens     {prompt_tokens} in prompts, {counters.generated_tokens} generated, {state.step} steps",
        f"blocks     {info.num_blocks} of {info.block_size} slots: {free} free, {held} held, {cached} cached",
        f"           {num_handed_out} were handed out in all",
        f"copies     {counters.copies} on write, {counted(counters.preemptions, 'preemption')}",
        f"audit      {audit}",
        *(f"           invariant {finding.rule}, step {finding.step}: {finding.message}" for finding in findings),
    ]
