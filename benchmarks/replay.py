"""Opens, seeks, steps back in and plays a generated recording, and prints one table.

    python benchmarks/replay.py [--events 200000] [--blocks 10000] [--seqs 64] [--seed 0]

The stream is made up but valid: every batch passes the auditor's checks of single events in `--check`. A workload of
decoding sequences, two in eight of them forks of one prompt, so blocks are shared and copied on write; requests come
and go. The file is written by the recorder and read back by the reader, in a process of its own, whose resident memory
is the figure. Times are of this machine, one thread.
"""

import argparse
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvscope.events import types as ev
from kvscope.events.audit import check_event
from kvscope.events.codec import encode_batch
from kvscope.events.state import EngineState, apply_batch, apply_event, begin_batch
from kvscope.events.types import Batch, EngineInfo, Event, SamplingParams
from kvscope.transport.recording import Player, Recorder, ReplaySource, open_recording

BLOCK_SIZE, PROMPT_TOKENS, MAX_NEW_TOKENS = 16, 200, 400
STEP_NS = 10_000_000
MAX_QUEUED_BYTES = 32 << 20


class Simulation:
    """A block pool and a schedule without a model: `batches` yields a plan and a commit per step."""

    def __init__(self, num_blocks: int, num_seqs: int, seed: int) -> None:
        self.random, self.num_blocks, self.num_seqs = random.Random(seed), num_blocks, num_seqs
        self.free = list(range(num_blocks))
        self.random.shuffle(self.free)
        self.refs = [0] * num_blocks
        self.tables: dict[str, list[int]] = {}
        self.written: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.num_requests = self.step = 0
        self.fresh: list[tuple[str, int]] = []

    def batches(self, num_events: int) -> Iterator[Batch]:
        yield self._batch("life", [ev.EngineStarted(wall_time_ns=10**18, schema_version=1, info=self._info())])
        made = 1
        while made < num_events:
            self.step += 1
            for phase, make in (("control", self._submit), ("plan", self._plan), ("commit", self._commit)):
                events = make()
                made += len(events)
                if events:
                    yield self._batch(phase, events)

    def _batch(self, phase: ev.Phase, events: list[Event]) -> Batch:
        return Batch(
            epoch=b"simulated-engine", step=self.step, phase=phase, time_ns=self.step * STEP_NS, events=tuple(events)
        )

    def _info(self) -> EngineInfo:
        return EngineInfo(
            name="simulation", model="none", device="cpu", dtype="float16", attention_backend="none",
            block_size=BLOCK_SIZE, num_blocks=self.num_blocks, bytes_per_block=1 << 16, num_layers=1, num_kv_heads=1,
            head_size=64, vocab_size=32000, max_num_seqs=self.num_seqs, max_num_batched_tokens=8192,
            max_model_len=4096, seed=0, kvscope_version="0",
        )  # fmt: skip

    def _submit(self) -> list[Event]:
        self.fresh, events = [], []
        room = self.num_seqs - len(self.tables)
        num_prompt_blocks = PROMPT_TOKENS // BLOCK_SIZE + 2
        while room >= 2 and len(self.free) > 2 * (num_prompt_blocks + self.num_seqs) and len(self.fresh) < 4:
            self.num_requests += 1
            n, name = self.random.choice((1, 1, 1, 2)), f"r{self.num_requests}"
            num_tokens = self.random.randint(PROMPT_TOKENS // 2, PROMPT_TOKENS)
            tokens = list(range(num_tokens))
            events.append(
                ev.RequestSubmitted(
                    request_id=name, prompt="x", prompt_token_ids=tokens, prompt_pieces=["x"] * num_tokens,
                    params=SamplingParams(n=n, max_tokens=MAX_NEW_TOKENS),
                )
            )  # fmt: skip
            self.fresh.append((name, n))
            room -= n
            for index in range(n):
                self.written[f"{name}.{index}"] = num_tokens if index == 0 else 0
                self.ends[f"{name}.{index}"] = num_tokens + self.random.randint(MAX_NEW_TOKENS // 4, MAX_NEW_TOKENS)
        return events

    def _plan(self) -> list[Event]:
        events: list[Event] = []
        for name, table in self.tables.items():
            logical, slot = divmod(self.written[name], BLOCK_SIZE)
            if logical == len(table):
                table.append(self._take())
                events.append(ev.BlocksAllocated(sequence_id=name, first_logical_block=logical, block_ids=table[-1:]))
            elif self.refs[table[logical]] > 1:
                source, table[logical] = table[logical], self._take()
                self.refs[source] -= 1
                events.append(
                    ev.BlockCopied(
                        sequence_id=name, logical_block=logical, source_block=source, target_block=table[logical],
                        num_slots=slot,
                    )
                )  # fmt: skip
        for name, _ in self.fresh:
            table = [self._take() for _ in range(-(-self.written[f"{name}.0"] // BLOCK_SIZE))]
            self.tables[f"{name}.0"] = table
            events.append(ev.RequestAdmitted(request_id=name))
            events.append(ev.BlocksAllocated(sequence_id=f"{name}.0", first_logical_block=0, block_ids=table.copy()))
        return events

    def _commit(self) -> list[Event]:
        events: list[Event] = []
        fresh = {f"{name}.0" for name, _ in self.fresh}
        for name in list(self.tables):
            if name in fresh:
                events.append(ev.SlotsWritten(sequence_id=name, start=0, stop=self.written[name]))
                continue
            start = self.written[name]
            self.written[name] += 1
            events.append(ev.SlotsWritten(sequence_id=name, start=start, stop=start + 1))
            events.append(ev.TokensGenerated(sequence_id=name, token_ids=[start], pieces=[" x"], text=" x"))
            if self.written[name] >= self.ends[name]:
                events += self._finish(name)
        for name, n in self.fresh:
            for index in range(1, n):
                events.append(self._fork(f"{name}.0", f"{name}.{index}"))
        events.append(ev.StepCompleted(elapsed_ns=STEP_NS // 2, num_tokens=len(self.tables)))
        return events

    def _fork(self, first: str, other: str) -> Event:
        self.tables[other], self.written[other] = self.tables[first].copy(), self.written[first]
        for block_id in self.tables[other]:
            self.refs[block_id] += 1
        return ev.BlocksShared(sequence_id=other, from_sequence_id=first, block_ids=self.tables[other].copy())

    def _finish(self, name: str) -> list[Event]:
        table, request_id = self.tables.pop(name), name.rpartition(".")[0]
        for block_id in table:
            self.refs[block_id] -= 1
        freed = [block_id for block_id in table if self.refs[block_id] == 0]
        self.free = freed + self.free
        events: list[Event] = [
            ev.SequenceFinished(sequence_id=name, reason="length"),
            ev.BlocksReleased(sequence_id=name, block_ids=table, freed_block_ids=freed),
        ]
        if not any(f"{request_id}.{index}" in self.tables for index in range(2)):
            events.append(ev.RequestFinished(request_id=request_id))
        return events

    def _take(self) -> int:
        block_id = self.free.pop()
        self.refs[block_id] = 1
        return block_id


def generate(path: Path, args: argparse.Namespace) -> tuple[int, int]:
    """Write the recording; the numbers of its batches and events."""
    recorder = Recorder(path, force=True)
    num_batches = num_events = 0
    state = EngineState()
    for seq, batch in enumerate(Simulation(args.blocks, args.seqs, args.seed).batches(args.events)):
        while recorder.num_queued_bytes > MAX_QUEUED_BYTES:
            time.sleep(0.01)  # unlike an engine, this can wait for the disk
        begin_batch(state, batch)
        for event in batch.events:
            if args.check:
                assert check_event(state, event) == [], event
            state = apply_event(state, event)
        recorder.record(seq, batch.time_ns, encode_batch(batch), batch, state)
        num_batches, num_events = seq + 1, num_events + len(batch.events)
    recorder.close()
    assert recorder.error is None, recorder.error
    return num_batches, num_events


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def quantiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"p50 {1e3 * statistics.median(ordered):.1f} ms, p95 {1e3 * ordered[int(len(ordered) * 0.95)]:.1f} ms"


def measure(path: Path, args: argparse.Namespace) -> None:
    """Print the table; runs in a process that has only read the file."""
    rng = random.Random(args.seed)
    started = time.perf_counter()
    recording = open_recording(path)
    source = ReplaySource(recording)
    player = source.player
    player._walker.rewind()
    player.seek_end()
    row("open, and show the last frame", f"{time.perf_counter() - started:.2f} s")
    player.survey.take_over(recording.columns)
    row("last frame, again", f"{1e3 * timed(lambda: (player.seek_start(), player.seek_end())):.1f} ms")
    seeks = [timed(lambda: player.seek(rng.randrange(player.length))) for _ in range(args.samples)]
    row("seek anywhere", quantiles(seeks))
    for name, move in (("one event", player.event_back), ("one batch", player.step_back)):
        backs = []
        for _ in range(args.samples // 10):
            player.seek(rng.randrange(player.length // 2, player.length))
            backs += [timed(move) for _ in range(10)]
        row(f"step back {name}", quantiles(backs))
    row("resident memory, peak so far", peak())
    stop = min(player.length, args.replayed)
    player.seek_start()
    elapsed_s = timed(lambda: [player.step_forward() for _ in range(stop)])
    num_events = player.index.events_before[stop]
    row("replay, with its log", f"{num_events / elapsed_s:,.0f} events/s")
    player.seek_start()
    elapsed_s = timed(lambda: fold_all(player, stop))
    row("replay, without its log", f"{num_events / elapsed_s:,.0f} events/s")
    row("resident memory, peak", peak())
    source.close()


def fold_all(player: Player, stop: int) -> None:
    """Fold every event from the start, as `check` does, with none of them on show."""
    state = EngineState()
    for position in range(stop):
        state = apply_batch(state, player.index.batch(position))


def peak() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"


def row(name: str, value: str) -> None:
    print(f"{name:<38}{value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--seqs", type=int, default=64, help="decoding at once")
    parser.add_argument("--replayed", type=int, default=5000, help="batches of the replay that are timed")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="audit every event while generating")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        measure(args.measure, args)
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "replay.mcap"
        num_batches, num_events = generate(path, args)
        row(
            "recording",
            f"{num_events:,} events, {num_batches:,} batches, {args.blocks:,} blocks, {args.seqs} sequences",
        )
        row("file", f"{path.stat().st_size / 2**20:.1f} MiB, {path.stat().st_size / num_events:.1f} bytes per event")
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--measure", str(path)], check=True)


if __name__ == "__main__":
    main()
