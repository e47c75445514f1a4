"""What the campaigns share: processes of ours, their logs, and a proxy between them that loses what it is told to."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from kvscope.events.codec import encode_state
from kvscope.events.state import EngineState
from kvscope.transport.endpoints import Endpoints, directory_endpoints

HERE = Path(__file__).resolve().parent
PATIENCE_S = 30.0
# Whatever happens to the campaign, the kernel ends its children: a stopped one would wait for ever.
TETHER = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()

_is_ending = threading.Event()


class Interrupted(Exception):  # noqa: N818 - somebody's wish, not an error
    """The campaign was asked to end."""


def clean_up_when_ended() -> None:
    """From now on SIGTERM and Ctrl-C let every lab, in whichever thread, clean up behind itself first."""

    def end(number: int, _: object) -> None:
        if not _is_ending.is_set():
            _is_ending.set()
            raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def digest(state: EngineState) -> str:
    return hashlib.blake2b(encode_state(state), digest_size=12).hexdigest()


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        if _is_ending.is_set():
            raise Interrupted
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come about in {patience_s:.0f} s")
        time.sleep(0.002)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class Child:
    """A process of ours that is ended on the way out."""

    def __init__(self, script: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, *TETHER, sys.executable, str(HERE / script), *arguments], stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Tail:
    """Reads what a process has appended to its log since the last look."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open()
        self._rest = ""

    def lines(self) -> list[list[str]]:
        *whole, self._rest = (self._rest + self._file.read()).split("\n")
        return [line.split() for line in whole]

    def close(self) -> None:
        self._file.close()


class EngineLog:
    """The digests of the engine's own state, in order; a key is (epoch, time)."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.digests: dict[tuple[str, int], str] = {}
        self.order: list[tuple[str, int]] = []
        self.num_read = 0

    def read(self) -> None:
        for epoch, time_ns, value in self._tail.lines():
            key = (epoch, int(time_ns))
            self.digests[key] = value
            self.order.append(key)
            self.num_read += 1

    def newest(self) -> tuple[str, int]:
        wait_until(lambda: self.read() or bool(self.order), "the engine's first batch")
        return self.order[-1]

    def forget_all_but(self, count: int) -> None:
        for key in self.order[:-count]:
            self.digests.pop(key, None)
        del self.order[:-count]


class ClientLog:
    """What a viewer has shown."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.shown: dict[tuple[str, int], str] = {}
        self.num_snapshots = self.num_skips = 0
        self.status, self.at = "CONNECTING", ("-", 0)
        self.status_at_ns = 0

    def read(self) -> None:
        for kind, *fields in self._tail.lines():
            if kind == "S":
                self.status_at_ns, self.status, self.at = int(fields[0]), fields[1], (fields[2], int(fields[3]))
                continue
            if kind == "L":
                self.num_skips += 1
                continue
            self.shown[fields[0], int(fields[1])] = fields[2]
            self.num_snapshots += kind == "R"


class Proxy:
    """Between the engine's PUB and the viewer's SUB, message by message.

    `loss`, `copies` and `swaps` are probabilities: of losing a message, of sending it twice, and of holding it back
    until the next one has gone.
    """

    def __init__(self, upstream: str, address: str, seed: int) -> None:
        self.loss = self.copies = self.swaps = 0.0
        self.num_hurt = 0
        self._random = random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._source, self._sink = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._source.setsockopt(zmq.RECONNECT_IVL, 20)
        self._source.subscribe(b"")
        self._source.connect(upstream)
        self._sink.bind(address)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def calm(self) -> None:
        self.loss = self.copies = self.swaps = 0.0

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        held: list[list[bytes]] = []
        while not self._closing.is_set():
            if not self._source.poll(20):
                continue
            frames, chance = self._source.recv_multipart(), self._random.random()
            if chance < self.loss:
                self.num_hurt += 1
                continue
            if chance < self.swaps:
                self.num_hurt += 1
                held.append(frames)
                continue
            if chance < self.copies:
                self.num_hurt += 1
                self._sink.send_multipart(frames)
            self._sink.send_multipart(frames)
            for late in held:
                self._sink.send_multipart(late)
            held.clear()


class Lab:
    """One engine, one proxy, one viewer, in a directory of their own."""

    def __init__(self, directory: Path, seed: int, *engine_options: str) -> None:
        self.directory, self._engine_options, self._num_engines = directory, engine_options, 0
        directory.mkdir()
        self._seed = seed
        engine = directory_endpoints(directory)
        self.endpoints = Endpoints(f"ipc://{directory}/proxy.sock", engine.control, "lab")
        self.engine_log = EngineLog(directory / "engine.log")
        self.start_engine()
        self.proxy = Proxy(engine.events, self.endpoints.events, seed)
        self.start_client()

    def start_engine(self, *options: str) -> None:
        self._num_engines += 1
        arguments = (str(self.directory), "--digests", str(self.directory / "engine.log"), *self._engine_options)
        self.engine = Child("lab_engine.py", *arguments, "--seed", str(self._seed + self._num_engines), *options)
        assert self.engine.read_line() == "ready"

    def start_client(self) -> None:
        path = self.directory / "client.log"
        self.client = Child("lab_client.py", self.endpoints.events, self.endpoints.control, str(path), "")
        self.client_log = ClientLog(path)

    def has_caught_up(self, goal: tuple[str, int]) -> bool:
        """Whether the viewer calls a picture live that is of the goal's life, and not older than it."""
        log = self.client_log
        log.read()
        return log.status == "LIVE" and log.at[0] == goal[0] and log.at[1] >= goal[1]

    def close(self) -> None:
        for child in (self.client, self.engine):
            child.kill()
        self.proxy.close()
