"""Over a real sshd on loopback: the two sockets forwarded as `kvscope serve` prints it, and a viewer at the far end."""

import contextlib
import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvscope.events.codec import encode_state
from kvscope.transport.client import EngineClient
from kvscope.transport.discovery import resolve
from kvscope.transport.source import Status

from .conftest import Kvscope, TerminalSession
from .test_end_to_end import finished, own_runtime_directory, serving, submit_all, wait_until

__all__ = ["own_runtime_directory"]  # a fixture, in effect here too

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="no OpenSSH server here")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def ssh_server(folder: Path, **far_env: str) -> Iterator[list[str]]:
    """A private sshd; yields the ssh command that logs into it, the destination last. `far_env` is set over there."""
    assert SSHD is not None
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    port = free_port()
    options = {
        "ListenAddress": "127.0.0.1",
        "Port": port,
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized_keys",
        "PidFile": folder / "pid",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "PasswordAuthentication": "no",
    }
    if far_env:
        options["SetEnv"] = " ".join(f'"{name}={value}"' for name, value in far_env.items())
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    with contextlib.suppress(OSError):
        Path("/run/sshd").mkdir(exist_ok=True)  # where privilege separation wants it, when run as root
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL)
    try:
        yield [
            *("ssh", "-F", "/dev/null", "-p", str(port), "-i", str(folder / "user"), "-o", "BatchMode=yes"),
            *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"),
            f"{getpass.getuser()}@127.0.0.1",
        ]
    finally:
        server.terminate()
        server.wait()


def test_a_viewer_behind_forwarded_sockets_sees_the_same(tmp_path: Path) -> None:
    laptop, keys = tmp_path / "gpu", tmp_path / "ssh"
    laptop.mkdir(mode=0o700)
    keys.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving("far", "--block-size", "4", "--num-gpu-blocks-override", "24"))
        here = stack.enter_context(contextlib.closing(EngineClient(resolve("far")).connect()))
        ssh = stack.enter_context(ssh_server(keys))
        wait_until(lambda: subprocess.run([*ssh, "true"], check=False).returncode == 0, "sshd")
        forwards = [
            word
            for name in ("events", "control")
            for word in ("-L", f"{laptop}/{name}.sock:{tmp_path}/kvscope/far/{name}.sock")
        ]
        tunnel = subprocess.Popen([*ssh[:-1], "-N", *forwards, ssh[-1]])
        stack.callback(tunnel.wait)
        stack.callback(tunnel.terminate)
        wait_until((laptop / "control.sock").exists, "the forwarded sockets")
        there = stack.enter_context(contextlib.closing(EngineClient(resolve(str(laptop))).connect(timeout=30)))
        wait_until(lambda: there.view.status is Status.LIVE, "LIVE through ssh")
        request_ids = submit_all(there)
        wait_until(lambda: finished(there, request_ids) and finished(here, request_ids), "all requests finished")
        wait_until(lambda: here.view.last_seq == there.view.last_seq, "both ends caught up")
        assert encode_state(there.view.state) == encode_state(here.view.state)
        assert there.view.num_gaps == 0
        tunnel.terminate()
        tunnel.wait()
        wait_until(lambda: there.view.status is Status.STALE, "STALE once the tunnel is cut")
        assert here.view.status is Status.LIVE


class Far(NamedTuple):
    """An engine called `far` behind an sshd, and what a user types to reach it."""

    ssh: list[str]
    address: str
    scratch: Path

    @property
    def near_env(self) -> dict[str, str]:
        """As on a laptop: no engines of its own, a scratch directory to look into, and this sshd's key."""
        nowhere = self.scratch.with_name("nowhere")
        nowhere.mkdir(mode=0o700, exist_ok=True)
        return {"XDG_RUNTIME_DIR": str(nowhere), "TMPDIR": str(self.scratch), "KVSCOPE_SSH": shlex.join(self.ssh[:-1])}


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    keys, scratch = tmp_path / "ssh", tmp_path / "s"
    keys.mkdir(mode=0o700)
    scratch.mkdir(mode=0o700)
    far_env = {name: value for name in ("PYTHONPATH", "PATH") if (value := os.environ.get(name))}
    with ssh_server(keys, XDG_RUNTIME_DIR=str(tmp_path), **far_env) as ssh:
        wait_until(lambda: subprocess.run([*ssh, "true"], check=False).returncode == 0, "sshd")
        yield Far(ssh, f"ssh://{ssh[-1]}", scratch)


def leave_no_trace(far: Far) -> None:
    """No socket, no directory, no ssh of ours stays behind."""
    wait_until(lambda: not list(far.scratch.iterdir()), "the private directory is removed")
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
    assert not [command for command in commands if f"{far.scratch}/".encode() in command]


def readable(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool(path.read_bytes())
    return False


def test_attach_reaches_a_far_engine_both_ways_and_cleans_up(far: Far, kvscope: Kvscope) -> None:
    with serving("far", "--block-size", "4", "--num-gpu-blocks-override", "24"):
        for end in ("q", "\x03", signal.SIGTERM):
            session = kvscope.in_terminal("attach", far.address, **far.near_env)
            session.wait_for("LIVE")
            session.wait_for("24 blocks")  # the pool of that engine
            if isinstance(end, str):
                session.type(end)
            else:
                session.process.send_signal(end)
            assert session.wait() == (128 + end if isinstance(end, signal.Signals) else 0)
            leave_no_trace(far)

        words = [*far.ssh[:-1], "-t", "-t", far.ssh[-1], sys.executable, "-m", "kvscope.dashboard.cli", "attach"]
        session = TerminalSession(tuple(words), {**kvscope.env, **far.near_env}, 100, 30)
        try:
            session.wait_for("LIVE")
            session.type("q")
            assert session.wait() == 0
        finally:
            session.close()


def test_what_ssh_cannot_do_is_one_line(far: Far, kvscope: Kvscope) -> None:
    def refused(address: str, **env: str) -> str:
        session = kvscope.in_terminal("attach", address, **{**far.near_env, **env})
        assert session.wait() == 2, session.text
        leave_no_trace(far)
        (line,) = [line for line in session.text.splitlines() if line.strip()]
        return line

    where = far.ssh[-1]
    assert f"no engine is running on {where}; start one with: kvscope serve there" in refused(far.address)
    strict = shlex.join([word.replace("=no", "=yes") if "StrictHost" in word else word for word in far.ssh[:-1]])
    assert "Host key verification failed.; try first: ssh" in refused(far.address, KVSCOPE_SSH=strict)
    assert "needs the ssh client, and there is no nossh here" in refused(far.address, KVSCOPE_SSH="nossh")
    assert "is not ssh://" in refused("ssh://-oProxyCommand=x")
    done = kvscope("attach", far.address, **far.near_env)
    assert (done.code, done.errors.count("\n")) == (2, 1)
    assert f"attach needs a terminal, and its output is not one; a headless look is: ssh {where} kvscope" in done.errors
