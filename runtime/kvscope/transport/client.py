"""The viewer's end of a live engine: one reader thread that owns both sockets and writes the view."""

import contextlib
import itertools
import logging
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Self

import msgpack
import zmq

from kvscope.events.codec import DecodeError, unpack
from kvscope.events.state import Breakpoints
from kvscope.transport.calls import Call, PendingCalls, resolve, resolved
from kvscope.transport.discovery import START_HINT
from kvscope.transport.endpoints import EndpointError, Endpoints
from kvscope.transport.handshake import Handshakes
from kvscope.transport.requests import Op, one_line
from kvscope.transport.sockets import connect, new_client_socket
from kvscope.transport.source import Control, Reply, View
from kvscope.transport.sync import Synchronizer
from kvscope.transport.wire import (
    EVENTS_TOPIC,
    HEARTBEAT_TOPIC,
    MAX_EVENT_FRAME_BYTES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    decode_heartbeat,
    decode_seq,
)

logger = logging.getLogger(__name__)

POLL_MS = 100
GATHER_S = 0.03  # less than pictures are apart
MAX_FRAMES_PER_TURN = 256  # so that a flood on one socket does not starve the other
CONNECT_TIMEOUT_S = 3.0

FrameHandler = Callable[[list[bytes]], None]


class EngineClient:
    """A `Source` and a `Control` over a live engine. It outlives engines: it attaches again when one returns.

    `is_read_only`: the engine has said that it takes no control from anybody.
    """

    def __init__(self, endpoints: Endpoints, view: View | None = None) -> None:
        self.endpoints = endpoints
        self.view = view if view is not None else View()
        self.is_read_only = False
        self._ids = itertools.count(1)
        self._sync = Synchronizer(self.view, self._ask)
        self._pending = PendingCalls(endpoints.label)
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the life of the thread, not the data
        self._closing = threading.Event()
        self._answered = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def control(self) -> Control:
        return self

    def start(self) -> None:
        """Open the sockets and begin to read. Raises EndpointError for an impossible address."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            # Opened here so that the caller learns of a bad address; from now on the thread alone uses them.
            self._events = self._new_socket(zmq.SUB, self.endpoints.events, MAX_EVENT_FRAME_BYTES)
            self._control = self._new_socket(zmq.DEALER, self.endpoints.control, MAX_REPLY_BYTES)
            self._handshakes = Handshakes(self._control, self.endpoints.label, has_keys=self.endpoints.keys is not None)
            connect(self._events, self.endpoints.events)
            connect(self._control, self.endpoints.control)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._events.setsockopt(zmq.SUBSCRIBE, EVENTS_TOPIC)  # a prefix: heartbeats too
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvscope-client", daemon=True)
        self._thread.start()

    def _new_socket(self, kind: int, address: str, max_bytes: int) -> "zmq.Socket[bytes]":
        return new_client_socket(self._context, kind, address, max_bytes, self.endpoints.keys)

    def connect(self, timeout: float = CONNECT_TIMEOUT_S) -> Self:
        """Start, and wait until the engine has answered a first question.

        Raises:
            EndpointError: nobody answers, or we are not let in; the client is closed.
        """
        self.start()
        is_answered, refusal = self._answered.wait(timeout), self._handshakes.refusal
        if not is_answered or refusal is not None:
            self.close()
            raise EndpointError(refusal or f"no engine answers at {self.endpoints.label}; {START_HINT}")
        return self

    def close(self) -> None:
        """End the thread; calls that wait are resolved. Idempotent."""
        with self._lock:
            self._closing.set()
            if self._thread is None:
                return
            self._wake()
        self._thread.join()

    # --- control: any thread -------------------------------------------------------------------------------------

    def submit(self, prompt: str, options: dict[str, object]) -> "Future[Reply]":
        return self._call(Op.SUBMIT, prompt=prompt, options=options)

    def cancel(self, request_id: str) -> "Future[Reply]":
        return self._call(Op.CANCEL, request_id=request_id)

    def pause(self) -> "Future[Reply]":
        return self._call(Op.PAUSE)

    def resume(self) -> "Future[Reply]":
        return self._call(Op.RESUME)

    def step(self, num_steps: int = 1) -> "Future[Reply]":
        return self._call(Op.STEP, num_steps=num_steps)

    def set_breakpoints(self, wanted: Breakpoints) -> "Future[Reply]":
        return self._call(Op.BREAK, events=list(wanted.events), free_below=wanted.free_below)

    def _call(self, op: Op, **fields: object) -> "Future[Reply]":
        request_id = next(self._ids)
        try:
            frame = msgpack.packb({"id": request_id, "op": op.value, **fields})
        except (ValueError, TypeError, OverflowError) as error:
            return resolved(Reply(False, f"cannot be sent: {one_line(error)}"))
        if len(frame) > MAX_REQUEST_BYTES:
            return resolved(Reply(False, f"{len(frame)} bytes are too long; the limit is {MAX_REQUEST_BYTES}"))
        call = Call(request_id, frame, Future())
        with self._lock:
            if self._thread is None or self._closing.is_set():
                return resolved(Reply(False, "not connected"))
            self._calls.put(call)
            self._wake()
        return call.future

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: the thread is about to wake; closed: it is gone
            self._wake_in.send(b"\0")

    # --- the reader thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        takers: dict[object, Callable[[], None]] = {
            self._wake_out.fileno(): self._send_calls,
            self._handshakes.monitor: self._read_handshakes,
            self._events: partial(self._read, self._events, self._on_event_frames),
            self._control: partial(self._read, self._control, self._on_control_frames),
        }
        for source in takers:
            poller.register(source, zmq.POLLIN)
        try:
            self._sync.tick()
            while not self._closing.is_set():
                for source, _ in poller.poll(POLL_MS):
                    takers[source]()
                self._sync.tick()
                self._pending.expire()
                self._gather()
        finally:
            self._close_sockets()

    def _gather(self) -> None:
        """Let batches come together, unless something waits already: a turn costs as much as to fold one of them."""
        if not any(int(source.getsockopt(zmq.EVENTS)) & zmq.POLLIN for source in (self._events, self._control)):
            zmq.select([self._wake_out], [], [], GATHER_S)  # the system's own knows no descriptor above 1,023

    def _close_sockets(self) -> None:
        with self._lock:
            self._closing.set()
            self._send_calls()
            self._pending.close()
        self._wake_in.close()
        self._wake_out.close()
        self._context.destroy(linger=0)

    def _read(self, source: "zmq.Socket[bytes]", handle: FrameHandler) -> None:
        for _ in range(MAX_FRAMES_PER_TURN):
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                handle(frames)
            except DecodeError as error:
                self._sync.refuse(error)
            except Exception as error:
                logger.exception("a message could not be handled")
                self._sync.refuse(error)

    def _on_event_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            raise DecodeError(f"{len(frames)} frames where topic, number and payload were expected")
        topic, seq, payload = frames
        if topic == HEARTBEAT_TOPIC:
            self._sync.on_heartbeat(decode_heartbeat(payload))
        elif topic == EVENTS_TOPIC:
            self._sync.on_batch(decode_seq(seq), payload)

    def _on_control_frames(self, frames: list[bytes]) -> None:
        fields = unpack(frames[-1], MAX_REPLY_BYTES)
        if not isinstance(fields, dict):
            raise DecodeError("a reply is a map")
        self.is_read_only = fields.get("read_only") is True
        self._answered.set()
        self._pending.on_reply(fields)
        self._sync.on_reply(fields)

    def _read_handshakes(self) -> None:
        self._handshakes.read()
        if self._handshakes.is_final:
            self._answered.set()

    def _send_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if self._closing.is_set():
                resolve(call.future, Reply(False, "the connection was closed"))
            elif self._send(call.frame):
                self._pending.add(call)
            else:
                resolve(call.future, Reply(False, f"no engine is connected at {self.endpoints.label}"))

    def _ask(self, op: Op, **fields: object) -> int | None:
        request_id = next(self._ids)
        sent = self._send(msgpack.packb({"id": request_id, "op": op.value, **fields}))
        return request_id if sent else None

    def _send(self, frame: bytes) -> bool:
        try:
            self._control.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True
