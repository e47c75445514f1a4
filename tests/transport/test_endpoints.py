"""Addresses and discovery: private directories, names, what a person types."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.transport.discovery import EngineDirectory, list_engines, resolve
from kvscope.transport.endpoints import EndpointError, directory_endpoints, parse_listen


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # shorter than pytest's: a socket path has 107 bytes
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


def dead_pid() -> int:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(child.stdout)


@pytest.mark.parametrize(
    ("text", "events", "control"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ("tcp://localhost:5557", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ("tcp://127.9.9.9:1", "tcp://127.9.9.9:1", "tcp://127.9.9.9:2"),
        ("tcp://[::1]:5557", "tcp://[::1]:5557", "tcp://[::1]:5558"),
    ],
)
def test_listen_on_loopback(text: str, events: str, control: str) -> None:
    assert parse_listen(text)[:2] == (events, control)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.1", "[::]", "example.org", "eth0", "127.0.0.1.example.org"])
def test_any_other_address_needs_keys(host: str) -> None:
    with pytest.raises(EndpointError, match=r"needs keys.*ssh -L"):
        parse_listen(f"tcp://{host}:5557")


@pytest.mark.parametrize(
    "text",
    ["", "tcp://", "tcp://127.0.0.1", "tcp://:1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65535", "tcp://127.0.0.1:x",
     "tcp://::1:5557", "udp://127.0.0.1:1", "127.0.0.1:5557", "tcp://127.0.0.1:0005557", "tcp://127.0.0.1:+5", "tcp://127.0.0.1:²"],
)  # fmt: skip
def test_not_an_address(text: str) -> None:
    with pytest.raises(EndpointError, match="tcp://host:port"):
        parse_listen(text)


def test_directory_is_private_and_goes_away(runtime: Path) -> None:
    directory = EngineDirectory.create("lab", model="tiny", started=5.0)
    assert directory.path == runtime / "kvscope" / "lab"
    assert [mode(path) for path in (directory.path, directory.path.parent)] == [0o700, 0o700]
    assert mode(directory.path / "engine.json") == 0o600
    [entry] = list_engines()
    assert (entry.pid, entry.name, entry.model, entry.started) == (os.getpid(), "lab", "tiny", 5.0)
    directory.close()
    directory.close()
    assert not directory.path.exists()
    assert list_engines() == []


def test_name_in_use(runtime: Path) -> None:
    directory = EngineDirectory.create("lab")
    with pytest.raises(EndpointError, match=rf"named lab is already running \(pid {os.getpid()}\); choose --name"):
        EngineDirectory.create("lab")
    directory.close()
    EngineDirectory.create("lab").close()


def test_a_dead_engine_makes_room(runtime: Path) -> None:
    directory = EngineDirectory.create("lab")
    entry = (directory.path / "engine.json").read_text()
    (directory.path / "engine.json").write_text(entry.replace(str(os.getpid()), str(dead_pid()), 1))
    listen(directory.path / "control.sock").close()  # the file stays, nobody answers
    assert list_engines() == []
    again = EngineDirectory.create("lab", started=2.0)
    assert not (again.path / "control.sock").exists()
    directory.close()
    assert again.path.exists(), "the old engine must not remove the new one's directory"


def test_what_dead_engines_of_other_names_left_is_removed(runtime: Path) -> None:
    dead, _ = EngineDirectory.create("dead"), EngineDirectory.create("alive")
    entry = (dead.path / "engine.json").read_text()
    (dead.path / "engine.json").write_text(entry.replace(str(os.getpid()), str(dead_pid()), 1))
    (runtime / "kvscope" / "somebodys").mkdir()
    EngineDirectory.create("lab")
    assert sorted(path.name for path in (runtime / "kvscope").iterdir() if path.is_dir()) == [
        "alive",
        "lab",
        "somebodys",
    ]


def test_what_cannot_be_removed_is_named(runtime: Path) -> None:
    EngineDirectory.create("other").close()
    (runtime / "kvscope" / "lab").touch()
    with pytest.raises(EndpointError, match="cannot remove what a dead engine left at"):
        EngineDirectory.create("lab")


def test_a_recycled_pid_is_not_the_engine(runtime: Path) -> None:
    directory = EngineDirectory.create("lab")
    text = (directory.path / "engine.json").read_text()
    ticks = str(directory.entry.pid_ticks)
    (directory.path / "engine.json").write_text(text.replace(f'"pid_ticks":{ticks}', '"pid_ticks":1'))
    assert list_engines() == []
    EngineDirectory.create("lab").close()


def test_a_dead_pid_whose_socket_answers_is_alive(runtime: Path) -> None:
    directory = EngineDirectory.create("lab")
    entry = (directory.path / "engine.json").read_text()
    (directory.path / "engine.json").write_text(entry.replace(str(os.getpid()), str(dead_pid()), 1))
    with listen(directory.path / "control.sock"):
        assert [found.name for found in list_engines()] == ["lab"]
        with pytest.raises(EndpointError, match="already running"):
            EngineDirectory.create("lab")


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "x" * 65, "é", "a\n", "\x1b[31m"])
def test_bad_names(name: str, runtime: Path) -> None:
    with pytest.raises(EndpointError, match="engine name") as refusal:
        EngineDirectory.create(name)
    assert str(refusal.value).isprintable()


def test_too_long_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("d" * 100)))
    with pytest.raises(EndpointError, match=r"has \d+ bytes, the system allows 107; set XDG_RUNTIME_DIR"):
        EngineDirectory.create("lab")


@pytest.mark.parametrize("bad_mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_may_enter_is_refused(bad_mode: int, runtime: Path) -> None:
    (runtime / "kvscope").mkdir()
    (runtime / "kvscope").chmod(bad_mode)
    with pytest.raises(EndpointError, match="chmod 700"):
        EngineDirectory.create("lab")


def test_a_link_in_place_of_the_directory_is_refused(runtime: Path, tmp_path: Path) -> None:
    (runtime / "kvscope").symlink_to(tmp_path)
    with pytest.raises(EndpointError, match="not a directory of yours"):
        EngineDirectory.create("lab")


def test_a_parent_that_others_may_change_is_refused(runtime: Path) -> None:
    runtime.chmod(0o777)
    with pytest.raises(EndpointError, match="changed by other users"):
        EngineDirectory.create("lab")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_somebody_elses_directory_is_refused(runtime: Path) -> None:
    (runtime / "kvscope").mkdir(mode=0o700)
    os.chown(runtime / "kvscope", 12345, 12345)
    with pytest.raises(EndpointError, match="not a directory of yours"):
        EngineDirectory.create("lab")


def test_resolve_without_a_name(runtime: Path) -> None:
    with pytest.raises(EndpointError, match="no engine is running; start one"):
        resolve(None)
    first = EngineDirectory.create("one")
    assert resolve(None) == first.endpoints
    EngineDirectory.create("two")
    with pytest.raises(EndpointError, match="several engines are running: one, two"):
        resolve(None)
    assert resolve("two").events == f"ipc://{runtime}/kvscope/two/events.sock"
    assert resolve("two").label == "two"
    with pytest.raises(EndpointError, match="no engine named three; running: one, two"):
        resolve("three")


def test_resolve_a_directory_and_a_socket(runtime: Path) -> None:
    forwarded = runtime / "gpu"
    forwarded.mkdir()
    with listen(forwarded / "events.sock"), listen(forwarded / "control.sock"):
        expected = directory_endpoints(forwarded)
        for text in (str(forwarded), str(forwarded / "events.sock"), f"ipc://{forwarded}/events.sock"):
            assert resolve(text) == expected
    assert resolve("tcp://box:7000")[:2] == ("tcp://box:7000", "tcp://box:7001")
    for text in (str(runtime / "nowhere"), str(runtime), f"ipc://{runtime}/x.sock"):
        with pytest.raises(EndpointError, match="no engine's socket"):
            resolve(text)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"pid": "x", "name": "y"}', '{"pid": 1e99, "name": "y"}', "\udcff"]
)
def test_a_damaged_engine_file_is_skipped(content: str, runtime: Path) -> None:
    directory = EngineDirectory.create("lab")
    (directory.path / "engine.json").write_bytes(content.encode(errors="surrogateescape"))
    assert list_engines() == []
    EngineDirectory.create("lab").close()
