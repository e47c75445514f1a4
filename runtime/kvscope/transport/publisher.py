"""The publisher: takes batches from the engine without ever making it wait, and sends them to whoever listens.

    engine --append--> queue --> publisher thread: seq, encode, PUB, ring, mirror, recorder

The thread folds every batch into its own mirror, so that a snapshot costs the engine nothing and matches a sequence
number exactly. Full queue: the batch is dropped and counted, and the engine is asked for a full state. The thread
looks into the queue at intervals instead of being woken: waking it would cost the engine more than all the rest.
"""

import logging
import threading
import time
from collections import deque
from typing import NamedTuple, Protocol

import zmq

from kvscope.events.codec import MAX_BATCH_BYTES, MAX_EVENTS_PER_BATCH, encode_batch, encode_state
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState, FullState
from kvscope.events.types import Batch, BatchesDropped
from kvscope.transport.healing import receivable
from kvscope.transport.keys import ServerKeys
from kvscope.transport.ring import ReplayRing, SentBatch
from kvscope.transport.sockets import Listener
from kvscope.transport.wire import (
    EVENTS_TOPIC,
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TOPIC,
    MAX_REQUEST_BYTES,
    Heartbeat,
    encode_heartbeat,
    encode_seq,
)

logger = logging.getLogger(__name__)

MAX_QUEUED_BATCHES = 4_096
RING_BATCHES = 10_000
RING_BYTES = 64 * 1024 * 1024
BUSY_POLL_S, IDLE_POLL_S = 0.002, 0.02  # between two looks into an empty queue
IDLE_AFTER_S = 1.0


class SnapshotUnavailable(Exception):  # noqa: N818 - a state of the publisher, not an error of the caller
    """There is no sound state to hand out yet; one line of reason."""


class Snapshot(NamedTuple):
    """An encoded state, equal to the fold of batches 0 to `seq`."""

    seq: int
    state: bytes


class BatchSink(Protocol):
    """What keeps batches: a recorder. Neither call may block. `error`: it has stopped, and this is why."""

    @property
    def error(self) -> str | None: ...
    def record(
        self, seq: int, log_time_ns: int, payload: bytes, batch: Batch | None = None, state: EngineState | None = None
    ) -> None: ...
    def record_keyframe(self, seq: int, log_time_ns: int, state: bytes) -> None: ...


class EventSink(Protocol):
    """Where an engine hands its batches. No call ever blocks."""

    def publish(self, batch: Batch) -> bool:
        """False: the batch was dropped; the next one must carry a full state."""
        ...

    @property
    def needs_full_state(self) -> bool:
        """Asked before each batch and while idle; if true, append BatchesDropped (if any) and FullState."""
        ...

    def take_dropped(self) -> int:
        """How many batches were dropped since the last call."""
        ...


class NullPublisher:
    """Nobody listens."""

    needs_full_state = False

    def publish(self, batch: Batch) -> bool:
        return True

    def take_dropped(self) -> int:
        return 0


class Publisher:
    """Binds at once, then sends from its own thread until `close`."""

    def __init__(
        self,
        address: str,
        *,
        recorder: BatchSink | None = None,
        max_queue: int = MAX_QUEUED_BATCHES,
        ring_batches: int = RING_BATCHES,
        ring_bytes: int = RING_BYTES,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        keys: ServerKeys | None = None,
    ) -> None:
        """Raises EndpointError when the address cannot be bound."""
        self.ring = ReplayRing(ring_batches, ring_bytes)
        self._queue: deque[Batch] = deque()
        self._max_queue = max_queue
        self._closing = threading.Event()
        self._drop_lock = threading.Lock()
        self._num_dropped = 0
        self._needs_full_state = False
        self._mirror_lock = threading.Lock()
        self._mirror = EngineState()
        self._mirror_is_sound = True
        self._last_seq: int | None = None
        self._snapshot: Snapshot | None = None
        self._recorder = recorder
        self._heartbeat_interval_s = heartbeat_interval_s
        self._num_heartbeats = 0
        self._last_batch: Batch | None = None
        self._clock_zero_ns: int | None = None  # the monotonic time that is 0 on the engine's clock
        # Bound here so that the caller learns of a bad address; afterwards the thread alone uses it.
        self._listener = Listener(zmq.PUB, address, MAX_REQUEST_BYTES, keys)
        self._socket = self._listener.socket
        self._thread = threading.Thread(target=self._run, name="kvscope-publisher", daemon=True)
        self._thread.start()

    # --- the engine's side ---------------------------------------------------------------------------------------

    def publish(self, batch: Batch) -> bool:
        """Hand over a batch; False when it had to be dropped. Never blocks."""
        with self._drop_lock:
            has_room = len(self._queue) < self._max_queue and not self._closing.is_set()
            if has_room and (not self._needs_full_state or _heals(batch)):
                self._queue.append(batch)
                self._needs_full_state = False
                return True
            # A dropped announcement of earlier drops must be announced again.
            self._num_dropped += 1 + sum(e.num_batches for e in batch.events if isinstance(e, BatchesDropped))
            self._needs_full_state = True
            return False

    @property
    def needs_full_state(self) -> bool:
        # Only when there is room for it: a full state costs the engine O(pool), just when it is overloaded.
        return self._needs_full_state and len(self._queue) < self._max_queue

    def take_dropped(self) -> int:
        with self._drop_lock:
            num_dropped, self._num_dropped = self._num_dropped, 0
            return num_dropped

    def close(self) -> None:
        """Send what is queued, linger briefly, and end the thread. Idempotent."""
        with self._drop_lock:  # a batch accepted before is sent, none is accepted after
            self._closing.set()
        self._thread.join()

    # --- any thread ----------------------------------------------------------------------------------------------

    @property
    def last_seq(self) -> int | None:
        return self._last_seq

    @property
    def epoch(self) -> bytes:
        """Of the engine life being published; empty before the first batch."""
        return self._last_batch.epoch if self._last_batch is not None else b""

    def snapshot(self) -> Snapshot:
        """The state after the last batch sent.

        Raises:
            SnapshotUnavailable: no batch yet, or the mirror waits for a full state from the engine.
        """
        with self._mirror_lock:
            return self._take_snapshot()

    def set_recorder(self, recorder: BatchSink | None) -> None:
        """Record from now on; a recorder that comes in mid-life first gets the state so far. None stops.

        Raises:
            SnapshotUnavailable: batches went by, but there is no sound state now.
        """
        with self._mirror_lock:
            if recorder is not None and self._last_seq is not None:
                snapshot = self._take_snapshot()
                recorder.record_keyframe(snapshot.seq, self._log_time_ns(self._mirror.time_ns), snapshot.state)
            self._recorder = recorder

    def _take_snapshot(self) -> Snapshot:
        if self._last_seq is None:
            raise SnapshotUnavailable("the engine has not published anything yet")
        if not self._mirror_is_sound:
            raise SnapshotUnavailable("the publisher waits for a full state from the engine")
        if self._snapshot is None or self._snapshot.seq != self._last_seq:
            self._snapshot = Snapshot(self._last_seq, encode_state(self._mirror))
        return self._snapshot

    # --- the publisher thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        busy_at = time.monotonic()
        next_heartbeat = busy_at + self._heartbeat_interval_s
        try:
            while not (self._closing.is_set() and not self._queue):
                now = time.monotonic()
                if self._queue:
                    self._send_or_log(self._queue.popleft())
                    busy_at = now
                else:
                    poll_s = BUSY_POLL_S if now - busy_at < IDLE_AFTER_S else IDLE_POLL_S
                    self._closing.wait(min(poll_s, max(next_heartbeat - now, 0.0)))
                if now >= next_heartbeat:
                    self._send_heartbeat()
                    next_heartbeat = now + self._heartbeat_interval_s
        finally:
            self._listener.close()

    def _send_or_log(self, batch: Batch) -> None:
        try:
            self._send(batch)
        except Exception as error:
            logger.error("a batch could not be published: %s", error)
            self._lose_mirror()

    def _send(self, batch: Batch) -> None:
        payload = encode_batch(batch)
        fits = len(payload) <= MAX_BATCH_BYTES and len(batch.events) <= MAX_EVENTS_PER_BATCH
        with self._mirror_lock:
            seq = 0 if self._last_seq is None else self._last_seq + 1
            self._fold(batch)
            if fits:
                self.ring.append(SentBatch(seq, payload))
            else:
                self.ring.clear()
            self._set_clock(batch)
            self._last_seq, self._last_batch = seq, batch
            self._record(seq, batch, payload if fits else None)
        if fits:
            self._socket.send_multipart((EVENTS_TOPIC, encode_seq(seq), payload))
        else:
            # No client accepts such a frame. Its number stays unsent: clients see a gap and fetch the snapshot.
            logger.warning("batch %d has %d bytes and was not sent; clients fetch the state instead", seq, len(payload))

    def _fold(self, batch: Batch) -> None:
        full_state = _heals(batch)
        if not full_state and not self._mirror_is_sound:
            return
        try:
            self._mirror = apply_batch(EngineState() if full_state else self._mirror, receivable(batch))
            self._mirror_is_sound = True
        except Exception as error:
            logger.error("the mirror cannot follow the engine and waits for a full state: %s", error)
            self._lose_mirror()

    def _lose_mirror(self) -> None:
        self._mirror_is_sound = False
        with self._drop_lock:
            self._needs_full_state = True

    def _record(self, seq: int, batch: Batch, payload: bytes | None) -> None:
        if self._recorder is None:
            return
        if payload is not None:
            state = self._mirror if self._mirror_is_sound else None
            self._recorder.record(seq, self._log_time_ns(batch.time_ns), payload, receivable(batch), state)
        elif self._mirror_is_sound:
            self._recorder.record_keyframe(seq, self._log_time_ns(batch.time_ns), encode_state(self._mirror))

    def _set_clock(self, batch: Batch) -> None:
        """A batch that has waited in the queue makes the engine's clock look slow; the fastest one is right."""
        zero_ns = time.monotonic_ns() - batch.time_ns
        is_same_life = self._last_batch is not None and self._last_batch.epoch == batch.epoch
        self._clock_zero_ns = min(zero_ns, self._clock_zero_ns or zero_ns) if is_same_life else zero_ns

    def _log_time_ns(self, time_ns: int) -> int:
        return self._mirror.wall_time_ns + time_ns

    def _send_heartbeat(self) -> None:
        batch = self._last_batch
        if self._last_seq is None or batch is None or self._clock_zero_ns is None:
            return  # no life to speak of yet
        now_ns = time.monotonic_ns() - self._clock_zero_ns
        recorder = self._recorder
        warning = (recorder.error or "") if recorder is not None else ""
        payload = encode_heartbeat(Heartbeat(batch.epoch, self._last_seq, batch.step, now_ns, warning))
        self._socket.send_multipart((HEARTBEAT_TOPIC, encode_seq(self._num_heartbeats), payload))
        self._num_heartbeats += 1


def _heals(batch: Batch) -> bool:
    """Whether it carries the full state."""
    return any(isinstance(event, FullState) for event in batch.events)
