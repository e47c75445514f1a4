"""Over a real sshd on loopback: the two sockets forwarded as `kvscope serve` prints it, and a viewer at the far end."""

import contextlib
import getpass
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.events.codec import encode_state
from kvscope.transport.client import EngineClient
from kvscope.transport.discovery import resolve
from kvscope.transport.source import Status

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
def ssh_server(folder: Path) -> Iterator[list[str]]:
    """A private sshd; yields the ssh command that logs into it."""
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
