"""The engine of benchmarks/dashboard.py: publishes a load over ipc sockets, and notes when each batch was ready."""

import sys
import time
from pathlib import Path
from typing import Any

from dashboard_load import Load

from kvscope.transport.control import ControlServer
from kvscope.transport.endpoints import directory_endpoints
from kvscope.transport.publisher import Publisher

BATCHES_PER_S = 100


def main(directory: str, log: str, *numbers: str) -> None:
    num_blocks, group, events_per_s, scattered = map(int, numbers)
    load = Load(num_blocks, group, scattered=bool(scattered))
    endpoints = directory_endpoints(Path(directory))
    publisher = Publisher(endpoints.events)
    nobody: Any = None  # only what is typed and not sent is measured
    ControlServer(endpoints.control, publisher, nobody)
    begun = load.begin()
    for batch in begun:
        assert publisher.publish(batch)
    seq, started = len(begun), time.monotonic()
    with Path(log).open("w") as file:
        while True:
            number = seq - len(begun)
            wait_s = started + number / BATCHES_PER_S - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            batch = load.next(events_per_s // BATCHES_PER_S, time.monotonic_ns())
            file.write(f"{seq} {time.monotonic_ns()}\n")
            file.flush()
            publisher.publish(batch)
            seq += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
