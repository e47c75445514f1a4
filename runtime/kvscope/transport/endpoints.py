"""Addresses: what a person types for an engine, and what a socket binds or connects to."""

import ipaddress
import os
from pathlib import Path
from typing import NamedTuple

MAX_SOCKET_PATH_BYTES = 107  # sun_path has 108 bytes, the last one is NUL
EVENTS_SOCKET = "events.sock"
CONTROL_SOCKET = "control.sock"


class EndpointError(ValueError):
    """No usable endpoint. One line that names the fix."""


class KeyPair(NamedTuple):
    """A CURVE key, both halves in Z85."""

    public: bytes
    secret: bytes


class ClientKeys(NamedTuple):
    """What it takes to connect to an engine that wants keys: one's own pair, and the engine's public key."""

    own: KeyPair
    server: bytes


class Endpoints(NamedTuple):
    """Where an engine's stream and its control channel are; `label` is what a person calls it."""

    events: str
    control: str
    label: str
    keys: ClientKeys | None = None


def directory_endpoints(directory: Path, label: str | None = None) -> Endpoints:
    """The two sockets of a directory. Raises EndpointError when their paths are too long for a socket."""
    events, control = directory / EVENTS_SOCKET, directory / CONTROL_SOCKET
    for path in (events, control):
        check_socket_path(path)
    return Endpoints(f"ipc://{events}", f"ipc://{control}", label or str(directory))


def check_socket_path(path: Path) -> None:
    """Raises EndpointError for a path that no Unix socket can have."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise EndpointError(
            f"socket path {path} has {num_bytes} bytes, the system allows {MAX_SOCKET_PATH_BYTES}; "
            "set XDG_RUNTIME_DIR to a shorter directory"
        )


def parse_listen(text: str, *, has_keys: bool = False) -> Endpoints:
    """`tcp://ADDRESS:PORT` to bind: events at PORT, control at PORT + 1. Loopback only, unless there are keys.

    Raises:
        EndpointError: not such an address, or one that other machines could reach.
    """
    host, port = _split_tcp(text)
    host = "127.0.0.1" if host == "localhost" else host
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        address = None
    if not has_keys and (address is None or not address.is_loopback):
        raise EndpointError(
            f"{text}: an address that others can reach needs keys: --allow their .key files (kvscope keys new makes "
            f"them), or listen on tcp://127.0.0.1:{port} and forward it with ssh -L"
        )
    if address is None:
        raise EndpointError(f"{text}: listen on a numeric address, such as 127.0.0.1 or 0.0.0.0")
    return _tcp_endpoints(host, port)


def reachable_here(endpoints: Endpoints) -> Endpoints:
    """The same, with an address of this machine where an engine listens on all of them."""
    events, control = (
        address.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
        for address in (endpoints.events, endpoints.control)
    )
    return endpoints._replace(events=events, control=control)


def parse_tcp(text: str) -> Endpoints:
    """`tcp://host:port` to connect to. Raises EndpointError."""
    return _tcp_endpoints(*_split_tcp(text))


def _tcp_endpoints(host: str, port: int) -> Endpoints:
    return Endpoints(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}", f"tcp://{host}:{port}")


def _split_tcp(text: str) -> tuple[str, int]:
    host, colon, port_text = text.removeprefix("tcp://").rpartition(":")
    valid_port = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and 1 <= int(port_text) <= 65534
    ambiguous = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not text.startswith("tcp://") or not colon or not host or not valid_port or ambiguous or "/" in host:
        raise EndpointError(f"{text!r} is not tcp://host:port with a port from 1 to 65534 (control uses port + 1)")
    return host, int(port_text)
