"""`kvscope run` and `kvscope serve`: the two ways an engine is started. Composition roots, one function each."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvscope.engine.build import build_engine, prepare
from kvscope.engine.config import ConfigError, EngineConfig
from kvscope.engine.engine import Engine
from kvscope.engine.intake import RequestRefusedError
from kvscope.engine.preflight import name_after
from kvscope.engine.report import json_report, text_report
from kvscope.engine.service import EngineService
from kvscope.engine.sinks import AuditSink, TeeSink
from kvscope.events.text import counted, make_printable
from kvscope.events.types import SamplingParams
from kvscope.transport.control import ControlServer
from kvscope.transport.discovery import EngineDirectory
from kvscope.transport.endpoints import Endpoints
from kvscope.transport.keys import Listening, ServerKeys
from kvscope.transport.publisher import Publisher
from kvscope.transport.recording import Recorder, SeriesRecorder, open_recorder

_SIGNAL_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


def run(
    config: EngineConfig,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    as_json: bool,
    record: Path | None,
    force: bool,
    max_bytes: int | None = None,
) -> int:
    """Run prompts headless through the engine and print what they became.

    The exit code is 1 when the audit found something, or the recording stopped early. SIGTERM and SIGHUP end it after
    the step under way; what there is by then is printed, and the exit code is the shell's for that signal.

    Raises:
        ConfigError: a setting or prompt that cannot work.
        EndpointError, RecordingError: the recording cannot be written.
    """
    audit = AuditSink(keep=True)
    sink = TeeSink([audit])
    engine = build_engine(prepare(config, name="run"), sink)
    requests = [_submit(engine, f"r{number}", prompt, params) for number, prompt in enumerate(prompts, 1)]
    recorder: Recorder | SeriesRecorder | None = None
    with contextlib.ExitStack() as stack:
        if record is not None:  # only now: a prompt that is refused must not cost an older recording
            recorder = stack.enter_context(contextlib.closing(open_recorder(record, force=force, max_bytes=max_bytes)))
            publisher = stack.enter_context(contextlib.closing(Publisher("inproc://run", recorder=recorder)))
            sink.add(publisher, audit.batches)
        audit.keep_no_more()
        signals: list[signal.Signals] = []
        with _on_signals(signals.append, signal.SIGTERM, signal.SIGHUP):
            try:
                while engine.has_work() and not signals:
                    engine.step()
            finally:
                engine.stop(_SIGNAL_WORDS[signals[0]] if signals else "run ended")
    problems = list(dict.fromkeys([*engine.check_integrity(), *(f.message for f in audit.auditor.findings)]))
    print_report = json_report if as_json else text_report
    sys.stdout.write(print_report(engine, requests, problems) + "\n")
    if signals:
        sys.stdout.flush()
        sys.stderr.write(f"kvscope: {_SIGNAL_WORDS[signals[0]]}; this is what was done until then\n")
        return 128 + signals[0]
    return 1 if problems or (recorder is not None and recorder.error is not None) else 0


def serve(
    config: EngineConfig,
    *,
    name: str | None,
    listening: Listening | None,
    read_only: bool,
    record: Path | None,
    force: bool,
    max_bytes: int | None = None,
    start_paused: bool,
    max_steps_per_second: float | None = None,
) -> int:
    """Serve one engine until SIGINT or SIGTERM.

    Raises:
        ConfigError, EndpointError, RecordingError: it cannot start; one line with the fix.
    """
    label = name if name is not None else name_after(config.model)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(contextlib.closing(_claim_directory(label, config.model, listening)))
        endpoints = listening.endpoints if listening is not None else directory.endpoints
        keys = listening.keys if listening is not None else None
        prepared = prepare(config, name=label)
        recorder = (
            stack.enter_context(contextlib.closing(open_recorder(record, force=force, max_bytes=max_bytes)))
            if record is not None
            else None
        )
        publisher = stack.enter_context(contextlib.closing(Publisher(endpoints.events, recorder=recorder, keys=keys)))
        engine = build_engine(prepared, publisher)
        if start_paused:
            engine.pause()
        service = EngineService(engine, max_steps_per_second=max_steps_per_second)
        control = ControlServer(endpoints.control, publisher, service, read_only=read_only, keys=keys)
        stack.enter_context(contextlib.closing(control))
        with _on_signals(lambda number: service.stop(_SIGNAL_WORDS[number]), *_SIGNAL_WORDS):
            _announce(engine, endpoints, keys, record)
            reason = service.run()
        _tell_stopped(label, reason)
    return 0


def _submit(engine: Engine, request_id: str, prompt: str, params: SamplingParams) -> Any:
    try:
        return engine.submit(prompt, params, request_id)
    except RequestRefusedError as error:
        raise ConfigError(f"prompt {request_id[1:]}: {error}") from None


@contextlib.contextmanager
def _on_signals(handle: Callable[[signal.Signals], None], *signals: signal.Signals) -> Iterator[None]:
    """Call `handle` between two bytecodes of the block when one of the signals comes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda n, _: handle(signal.Signals(n))) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _claim_directory(name: str, model: str, listening: Listening | None) -> EngineDirectory:
    """The engine's name on this machine, and what attaching by that name takes."""
    listen = listening.endpoints.events if listening is not None else None
    keys = listening.keys if listening is not None else None
    server_key = keys.own.public.decode() if keys is not None else None
    return EngineDirectory.create(name, model=model, started=time.time(), listen=listen, server_key=server_key)


def _announce(engine: Engine, endpoints: Endpoints, keys: ServerKeys | None, record: Path | None) -> None:
    """Say that the sockets answer, and how to attach."""
    info = engine.info
    lines = [
        f"kvscope: engine {info.name} ready",
        (
            f"  {make_printable(info.model)}, {info.device} {info.dtype}, {info.attention_backend} attention; "
            f"{info.allocator} {info.kv_dtype} KV in {counted(info.num_blocks, 'block')} of {info.block_size} slots, "
            f"{info.bytes_per_block:,} bytes each"
        ),
        f"  attach here:          kvscope attach {info.name}",
        f"  attach over SSH:      ssh -t HOST kvscope attach {info.name}",
        *(_forwarding(endpoints) if keys is None else _with_keys(endpoints, keys)),
    ]
    if record is not None:
        lines.append(f"  recording to {record}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _tell_stopped(name: str, reason: str) -> None:
    """On a terminal over the `^C`, so that the shell's prompt does not land behind it."""
    start = "\r" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{start}kvscope: engine {name} stopped: {reason}\n")


def _with_keys(endpoints: Endpoints, keys: ServerKeys) -> list[str]:
    port, num_allowed = endpoints.events.rpartition(":")[2], len(keys.allowed - {keys.own.public})
    return [
        f"  from elsewhere:       kvscope attach tcp://HOST:{port} --server-key {keys.public_file.name}",
        f"                        with a copy of {keys.public_file}; {counted(num_allowed, 'key')} of theirs let in",
    ]


def _forwarding(endpoints: Endpoints) -> list[str]:
    if endpoints.events.startswith("tcp://"):
        events, control = (address.removeprefix("tcp://") for address in (endpoints.events, endpoints.control))
        ports = [address.rpartition(":")[2] for address in (events, control)]
        return [
            f"  or from a laptop:     ssh -N -L {ports[0]}:{events} -L {ports[1]}:{control} HOST &",
            f"                        kvscope attach tcp://127.0.0.1:{ports[0]}",
        ]
    events, control = (address.removeprefix("ipc://") for address in (endpoints.events, endpoints.control))
    return [
        (
            f"  or from a laptop:     mkdir -m 700 gpu; ssh -N -L gpu/events.sock:{events} "
            f"-L gpu/control.sock:{control} HOST &"
        ),
        "                        kvscope attach ./gpu",
    ]
