"""A real engine process on the real model, real sockets, a real recording, and viewers that come and go."""

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvscope.events.audit import Auditor
from kvscope.events.codec import encode_state
from kvscope.transport.client import EngineClient
from kvscope.transport.discovery import resolve
from kvscope.transport.recording import read_recording
from kvscope.transport.source import Status

from .conftest import Kvscope

PATIENCE_S = 90.0
NUM_LATE_JOINERS = 50
# Small enough that requests are preempted and copied while viewers join.
SMALL_POOL = ("--block-size", "4", "--num-gpu-blocks-override", "24", "--max-num-batched-tokens", "24")
PROMPTS = [
    ("ROMEO: I take thee at thy word", {"n": 2, "max_tokens": 40, "seed": 1}),
    ("JULIET: What man art thou", {"n": 3, "max_tokens": 24, "seed": 2}),
    ("First Citizen: Speak, speak.", {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True}),
    ("To be, or not to be", {"n": 2, "max_tokens": 30, "seed": 3}),
]


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} never held"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(name: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """`kvscope serve`, ready; ended with SIGTERM."""
    command = [sys.executable, "-m", "kvscope.dashboard.cli", "serve", "tiny-shakespeare", "--name", name, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first == f"kvscope: engine {name} ready\n", first + process.stdout.read()
        yield process
        process.terminate()
        assert process.wait(PATIENCE_S) in (0, -signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(autouse=True)
def own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def submit_all(client: EngineClient) -> list[str]:
    return [client.submit(prompt, dict(options)).result(PATIENCE_S).request_id for prompt, options in PROMPTS]


def finished(client: EngineClient, request_ids: list[str]) -> bool:
    with client.view.lock:
        requests = client.view.state.requests
        return all(name in requests and requests[name].status == "finished" for name in request_ids)


def test_late_joiners_end_with_the_state_of_one_who_was_there_from_the_start(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng = random.Random(seed)
    recording = tmp_path / "run.mcap"
    with contextlib.ExitStack() as stack:
        # Slow enough for fifty viewers, who share one process here and check every batch.
        process = stack.enter_context(
            serving("late", *SMALL_POOL, "--max-steps-per-second", "12", "--record", str(recording))
        )
        assert listening_ports(process.pid) == set()
        first = stack.enter_context(contextlib.closing(EngineClient(resolve("late")).connect()))
        wait_until(lambda: first.view.status is Status.LIVE)
        request_ids = submit_all(first)
        joined = []
        while len(joined) < NUM_LATE_JOINERS:
            time.sleep(rng.uniform(0, 0.08))  # a random moment, not a wait for something
            joined.append(stack.enter_context(contextlib.closing(EngineClient(resolve("late")).connect())))
            if finished(first, request_ids):
                request_ids = submit_all(first)  # those before have finished, and may have left the state
        wait_until(lambda: finished(first, request_ids), "all requests finished")
        wait_until(lambda: all(c.view.last_seq == first.view.last_seq for c in joined), "everybody caught up")
        expected = encode_state(first.view.state)
        for client in joined:
            assert client.view.status is Status.LIVE
            assert client.view.findings == []
            assert encode_state(client.view.state) == expected
        counters = first.view.state.counters
        assert counters.preemptions > 0
        assert counters.copies > 0
        process.terminate()
        wait_until(lambda: first.view.status is Status.ENDED, "the goodbye")
        process.wait(PATIENCE_S)
    auditor = Auditor()
    replayed = read_recording(recording)
    assert replayed.missing is None
    states = []
    for _, batch in replayed.batches:
        assert auditor.observe(batch) == []
        states.append(encode_state(auditor.state))
    assert expected in states[-3:]  # the goodbye follows it


def test_a_killed_engine_is_stale_and_its_successor_is_picked_up() -> None:
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(serving("phoenix", *SMALL_POOL))
        client = stack.enter_context(contextlib.closing(EngineClient(resolve("phoenix")).connect()))
        wait_until(lambda: client.view.status is Status.LIVE)
        request_id = client.submit("ROMEO:", {"max_tokens": 4}).result(PATIENCE_S).request_id
        wait_until(lambda: finished(client, [request_id]))
        epoch = client.view.state.epoch
        process.kill()
        wait_until(lambda: client.view.status is Status.STALE, "STALE")
        assert "no heartbeat since" in client.view.status_detail
        assert finished(client, [request_id])  # the last picture stays
        stack.enter_context(serving("phoenix", *SMALL_POOL))
        wait_until(lambda: client.view.status is Status.LIVE, "reattached")
        assert client.view.state.epoch != epoch
        assert client.view.state.requests == {}


def test_cancel_and_pause_over_the_wire() -> None:
    with (
        serving("control", "--block-size", "4", "--num-gpu-blocks-override", "64", "--max-steps-per-second", "20"),
        contextlib.closing(EngineClient(resolve("control")).connect()) as client,
    ):
        submitted = client.submit("To be", {"max_tokens": 100, "n": 2, "ignore_eos": True}).result(PATIENCE_S)
        assert submitted.ok, submitted.error
        request_id = submitted.request_id
        wait_until(lambda: client.view.state.counters.generated_tokens > 3)
        assert client.pause().result(PATIENCE_S).ok
        wait_until(lambda: client.view.state.status == "paused")
        step = client.view.state.step
        assert client.step(3).result(PATIENCE_S).ok
        wait_until(lambda: client.view.state.step == step + 3 and client.view.state.phase == "commit")
        assert client.cancel(request_id).result(PATIENCE_S).ok
        wait_until(lambda: finished(client, [request_id]))
        assert client.view.state.num_free_blocks() + client.view.state.num_cached_blocks() == 64
        assert client.view.state.step == step + 3
        refusal = client.submit("x " * 400, {}).result(PATIENCE_S)
        assert not refusal.ok
        assert "--max-model-len 512" in refusal.error


def test_an_engine_on_loopback_tcp_is_found_by_its_name() -> None:
    port = random.SystemRandom().randrange(20_000, 60_000)
    with (
        serving("loopback", "--listen", f"tcp://127.0.0.1:{port}"),
        contextlib.closing(EngineClient(resolve("loopback")).connect()) as client,
    ):
        wait_until(lambda: client.view.status is Status.LIVE)
        assert resolve(None).events == f"tcp://127.0.0.1:{port}"
        request_id = client.submit("ROMEO:", {"max_tokens": 3}).result(PATIENCE_S).request_id
        wait_until(lambda: finished(client, [request_id]))


def test_an_engine_for_other_machines_takes_keys_and_no_control(
    kvscope: Kvscope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    kvscope.env["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    assert kvscope("keys", "new").code == kvscope("keys", "new", "alice", "--dir", str(tmp_path)).code == 0
    port = random.SystemRandom().randrange(20_000, 60_000)
    alice = tmp_path / "alice.key"
    flags = ("--listen", f"tcp://0.0.0.0:{port}", "--allow", str(alice), "--no-control")
    with serving("far", *flags) as process:
        assert listening_ports(process.pid) == {port, port + 1}
        with contextlib.closing(EngineClient(resolve("far")).connect()) as client:  # the owner, by name
            wait_until(lambda: client.view.status is Status.LIVE)
            assert not client.submit("ROMEO:", {}).result(PATIENCE_S).ok
        session = kvscope.in_terminal("attach", "far")
        session.wait_for("this engine takes no prompts")
        address, server_key = f"tcp://127.0.0.1:{port}", tmp_path / "config" / "kvscope" / "keys" / "default.key"
        status = ("status", address, "--once", "--server-key", str(server_key))
        assert "blocks" in kvscope(*status, "--key", str(alice.with_suffix(".key_secret"))).output
        refused = kvscope("status", address, "--once")
        assert (refused.code, refused.errors.count("\n")) == (2, 1)
        assert "wants keys; name its .key file with --server-key" in refused.errors


def listening_ports(pid: int) -> set[int]:
    """The TCP ports a process listens on."""
    files = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in files}
