"""ZeroMQ sockets with the settings that all of ours need, and errors as one line."""

import errno
import stat
from pathlib import Path

import zmq

from kvscope.transport.endpoints import ClientKeys, EndpointError, Endpoints, check_socket_path
from kvscope.transport.handshake import require_keys, start_authenticator, use_keys
from kvscope.transport.keys import ServerKeys

LINGER_MS = 500
MAX_UNREAD_REPLIES = 64  # per client; a snapshot may have many MB


class Listener:
    """A bound socket with a context of its own; with keys, and whoever checks them, for the clients they let in."""

    def __init__(self, kind: int, address: str, max_bytes: int, keys: ServerKeys | None = None) -> None:
        """Raises EndpointError: the address is in use or cannot be bound."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = start_authenticator(self._context, keys) if keys is not None else None
        try:
            self.socket = _listen(self._context, kind, address, max_bytes, keys)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Let the socket linger, and end everything."""
        self.socket.close()
        self._end()

    def _end(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def check_bindable(endpoints: Endpoints) -> None:
    """Bind both addresses for a moment. Raises EndpointError: one is in use, or cannot be bound."""
    for address in (endpoints.events, endpoints.control):
        Listener(zmq.PUB, address, max_bytes=1).close()


def _listen(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, max_bytes: int, keys: ServerKeys | None
) -> "zmq.Socket[bytes]":
    path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
    if path is not None:
        check_socket_path(path)
    sock = _new_socket(context, kind, address, max_bytes)
    if kind == zmq.ROUTER:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or vanished peer is an error, not a silent loss
        sock.setsockopt(zmq.SNDHWM, MAX_UNREAD_REPLIES)
    if keys is not None:
        require_keys(sock, keys)
    try:
        _bind(sock, address, path)
    except BaseException:
        sock.close(linger=0)  # an open socket would keep its context from ending
        raise
    return sock


def new_client_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, max_bytes: int, keys: ClientKeys | None
) -> "zmq.Socket[bytes]":
    """A socket that is yet to connect to the address."""
    sock = _new_socket(context, kind, address, max_bytes)
    if keys is not None:
        use_keys(sock, keys)
    sock.setsockopt(zmq.RECONNECT_IVL, 50)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if kind == zmq.DEALER:
        # Nothing waits for a peer that is not there: a prompt must not reach the next engine minutes later.
        sock.setsockopt(zmq.IMMEDIATE, 1)
    return sock


def connect(sock: "zmq.Socket[bytes]", address: str) -> None:
    """Now or as soon as somebody listens. Raises EndpointError for an impossible address."""
    try:
        sock.connect(address)
    except zmq.ZMQError as error:
        raise EndpointError(f"cannot connect to {address}: {error.strerror}") from None


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
