"""How many events could not be read, of batches that are decoded when somebody looks, perhaps more than once."""

import threading


class Refusals:
    """Any thread may add; a batch counts once."""

    def __init__(self) -> None:
        self.total = 0
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    def add(self, position: int, num_refused: int) -> None:
        """So many of the batch there."""
        if num_refused:
            with self._lock:
                self.total += 0 if position in self._seen else num_refused
                self._seen.add(position)
