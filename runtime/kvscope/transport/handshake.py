"""Who may talk to whom on a socket: CURVE on both ends, and why a connection was refused, in words."""

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from kvscope.transport.endpoints import ClientKeys
from kvscope.transport.keys import ServerKeys

_DOMAIN = "kvscope"
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class _AllowList:
    """What the authenticator asks about each client's public key."""

    def __init__(self, allowed: frozenset[bytes]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allowed


def start_authenticator(context: "zmq.Context[zmq.Socket[bytes]]", keys: ServerKeys) -> ThreadAuthenticator:
    """Answer, in a thread of its own, who may connect to the context's sockets; the caller stops it before the end."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_DOMAIN, _AllowList(keys.allowed))
    return authenticator


def require_keys(sock: "zmq.Socket[bytes]", keys: ServerKeys) -> None:
    """Make a socket that is yet to be bound refuse everybody whom the authenticator does not let in."""
    sock.curve_server = True
    sock.curve_secretkey = keys.own.secret
    sock.zap_domain = _DOMAIN.encode()
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody is let in should the authenticator be gone


def use_keys(sock: "zmq.Socket[bytes]", keys: ClientKeys) -> None:
    """Make a socket that is yet to connect show its key, and talk to the one server only."""
    sock.curve_publickey, sock.curve_secretkey = keys.own
    sock.curve_serverkey = keys.server


class Handshakes:
    """Watches a socket that is yet to connect; `refusal` is why there is no connection, one line, or None."""

    def __init__(self, sock: "zmq.Socket[bytes]", label: str, *, has_keys: bool) -> None:
        self.monitor = sock.get_monitor_socket(_EVENTS)
        self.refusal: str | None = None
        self.is_final = False  # trying again will not help
        self._label, self._has_keys = label, has_keys

    def read(self) -> None:
        """Take in what happened since the last call."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.refusal, self.is_final = None, False
            else:
                self.refusal = self._explain(event)
                # Without detail the peer just hung up, which an engine that ends does too.
                self.is_final = event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

    def _explain(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"the engine at {self._label} does not know your key; your .key file must be in its --allow"
        if not self._has_keys:
            return f"the engine at {self._label} wants keys; name its .key file with --server-key"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return f"the engine at {self._label} takes no keys; attach without --server-key"
        return f"the engine at {self._label} has another key than the one in --server-key, or takes none"
