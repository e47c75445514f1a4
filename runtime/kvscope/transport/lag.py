"""How far what arrives trails what is sent, told from the engine's heartbeats."""

MAX_DRIFT = 500e-6  # how much faster one machine's clock may run than another's


class LagMeter:
    """Compares the delay of each heartbeat with the least one seen.

    The two clocks differ by an amount that nobody knows, so one delay says nothing; what it exceeds the least one by
    was spent in queues. The least one is allowed to grow as clocks drift apart.
    """

    def __init__(self) -> None:
        self._epoch: bytes | None = None  # whose clock the heartbeats tell
        self._least_s = 0.0
        self._seen_at = 0.0

    def observe(self, epoch: bytes, sent_ns: int, now_s: float) -> float:
        """Seconds that this heartbeat spent in queues."""
        delay_s = now_s - sent_ns / 1e9
        drifted_s = self._least_s + MAX_DRIFT * (now_s - self._seen_at)
        self._least_s = delay_s if epoch != self._epoch else min(delay_s, drifted_s)
        self._epoch, self._seen_at = epoch, now_s
        return delay_s - self._least_s

    def forget(self) -> None:
        """Begin anew: a clock may have jumped, as when a machine was asleep."""
        self._epoch = None
