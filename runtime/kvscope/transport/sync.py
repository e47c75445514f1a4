"""Keeping a view equal to the engine: gap checks, replay, snapshots, staleness. No sockets, and the clock is handed in.

    WAITING    a snapshot is needed; live batches are kept aside
    REPLAYING  some batches are missing and were asked for; live batches are kept aside
    FOLLOWING  the state is whole up to `view.last_seq`; live batches are applied as they come

    WAITING -> FOLLOWING            the snapshot came; batches kept aside with a higher number follow
    FOLLOWING -> REPLAYING          a number is missing, or a heartbeat tells of batches that never came
    REPLAYING -> FOLLOWING          the missing batches came
    REPLAYING, FOLLOWING -> WAITING the engine no longer has them, a batch does not fit, or another life began
    FOLLOWING -> WAITING            this client has fallen too far behind: it skips to the present

What the user sees follows from these and from when the engine was last heard, in one place: `_status`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from kvscope.events.codec import DecodeError, decode_batch, decode_state, peek_epoch
from kvscope.events.text import make_printable
from kvscope.transport.healing import receivable
from kvscope.transport.lag import LagMeter
from kvscope.transport.requests import Op, one_line
from kvscope.transport.source import Status, View
from kvscope.transport.wire import STALE_AFTER_S, Heartbeat

logger = logging.getLogger(__name__)

MAX_ASIDE_BATCHES = 20_000  # more than the engine's ring: a hole in here is found and asked for again
MAX_ASIDE_BYTES = 64 * 1024 * 1024
MAX_WARNING_CHARACTERS = 500
ANSWER_TIMEOUT_S = 2.0
RETRY_S = 0.1
JOIN_LAG_S = 0.5  # more than this behind a life that has just begun, it is quicker to begin again than to catch up

Ask = Callable[..., int | None]  # (Op, **fields) -> the request's id; None: nobody is connected


class Phase(Enum):
    """See the module's docstring."""

    WAITING = "waiting"
    REPLAYING = "replaying"
    FOLLOWING = "following"


class _Received(NamedTuple):
    """A batch whose turn has not come: those that a snapshot makes superfluous are never decoded."""

    seq: int
    epoch: bytes
    payload: bytes


class Synchronizer:
    """Owned by one reader thread, which is the only writer of the view."""

    def __init__(
        self,
        view: View,
        ask: Ask,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.view = view
        self.phase = Phase.WAITING
        self._ask, self._clock, self._wall_clock = ask, clock, wall_clock
        self._aside: deque[_Received] = deque()
        self._aside_bytes = 0
        self._request_id: int | None = None
        self._asked_at: float | None = None
        self._replay_goal = 0  # the last batch known to exist when the replay was asked for
        self._is_synced = False  # the view shows a state of some life
        self._is_confirmed = False  # the stream has proved that nothing is missing since the state was taken
        self._has_been_live = False  # before that, what is missing is part of joining, not a gap
        self._gap: str | None = None
        self._trouble = ""  # why the engine does not hand out a state
        self._is_joining = True  # no heartbeat has shown yet that the stream of this life comes without delay
        self._heard_epoch: bytes | None = None
        self._heard_at: float | None = None
        self._heard_wall = 0.0
        self._lag = LagMeter()
        self._is_dated = False  # there was silence: what comes now may have waited, until a heartbeat tells otherwise

    # --- what comes in -------------------------------------------------------------------------------------------

    def on_batch(self, seq: int, payload: bytes) -> None:
        """A live batch from the stream."""
        try:
            received = _Received(seq, peek_epoch(payload), payload)
        except DecodeError as error:
            self.refuse(error)
            if self.phase is Phase.FOLLOWING and seq >= self._expected():
                self._cannot_read(seq)
            self._show()
            return
        self._hear(received.epoch)
        if self.phase is Phase.FOLLOWING:
            self._follow(received)
        else:
            self._keep_aside(received)
        self._show()

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._hear(heartbeat.epoch)
        self.view.warn(make_printable(heartbeat.warning[:MAX_WARNING_CHARACTERS]))
        lag_s = self._lag.observe(heartbeat.epoch, heartbeat.time_ns, self._clock())
        is_old = heartbeat.last_seq + 1 < self._expected()  # the state is from after it was sent
        self._is_dated = self._is_dated and lag_s > STALE_AFTER_S and not is_old
        if self.phase is Phase.FOLLOWING:
            if heartbeat.epoch != self.view.state.epoch:
                self._begin_new_life()
            elif heartbeat.last_seq >= self._expected():
                self._need_replay(heartbeat.last_seq)
            elif lag_s > (JOIN_LAG_S if self._is_joining else STALE_AFTER_S) and not is_old:
                self._skip_to_present(lag_s)
            else:
                self._is_joining = False
                self._confirm()
        self._show()

    def on_reply(self, fields: dict[str, Any]) -> None:
        """An answer on the control channel; late answers to superseded questions are skipped."""
        if self._request_id is None or fields.get("id") != self._request_id:
            return
        self._asked_at = self._clock()
        if fields.get("ok") is False:
            self._trouble = make_printable(str(fields.get("error"))[:200])
            self._need_snapshot()
        elif self.phase is Phase.WAITING:
            self._take_snapshot(fields.get("seq"), fields.get("state"))
        elif self.phase is Phase.REPLAYING:
            self._take_replay(fields)
        self._show()

    def tick(self) -> None:
        """Ask what is to be asked, and notice silence. Called several times a second."""
        now = self._clock()
        patience = RETRY_S if self._request_id is None else ANSWER_TIMEOUT_S
        due = self._asked_at is None or now - self._asked_at >= patience
        if due and self.phase is Phase.WAITING:
            self._request_id, self._asked_at = self._ask(Op.SNAPSHOT), now
        elif due and self.phase is Phase.REPLAYING:
            self._request_id, self._asked_at = self._ask(Op.REPLAY, seq=self._expected()), now
        self._show()

    def refuse(self, error: object) -> None:
        """Count a frame that is not what it should be."""
        logger.debug("a frame was refused: %s", error)
        with self.view.lock:
            self.view.num_refused_events += 1
            self.view.revision += 1

    # --- following -----------------------------------------------------------------------------------------------

    def _expected(self) -> int:
        return 0 if self.view.last_seq is None else self.view.last_seq + 1

    def _hear(self, epoch: bytes) -> None:
        self._is_dated = self._is_dated or self._is_stale()
        self._is_confirmed = self._is_confirmed and not self._is_dated
        self._heard_epoch, self._heard_at, self._heard_wall = epoch, self._clock(), self._wall_clock()

    def _follow(self, received: _Received) -> None:
        if received.epoch != self.view.state.epoch:
            self._keep_aside(received)
            self._begin_new_life()
        elif received.seq > self._expected():
            self._keep_aside(received)
            self._need_replay(received.seq - 1)
        elif received.seq < self._expected() or self._apply(received):
            self._confirm()  # the stream has nothing that the state lacks

    def _keep_aside(self, received: _Received) -> None:
        self._aside.append(received)
        self._aside_bytes += len(received.payload)
        while len(self._aside) > MAX_ASIDE_BATCHES or self._aside_bytes > MAX_ASIDE_BYTES:
            self._aside_bytes -= len(self._aside.popleft().payload)

    def _apply(self, received: _Received) -> bool:
        seq, _, payload = received
        try:
            batch, num_refused = decode_batch(payload, printable=True)
        except DecodeError as error:
            self.refuse(error)
            self._cannot_read(seq)
            return False
        try:
            self.view.apply(seq, receivable(batch), num_refused, payload)
        except Exception as error:
            self._open_gap(f"batch {seq} does not fit: {one_line(error)}")
            self._need_snapshot()
            return False
        return True

    def _cannot_read(self, seq: int) -> None:
        self._open_gap(f"batch {seq} cannot be read")
        self._need_snapshot()

    def _confirm(self) -> None:
        if self._is_dated:
            return
        self._is_confirmed = self._has_been_live = True
        self._gap, self._trouble = None, ""

    def _begin_new_life(self) -> None:
        self._gap, self._has_been_live, self._is_joining = None, False, True
        self._need_snapshot()

    def _skip_to_present(self, lag_s: float) -> None:
        """Better a hole than a picture of what was: what has queued up is dropped unread.

        While joining it is no hole: whoever has seen nothing of this life yet begins with it a moment later.
        """
        if not self._is_joining:
            self._open_gap(f"this viewer was {lag_s:.1f} s behind; it skips to the present")
        self._need_snapshot()
        self._lag.forget()
        self._is_dated = False

    def _open_gap(self, detail: str) -> None:
        if not self._has_been_live:
            return
        if self._gap is None:
            with self.view.lock:
                self.view.num_gaps += 1
        self._gap = detail

    # --- asking --------------------------------------------------------------------------------------------------

    def _need_snapshot(self) -> None:
        # `_asked_at` stays: at most one question per RETRY_S, whatever the engine sends.
        self.phase, self._request_id, self._is_confirmed = Phase.WAITING, None, False

    def _need_replay(self, goal: int) -> None:
        self._open_gap(f"batches {self._expected()} to {goal} are missing")
        self.phase, self._request_id, self._is_confirmed = Phase.REPLAYING, None, False
        self._replay_goal = goal

    def _take_snapshot(self, seq: Any, payload: Any) -> None:
        if not isinstance(seq, int) or not isinstance(payload, bytes):
            self.refuse("a snapshot without number or state")
            self._need_snapshot()
            return
        try:
            state = decode_state(payload, printable=True)
        except DecodeError as error:
            self.refuse(error)
            self._trouble = str(error)
            self._need_snapshot()
            return
        if self._heard_epoch is not None and state.epoch != self._heard_epoch:
            self._need_snapshot()  # an engine was replaced just now; soon both channels talk of the same one
            return
        self.view.replace_state(state, seq)
        self._is_synced, self._trouble = True, ""
        self._resume()

    def _take_replay(self, fields: dict[str, Any]) -> None:
        seq, payload = fields.get("seq"), fields.get("payload")
        if fields.get("end"):
            if fields.get("complete") is True and self._expected() > self._replay_goal:
                self._resume()
            else:
                self._need_snapshot()
        elif isinstance(seq, int) and isinstance(payload, bytes) and seq == self._expected():
            self._take_replayed(seq, payload)
        else:
            self._need_snapshot()

    def _take_replayed(self, seq: int, payload: bytes) -> None:
        try:
            received = _Received(seq, peek_epoch(payload), payload)
        except DecodeError as error:
            self.refuse(error)
            self._need_snapshot()
            return
        if received.epoch != self.view.state.epoch:
            self._begin_new_life()
        else:
            self._apply(received)

    def _resume(self) -> None:
        """The state is whole up to some batch: go on with those kept aside, oldest first."""
        self.phase, self._request_id = Phase.FOLLOWING, None
        kept = list(self._aside)
        self._aside.clear()
        self._aside_bytes = 0
        for received in kept:
            if received.epoch != self.view.state.epoch:
                continue  # of the life before: the newest one heard is the snapshot's
            if self.phase is Phase.FOLLOWING:
                self._follow(received)
            else:
                self._keep_aside(received)

    # --- what the user sees --------------------------------------------------------------------------------------

    def _is_stale(self) -> bool:
        return self._heard_at is not None and self._clock() - self._heard_at > STALE_AFTER_S

    def _show(self) -> None:
        self.view.set_status(*self._status())

    def _status(self) -> tuple[Status, str]:
        has_ended = self._is_synced and self.view.state.status == "stopped"
        if self.phase is Phase.FOLLOWING and has_ended:
            return Status.ENDED, "the engine has stopped"
        if self._is_stale():
            since = time.strftime("%H:%M:%S", time.localtime(self._heard_wall))
            return Status.STALE, f"no heartbeat since {since}"
        if self.phase is Phase.FOLLOWING and self._is_confirmed:
            return Status.LIVE, ""
        if self._gap is not None:
            return Status.GAP, self._gap
        if self._heard_at is None and not self._is_synced and not self._trouble:
            return Status.CONNECTING, ""
        return Status.SYNCING, self._trouble
