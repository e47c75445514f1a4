"""Whole engine processes, found by name, killed without warning and started again."""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.transport.client import EngineClient
from kvscope.transport.discovery import list_engines, resolve
from kvscope.transport.recording import read_recording
from kvscope.transport.source import Status

CHILD = """
import importlib.util, sys, time
from pathlib import Path
from kvscope.transport.control import ControlServer
from kvscope.transport.discovery import EngineDirectory
from kvscope.transport.publisher import Publisher
from kvscope.transport.recording import Recorder

spec = importlib.util.spec_from_file_location("lab", sys.argv[1])
lab = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lab)
directory = EngineDirectory.create("lab", model="tiny", started=time.time())
publisher = Publisher(directory.endpoints.events, recorder=Recorder(sys.argv[2]))
control = ControlServer(directory.endpoints.control, publisher, lab.FakeEngine())
stream = lab.Stream(int(sys.argv[3]))
print(stream.epoch.hex(), flush=True)
while True:
    publisher.publish(stream.next())
    time.sleep(0.002)
"""


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


def start_engine(recording: Path, seed: int) -> tuple[subprocess.Popen[str], bytes]:
    arguments = [sys.executable, "-c", CHILD, str(Path(__file__).parent / "conftest.py"), str(recording), str(seed)]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, bytes.fromhex(child.stdout.readline())


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()


def test_killed_and_started_again_under_the_same_name(lab, runtime: Path, tmp_path: Path) -> None:
    first, first_epoch = start_engine(tmp_path / "first.mcap", 1)
    [entry] = list_engines()
    assert (entry.pid, entry.name) == (first.pid, "lab")
    client = EngineClient(resolve(None))
    client.connect()
    lab.wait_live(client)
    assert client.view.state.epoch == first_epoch
    lab.wait_until(lambda: (client.view.last_seq or 0) > 60)
    kill(first)
    lab.wait_until(lambda: client.view.status is Status.STALE)
    assert re.fullmatch(r"no heartbeat since [\d:]{8}", client.view.status_detail)
    last_seen = client.view.last_seq
    assert list_engines() == []
    second, second_epoch = start_engine(tmp_path / "second.mcap", 2)
    lab.wait_until(lambda: client.view.state.epoch == second_epoch)
    lab.wait_until(lambda: client.view.status is Status.LIVE)
    lab.wait_until(lambda: client.view.last_seq > last_seen, "its numbers overtake those of the life before")
    assert client.view.status is Status.LIVE
    assert client.view.findings == []
    assert all(entry.event is not None and entry.seq <= client.view.last_seq for entry in client.view.log)
    kill(second)
    client.close()
    recording = read_recording(tmp_path / "first.mcap")
    assert recording.missing is not None
    assert recording.batches[0][1].epoch == first_epoch
    stream = lab.Stream(1)
    assert [batch for _, batch in recording.batches] == stream.take(len(recording.batches))


def test_a_stopped_engine_process_is_stale_and_comes_back(lab, runtime: Path, tmp_path: Path) -> None:
    child, epoch = start_engine(tmp_path / "run.mcap", 1)
    client = EngineClient(resolve("lab"))
    client.connect()
    lab.wait_live(client)
    child.send_signal(signal.SIGSTOP)
    lab.wait_until(lambda: client.view.status is Status.STALE)
    assert [entry.name for entry in list_engines()] == ["lab"], "a stopped engine is not a dead one"
    child.send_signal(signal.SIGCONT)
    lab.wait_until(lambda: client.view.status is Status.LIVE)
    assert client.view.state.epoch == epoch
    assert (client.view.num_gaps, client.view.findings) == (0, [])
    kill(child)
    client.close()
