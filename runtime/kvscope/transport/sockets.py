"""ZeroMQ sockets with the settings that all of ours need, and bind errors as one line."""

import errno
import stat
from pathlib import Path

import zmq

from kvscope.transport.endpoints import EndpointError, check_socket_path

LINGER_MS = 500
MAX_UNREAD_REPLIES = 64  # per client; a snapshot may have many MB


def bind(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, max_bytes: int) -> "zmq.Socket[bytes]":
    """A bound socket; a socket file is made private to its owner.

    Raises:
        EndpointError: the address is in use or cannot be bound.
    """
    path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
    if path is not None:
        check_socket_path(path)
    sock = _new_socket(context, kind, address, max_bytes)
    if kind == zmq.ROUTER:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or vanished peer is an error, not a silent loss
        sock.setsockopt(zmq.SNDHWM, MAX_UNREAD_REPLIES)
    try:
        _bind(sock, address, path)
    except BaseException:
        sock.close(linger=0)  # an open socket would keep its context from ending
        raise
    return sock


def connect(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, max_bytes: int) -> "zmq.Socket[bytes]":
    """A socket that connects, now or as soon as somebody listens. Raises EndpointError for an impossible address."""
    sock = _new_socket(context, kind, address, max_bytes)
    sock.setsockopt(zmq.RECONNECT_IVL, 50)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if kind == zmq.DEALER:
        # Nothing waits for a peer that is not there: a prompt must not reach the next engine minutes later.
        sock.setsockopt(zmq.IMMEDIATE, 1)
    try:
        sock.connect(address)
    except zmq.ZMQError as error:
        sock.close(linger=0)
        raise EndpointError(f"cannot connect to {address}: {error.strerror}") from None
    return sock


def _new_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, max_bytes: int
) -> "zmq.Socket[bytes]":
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, LINGER_MS)
    sock.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    if address.startswith("tcp://["):
        sock.setsockopt(zmq.IPV6, 1)
    return sock


def _bind(sock: "zmq.Socket[bytes]", address: str, path: Path | None) -> None:
    try:
        sock.bind(address)
        if path is not None:
            _make_private(path)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise EndpointError(f"{address} is in use; listen on another port") from None
        raise EndpointError(f"cannot listen on {address}: {error.strerror}") from None
    except OSError as error:
        raise EndpointError(f"cannot make {path} private: {error.strerror}") from None


def _make_private(path: Path) -> None:
    path.chmod(0o600)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode != 0o600:
        raise EndpointError(f"{path} has mode {mode:o} although it was made 600; use another XDG_RUNTIME_DIR")
