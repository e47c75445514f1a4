#!/usr/bin/env python3
"""Tears, damages and kills recordings, and prints one table.

    python tests/campaigns/recordings.py [--flips 10000] [--kills 100] [--seed N]

A recording of 20 kB, cut at every byte and with one bit flipped at random, is opened both ways: read as a whole
(`check`, `stats`) and by its index (`replay`). A process that records is killed in mid-write. What is read must be a
beginning of what was written, and say so where it is not all of it, or be refused in one line; every chunk before the
damage must still be there; after a kill, no batch older than 100 ms may be missing. Else exit code 1.
"""

import argparse
import copy
import importlib.util
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from mcap.reader import make_reader

from kvscope.events.codec import encode_batch
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.events.types import Batch
from kvscope.transport.recording import Recorder, Recording, RecordingError, open_recording, read_recording
from kvscope.transport.recording import recorder as recorder_module
from kvscope.transport.recording.stored import StoredRecording

SIZE = 20_000
CHUNK_BYTES, CHECKPOINT_EVENTS = 1_500, 20  # so that a small file has many of both
LIMIT_MS = 100.0
KILL_AFTER_S = (0.03, 0.6)
MAX_BATCHES = 4_000  # a killed process is never through with them
WAYS: dict[str, Callable[[Path], Recording | StoredRecording]] = {"whole": read_recording, "by index": open_recording}
OUTCOMES = ("all of it", "a beginning", "refused")

Written = list[tuple[int, Batch]]


class WrongError(Exception):
    """What was read is not what may be read."""


def make_batches(seed: int, count: int) -> list[Batch]:
    """From the tests' own source of valid batches."""
    path = Path(__file__).resolve().parents[1] / "transport" / "conftest.py"
    spec = importlib.util.spec_from_file_location("transport_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.Stream(seed).take(count))


def record(path: Path, batches: list[Batch]) -> None:
    """A file of many small chunks, with checkpoints and an index."""
    small = {"CHUNK_BYTES": CHUNK_BYTES, "CHECKPOINT_EVENTS": CHECKPOINT_EVENTS}
    with mock.patch.multiple(recorder_module, **small):
        recorder, state = Recorder(path, force=True), EngineState()
        for seq, batch in enumerate(batches):
            state = apply_batch(state, copy.deepcopy(batch))  # a fold may keep what it is given
            recorder.record(seq, batch.time_ns, encode_batch(batch), batch, state)
        recorder.close()
    assert recorder.error is None, recorder.error


class Original(NamedTuple):
    """An undamaged file: its bytes, its batches, and how many of them are whole once so many bytes are."""

    data: bytes
    batches: Written
    chunk_ends: list[int]
    counts: list[int]  # batches in the chunks up to each end

    @property
    def header_bytes(self) -> int:
        """The magic and the header record, which say whose file it is."""
        return 8 + 9 + int.from_bytes(self.data[9:17], "little")

    def num_safe(self, place: int) -> int:
        """Batches in chunks that end at or before byte `place`."""
        number = bisect_right(self.chunk_ends, place)
        return self.counts[number - 1] if number else 0


def make_original(folder: Path, seed: int) -> Original:
    batches, count, path = make_batches(seed, 1_000), 50, folder / "original.mcap"
    record(path, batches[:count])
    while (size := path.stat().st_size) < SIZE:
        count = count * SIZE // size + 5
        record(path, batches[:count])
    with path.open("rb") as file:
        summary = make_reader(file, validate_crcs=True).get_summary()
    assert summary is not None
    ends = sorted(chunk.chunk_start_offset + chunk.chunk_length for chunk in summary.chunk_indexes)
    stored = open_recording(path)
    assert isinstance(stored, StoredRecording)
    counts = [bisect_right(stored.columns.chunks, number) for number in range(len(ends))]
    stored.close()
    return Original(path.read_bytes(), list(enumerate(batches[:count])), ends, counts)


def read(way: str, path: Path) -> tuple[Written, str | None] | None:
    """The batches, and what is said to be missing; None: refused with one line."""
    try:
        found = WAYS[way](path)
        batches = list(found.batches)
    except RecordingError as error:
        if not str(error).isprintable():
            raise WrongError(f"the refusal is not one printable line: {error!r}") from None
        return None
    if isinstance(found, StoredRecording):
        found.close()
    return batches, found.missing


def judge(original: Original, found: tuple[Written, str | None] | None, num_safe: int) -> str:
    """The outcome; raises WrongError."""
    if found is None:
        if num_safe:
            raise WrongError(f"refused, with {num_safe} batches before the damage")
        return "refused"
    batches, missing = found
    if batches != original.batches[: len(batches)]:
        raise WrongError("not a beginning of what was written")
    if len(batches) < num_safe:
        raise WrongError(f"{len(batches)} batches, with {num_safe} before the damage")
    if len(batches) == len(original.batches):
        return "all of it"
    if not missing:
        raise WrongError(f"{len(original.batches) - len(batches)} batches lost in silence")
    return "a beginning"


def cuts(original: Original) -> Iterator[tuple[int, bytes]]:
    """Every length that is not all of it: up to where it is whole, and its bytes."""
    for size in range(len(original.data)):
        yield size, original.data[:size]


def flips(original: Original, source: random.Random, count: int) -> Iterator[tuple[int, bytes]]:
    for _ in range(count):
        place = source.randrange(len(original.data))
        damaged = bytearray(original.data)
        damaged[place] ^= 1 << source.randrange(8)
        # Without its header a file is nobody's: what follows is not looked at.
        yield place if place >= original.header_bytes else 0, bytes(damaged)


def damage(name: str, original: Original, damaged: Iterator[tuple[int, bytes]], path: Path) -> int:
    """One row of the table for each way to open; how many were wrong."""
    outcomes, wrong = Counter[tuple[str, str]](), Counter[str]()
    for place, data in damaged:
        path.write_bytes(data)
        for way in WAYS:
            try:
                outcomes[way, judge(original, read(way, path), original.num_safe(place))] += 1
            except Exception as error:  # also what should never come out of a reader
                wrong[way] += 1
                print(f"{name}, {way}, byte {place}: {type(error).__name__}: {error}", file=sys.stderr)
    for way in WAYS:
        total = wrong[way] + sum(outcomes[way, outcome] for outcome in OUTCOMES)
        cells = "".join(f"{outcomes[way, outcome]:>13,}" for outcome in OUTCOMES)
        print(f"{name:<10}{way:<10}{total:>8,}{cells}{wrong[way]:>8}", flush=True)
    return wrong.total()


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def keep_recording(path: Path, batches: list[Batch], times_ns: mmap.mmap) -> None:
    """Record one batch after the other; `times_ns[seq]` says when it was handed over. Never returns."""
    recorder, state, clock = Recorder(path), EngineState(), memoryview(times_ns).cast("q")
    for seq, batch in enumerate(batches):
        state = apply_batch(state, batch)
        payload = encode_batch(batch)
        clock[seq] = time.monotonic_ns()
        recorder.record(seq, batch.time_ns, payload, batch, state)
        time.sleep(0.0005)
    while True:
        time.sleep(1)


def kill_one(path: Path, batches: list[Batch], after_s: float) -> tuple[int, float]:
    """Batches handed over, and ms from the first one that is missing to the kill. Raises WrongError."""
    shared = mmap.mmap(-1, 8 * len(batches))
    child = os.fork()
    if child == 0:
        keep_recording(path, batches, shared)
    times = array("q")
    while shared[:8] == bytes(8):
        time.sleep(0.001)
    time.sleep(after_s)
    killed_ns = time.monotonic_ns()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    times.frombytes(shared[:])
    handed = sum(1 for at in times if 0 < at <= killed_ns)
    lengths = set()
    for way in WAYS:
        found, said = read(way, path) or ([], "refused")
        lengths.add(len(found))
        if found != list(enumerate(batches[: len(found)])) or not said:
            raise WrongError(f"{way}: not a beginning that says so")
    if len(lengths) > 1:
        raise WrongError(f"the two ways differ: {lengths}")
    [kept] = lengths
    return handed, (killed_ns - times[kept]) / 1e6 if kept < handed else 0.0


def kill_many(folder: Path, source: random.Random, count: int) -> int:
    """Prints what was lost; how many were wrong."""
    batches, lost_ms, num_handed, wrong = make_batches(1, MAX_BATCHES), [0.0], 0, 0
    for number in range(count):
        path = folder / f"killed{number}.mcap"
        try:
            handed, ms = kill_one(path, batches, source.uniform(*KILL_AFTER_S))
        except WrongError as error:
            wrong += 1
            print(f"kill {number}: {error}", file=sys.stderr)
            continue
        num_handed += handed
        lost_ms.append(ms)
        if ms > LIMIT_MS:
            wrong += 1
            print(f"kill {number}: the last {ms:.0f} ms are missing", file=sys.stderr)
        path.unlink()
    lost_ms.sort()
    print(f"{'kill -9':<10}{'both':<10}{count:>8,}{num_handed:>13,} batches handed over{'':>5}{wrong:>8}")
    print(f"{'':10}missing before a kill: p50 {lost_ms[len(lost_ms) // 2]:.0f} ms, most {lost_ms[-1]:.0f} ms", end=" ")
    print(f"(limit {LIMIT_MS:.0f})")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="cut at every Nth byte only")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    args = parser.parse_args()
    source = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        original = make_original(folder, args.seed)
        print(f"{len(original.data):,} bytes, {len(original.batches)} batches in {len(original.counts)} chunks", end="")
        print(f"; seed {args.seed}\n{'what':<10}{'opened':<10}{'files':>8}", end="")
        print("".join(f"{outcome:>13}" for outcome in OUTCOMES) + f"{'wrong':>8}", flush=True)
        path = folder / "damaged.mcap"
        wrong = damage("cut", original, islice(cuts(original), 0, None, args.every), path)
        wrong += damage("bit flip", original, flips(original, source, args.flips), path)
        wrong += kill_many(folder, source, args.kills)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
