"""Waiting for an engine's answer without ever blocking the screen."""

import asyncio
import time
from collections.abc import Callable

from kvscope.transport.source import PendingReply, Reply

ANSWER_TIMEOUT_S = 10.0
POLL_S = 0.03


async def ask(call: Callable[[], PendingReply], timeout_s: float = ANSWER_TIMEOUT_S) -> Reply:
    """Make a control call and wait for its reply; every failure comes back as a Reply with one line of error."""
    try:
        pending = call()
        deadline = time.monotonic() + timeout_s
        while not pending.done():
            if time.monotonic() > deadline:
                return Reply(ok=False, error=f"the engine has not answered for {timeout_s:.0f} s")
            await asyncio.sleep(POLL_S)
        return pending.result(0)
    except Exception as error:
        # A control channel may fail in many ways; none of them may take the picture down.
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        return Reply(ok=False, error=first_line)
