"""An engine behind a queue of commands: any thread may ask, one thread steps.

States: running -> paused -> running. While paused no step runs, except as many as `step` asked for.
"""

import itertools
import logging
import queue
import re
import threading
import time
from collections.abc import Callable

from kvscope.engine.engine import Engine
from kvscope.engine.intake import RequestRefusedError
from kvscope.events.state import Breakpoints
from kvscope.events.types import SamplingParams
from kvscope.transport.requests import MAX_REQUEST_ID_CHARS, MAX_STEPS, ControlRefused

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rf"[A-Za-z0-9_:-]{{1,{MAX_REQUEST_ID_CHARS}}}")
MAX_WAITING_REQUESTS = 4_096
IDLE_WAIT_S = 0.2


class EngineService:
    """Implements the control server's handler. Commands take effect between steps, in the order they came."""

    def __init__(self, engine: Engine, *, max_steps_per_second: float | None = None) -> None:
        """`max_steps_per_second` slows a fast engine down to what an eye can follow."""
        self._engine = engine
        self._step_interval_s = 1 / max_steps_per_second if max_steps_per_second is not None else 0.0
        self._next_step_at = 0.0  # monotonic seconds
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._steps_allowed = 0
        self._pause_wanted = engine.status == "paused"  # as of the last request, which may still be in the queue
        self._ids_lock = threading.Lock()
        self._queued_ids: set[str] = set()  # promised to somebody, not yet in the engine
        self._stopping = threading.Event()
        self._stop_reason = "stopped"

    # --- any thread -----------------------------------------------------------------------------------------------

    def submit(self, prompt: str, params: SamplingParams, request_id: str | None) -> str:
        """Queue a prompt and return its id at once.

        Raises:
            ControlRefused: it can never run here.
        """
        if len(self._engine.scheduler.waiting) + len(self._queued_ids) >= MAX_WAITING_REQUESTS:
            raise ControlRefused(f"{MAX_WAITING_REQUESTS} requests are waiting already; try again later")
        try:
            token_ids = self._engine.intake.encode(prompt)
        except RequestRefusedError as error:
            raise ControlRefused(str(error)) from None
        request_id = self._take_id(request_id)
        self._commands.put(lambda: self._submit(prompt, params, request_id, token_ids))
        try:
            self._engine.intake.check(token_ids, params)
        except RequestRefusedError as error:  # told at once, and by an event to every viewer
            raise ControlRefused(str(error)) from None
        return request_id

    def cancel(self, request_id: str) -> None:
        """End a request; every block it holds goes back. Raises ControlRefused for an unknown one."""
        if request_id not in self._engine.requests and request_id not in self._queued_ids:
            raise ControlRefused(f"no request {request_id}")
        self._commands.put(lambda: self._engine.cancel(request_id))

    def pause(self) -> None:
        self._pause_wanted = True
        self._commands.put(self._engine.pause)

    def resume(self) -> None:
        self._pause_wanted = False
        self._commands.put(self._resume)

    def step(self, num_steps: int) -> None:
        """Run exactly that many steps of a paused engine; fewer if the work ends before."""
        if not 1 <= num_steps <= MAX_STEPS:
            raise ControlRefused(f"steps at once: 1 to {MAX_STEPS}, not {num_steps}")
        if not self._pause_wanted:
            raise ControlRefused("the engine is running; pause it first")
        self._commands.put(lambda: self._allow(num_steps))

    def set_breakpoints(self, wanted: Breakpoints) -> None:
        """Pause after the step, or the refusal, that brings one of these; they stay set until they are changed."""
        num_blocks = self._engine.info.num_blocks
        if wanted.free_below is not None and wanted.free_below > num_blocks:
            raise ControlRefused(f"free_below is {wanted.free_below}; the pool has {num_blocks} blocks")
        self._commands.put(lambda: self._engine.set_breakpoints(wanted))

    def stats(self) -> dict[str, object]:
        """A few totals; approximate while a step runs."""
        engine = self._engine
        return {
            "status": engine.status,
            "step": engine.step_number,
            "graph_steps": engine.num_graph_steps,
            "generated_tokens": engine.counters.generated_tokens,
            "num_running_requests": len(engine.scheduler.running),
            "num_waiting_requests": len(engine.scheduler.waiting),
            "free_blocks": engine.scheduler.pool.num_free_blocks,
            "num_blocks": engine.info.num_blocks,
        }

    def stop(self, reason: str) -> None:
        """Let `run` return after the step that is under way."""
        self._stop_reason = reason
        self._stopping.set()
        self._commands.put(lambda: None)

    # --- the engine's thread --------------------------------------------------------------------------------------

    def run(self) -> str:
        """Step while there is work; return once stopped, with the reason. The last batch says goodbye."""
        try:
            while not self._stopping.is_set():
                self._run_commands(self._seconds_to_next_step())
                self._pause_at_breakpoint()
                self._engine.heal()
                if self._seconds_to_next_step() == 0 and not self._stopping.is_set():
                    self._steps_allowed = max(self._steps_allowed - 1, 0)
                    self._next_step_at = time.monotonic() + self._step_interval_s
                    self._engine.step()
                    self._pause_at_breakpoint()
        except BaseException as error:
            self._stop_reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._engine.stop(self._stop_reason)
        return self._stop_reason

    def _pause_at_breakpoint(self) -> None:
        hit = self._engine.breakpoints.take_hit()
        if hit is not None:
            self._pause_wanted, self._steps_allowed = True, 0
            self._engine.pause(hit)

    def _may_step(self) -> bool:
        if not self._engine.has_work():
            self._steps_allowed = 0
            return False
        return self._engine.status == "running" or self._steps_allowed > 0

    def _seconds_to_next_step(self) -> float:
        """0: now; else how long to wait for commands first."""
        if not self._may_step():
            return IDLE_WAIT_S
        wait_s = self._next_step_at - time.monotonic()
        return wait_s if wait_s > 0 and self._engine.status == "running" else 0

    def _run_commands(self, wait_s: float) -> None:
        """Run what is in the queue; if it is empty, wait that long for a first command."""
        try:
            command = self._commands.get(timeout=wait_s) if wait_s > 0 else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _take_id(self, wanted: str | None) -> str:
        """An id that nobody has. Raises ControlRefused for one that is taken, or is none."""
        with self._ids_lock:
            if wanted is None:
                wanted = next(name for name in map("r{}".format, self._numbers) if not self._is_taken(name))
            elif not _REQUEST_ID.fullmatch(wanted):
                raise ControlRefused(f"a request id is 1 to {MAX_REQUEST_ID_CHARS} letters, digits, '_', '-' or ':'")
            elif self._is_taken(wanted):
                raise ControlRefused(f"a request {wanted} exists already")
            self._queued_ids.add(wanted)
            return wanted

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._engine.requests or request_id in self._queued_ids

    def _submit(self, prompt: str, params: SamplingParams, request_id: str, token_ids: list[int]) -> None:
        try:
            self._engine.submit(prompt, params, request_id, token_ids)
        except RequestRefusedError as error:
            logger.info("%s refused: %s", request_id, error)
        finally:
            self._queued_ids.discard(request_id)

    def _resume(self) -> None:
        self._steps_allowed = 0
        self._engine.resume()

    def _allow(self, num_steps: int) -> None:
        if self._engine.status == "paused":  # else it was resumed meanwhile
            self._steps_allowed += num_steps
