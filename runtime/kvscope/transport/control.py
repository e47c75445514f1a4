"""The control server: answers snapshot and replay from the publisher, hands everything else to the engine.

One ROUTER, one thread. Every request is answered, one that cannot be read with the id None; a REQ client, which puts
an empty frame before its request, gets one back. It is refused a replay, of which it would see one batch only.
A replay is sent in chunks between other clients' requests, and waits for a slow reader without making anybody else
wait. Nothing a client sends ends the thread.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from kvscope.events.codec import DecodeError
from kvscope.events.notable import BREAKPOINTS
from kvscope.events.options import OptionError, make_params
from kvscope.events.state import Breakpoints
from kvscope.events.text import make_printable
from kvscope.events.types import MAX_NUM_BLOCKS, SamplingParams
from kvscope.transport.keys import ServerKeys
from kvscope.transport.outbox import Delivery, Outbox, Route
from kvscope.transport.publisher import Publisher, SnapshotUnavailable
from kvscope.transport.requests import (
    MAX_REQUEST_ID_CHARS,
    MAX_STEPS,
    READ_ONLY_OPS,
    ControlRefused,
    Op,
    decode_request,
    encode_reply,
    number_field,
    one_line,
    text_field,
)
from kvscope.transport.sockets import Listener
from kvscope.transport.wire import MAX_REQUEST_BYTES

logger = logging.getLogger(__name__)

REPLAY_CHUNK_BATCHES = 64
MAX_REPLAYS = 64
REPLAY_PATIENCE_S = 30.0  # how long a replay waits for a client that does not read
IDLE_POLL_MS = 100
BLOCKED_POLL_MS = 5


class ControlHandler(Protocol):
    """What the engine does on request. Calls come from the control thread and must return at once.

    Each may raise ControlRefused with one line for the user.
    """

    def submit(self, prompt: str, params: SamplingParams, request_id: str | None) -> str:
        """The request's id."""

    def cancel(self, request_id: str) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def step(self, num_steps: int) -> None: ...
    def set_breakpoints(self, wanted: Breakpoints) -> None: ...
    def stats(self) -> dict[str, object]: ...


class _Replay:
    """One client's replay in progress; `moved_at` is when it last got something."""

    def __init__(self, client: Route, request_id: int, next_seq: int) -> None:
        self.client, self.request_id, self.next_seq = client, request_id, next_seq
        self.moved_at = time.monotonic()


class ControlServer:
    """Binds at once, then answers from its own thread until `close`."""

    def __init__(
        self,
        address: str,
        publisher: Publisher,
        handler: ControlHandler,
        *,
        read_only: bool = False,
        keys: ServerKeys | None = None,
    ) -> None:
        """A read-only one tells every client so, and refuses what changes the engine.

        Raises:
            EndpointError: the address cannot be bound.
        """
        self.num_refused_frames = 0
        self._publisher, self._handler, self._read_only = publisher, handler, read_only
        self._replays: dict[Route, _Replay] = {}
        self._outbox = Outbox(self._send)
        self._closing = threading.Event()
        self._ops: dict[Op, Callable[[dict[str, Any]], dict[str, Any]]] = {
            Op.SNAPSHOT: self._snapshot,
            Op.PING: self._ping,
            Op.STATS: self._stats,
            Op.SUBMIT: self._submit,
            Op.CANCEL: self._cancel,
            Op.PAUSE: self._pause,
            Op.RESUME: self._resume,
            Op.STEP: self._step,
            Op.BREAK: self._break,
        }
        # Bound here so that the caller learns of a bad address; afterwards the thread alone uses it.
        self._listener = Listener(zmq.ROUTER, address, MAX_REQUEST_BYTES, keys)
        self._socket = self._listener.socket
        self._thread = threading.Thread(target=self._run, name="kvscope-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and end the thread. Idempotent."""
        self._closing.set()
        self._thread.join()

    # --- the control thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            poll_ms = IDLE_POLL_MS
            while not self._closing.is_set():
                if self._socket.poll(poll_ms):
                    self._receive()
                self._outbox.flush()
                poll_ms = self._advance_replays()
                if self._outbox:
                    poll_ms = min(poll_ms, BLOCKED_POLL_MS)
        finally:
            self._listener.close()

    def _receive(self) -> None:
        identity, *envelope, request = self._socket.recv_multipart()
        client: Route = (identity, b"") if envelope[:1] == [b""] else (identity,)
        try:
            if len(envelope) >= len(client):
                raise DecodeError(f"a request is one frame, not {len(envelope) - len(client) + 2}")
            request_id, fields = decode_request(request)
        except DecodeError as error:
            self.num_refused_frames += 1
            self._outbox.put(client, encode_reply(None, ok=False, error=one_line(error)))
            return
        self._answer(client, request_id, fields)

    def _answer(self, client: Route, request_id: int, fields: dict[str, Any]) -> None:
        try:
            op = self._parse_op(fields)
            if op is Op.REPLAY:
                self._start_replay(client, request_id, fields)
                return
            answer = {"ok": True, **self._ops[op](fields)}
        except (ControlRefused, OptionError, SnapshotUnavailable) as error:
            answer = {"ok": False, "error": one_line(error)}
        except Exception as error:
            logger.exception("a control request failed")
            answer = {"ok": False, "error": f"the engine failed to answer: {one_line(error)}"}
        if self._read_only:
            answer["read_only"] = True
        self._outbox.put(client, encode_reply(request_id, **answer))

    def _parse_op(self, fields: dict[str, Any]) -> Op:
        name = fields.get("op")
        try:
            op = Op(name)
        except ValueError:
            shown = make_printable(name[:40]) if isinstance(name, str) else type(name).__name__
            raise ControlRefused(f"unknown op {shown!r}; ops are {', '.join(o.value for o in Op)}") from None
        if self._read_only and op not in READ_ONLY_OPS:
            raise ControlRefused(f"{op.value}: this engine takes no control (--no-control)")
        return op

    def _send(self, client: Route, frame: bytes) -> Delivery:
        try:
            self._socket.send_multipart((*client, frame), zmq.NOBLOCK)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError:
            return Delivery.GONE
        return Delivery.SENT

    # --- operations ----------------------------------------------------------------------------------------------

    def _snapshot(self, fields: dict[str, Any]) -> dict[str, Any]:
        seq, state = self._publisher.snapshot()
        return {"seq": seq, "state": state}

    def _ping(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"epoch": self._publisher.epoch, "last_seq": self._publisher.last_seq, "pid": os.getpid()}

    def _submit(self, fields: dict[str, Any]) -> dict[str, Any]:
        prompt = text_field(fields, "prompt", MAX_REQUEST_BYTES)
        options = fields.get("options", {})
        if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
            raise ControlRefused("options must be a map")
        wanted = fields.get("request_id")
        wanted_id = None if wanted is None else text_field(fields, "request_id", MAX_REQUEST_ID_CHARS)
        return {"request_id": self._handler.submit(prompt, make_params(options), wanted_id)}

    def _cancel(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._handler.cancel(text_field(fields, "request_id", MAX_REQUEST_ID_CHARS))
        return {}

    def _pause(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._handler.pause()
        return {}

    def _resume(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._handler.resume()
        return {}

    def _step(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._handler.step(number_field(fields, "num_steps", 1, MAX_STEPS))
        return {}

    def _break(self, fields: dict[str, Any]) -> dict[str, Any]:
        names = fields.get("events")
        if not isinstance(names, list) or not all(isinstance(name, str) and name in BREAKPOINTS for name in names):
            raise ControlRefused(f"events must be a list of {', '.join(BREAKPOINTS)}")
        limit = fields.get("free_below")
        free_below = None if limit is None else number_field(fields, "free_below", 1, MAX_NUM_BLOCKS)
        events = tuple(name for name in BREAKPOINTS if name in names)
        self._handler.set_breakpoints(Breakpoints(events=events, free_below=free_below))
        return {}

    def _stats(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"stats": self._handler.stats()}

    # --- replay --------------------------------------------------------------------------------------------------

    def _start_replay(self, client: Route, request_id: int, fields: dict[str, Any]) -> None:
        seq = number_field(fields, "seq", 0, (1 << 63) - 1)
        if len(client) > 1:
            raise ControlRefused("a replay is many messages; ask for it from a DEALER socket, without an empty frame")
        if client not in self._replays and len(self._replays) >= MAX_REPLAYS:
            raise ControlRefused(f"{MAX_REPLAYS} replays are in progress; try again")
        self._replays[client] = _Replay(client, request_id, seq)  # a client's newer question replaces its older one

    def _advance_replays(self) -> int:
        """Send one chunk of each replay; how many milliseconds the next poll may wait."""
        if not self._replays:
            return IDLE_POLL_MS
        moved = [self._advance(replay) for replay in list(self._replays.values())]
        return 0 if any(moved) else BLOCKED_POLL_MS

    def _advance(self, replay: _Replay) -> bool:
        """Send one chunk; whether anything moved."""
        chunk = self._publisher.ring.chunk(replay.next_seq, REPLAY_CHUNK_BATCHES)
        for seq, payload in chunk or ():
            if not self._deliver(replay, encode_reply(replay.request_id, seq=seq, payload=payload)):
                return False
            replay.next_seq = seq + 1
        if not chunk:
            complete = chunk is not None
            fields = {"ok": True, "end": True, "next_seq": replay.next_seq, "complete": complete}
            if self._deliver(replay, encode_reply(replay.request_id, **fields)):
                self._replays.pop(replay.client, None)
        return True

    def _deliver(self, replay: _Replay, frame: bytes) -> bool:
        """Send one frame of a replay. A full pipe is tried again for a while; a client that left is forgotten."""
        delivery, now = self._send(replay.client, frame), time.monotonic()
        if delivery is Delivery.SENT:
            replay.moved_at = now
            return True
        if delivery is Delivery.GONE or now - replay.moved_at > REPLAY_PATIENCE_S:
            self._replays.pop(replay.client, None)
        return False
