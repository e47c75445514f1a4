"""Opens, seeks, steps back in and plays a recording of a simulated engine, and prints one table.

    python benchmarks/replay.py [--requests 400] [--blocks 10000] [--seqs 64] [--waiting 100] [--seed 0] [--keep FILE]
    python benchmarks/replay.py --requests 19500 --blocks 100000 --seqs 256 --keep 10m.mcap     # 10 million events
    python benchmarks/replay.py --recording 10m.mcap

The engine's scheduler and pool make it, without a model (`kvscope simulate`): chats whose prompts begin alike, served
from the prefix cache, until blocks must be evicted. Figures are of a process that has only read the file, with the
audit of the recording running beside it, as in the dashboard. Two rates are told apart: *folded* is how fast events
become a state when every one of them is applied; *played* is how fast a recording passes by at the highest speed,
where each picture is an exact state, but only those that are shown are made.

Bytes are those of the whole file, prompts, generated text, checkpoints and indexes included, over the number of events
of every kind; and over that of the block events alone, which allocate, share, copy, write, reuse, evict, release or
swap blocks: a written token is one, the token itself is not.
"""

import argparse
import hashlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgpack

from kvscope.engine.simulation import command
from kvscope.events import types as ev
from kvscope.events.codec import encode_batch, encode_state
from kvscope.events.finder import Finder
from kvscope.events.state import EngineState
from kvscope.transport.recording import Player, ReplaySource, open_recording
from kvscope.transport.timetravel.clock import MAX_SPEED

BLOCK_EVENTS = {
    ev.BlocksAllocated, ev.BlocksShared, ev.BlockCopied, ev.SlotsWritten, ev.BlocksReused, ev.BlocksEvicted,
    ev.BlocksReleased, ev.BlocksOutOfWindow, ev.BlocksSwappedOut, ev.BlocksSwappedIn, ev.HostBlocksReleased,
}  # fmt: skip
FRAMES_PER_S = 15
CHECKED_FRAMES = 3
PEER_BATCHES = 200


def generate(path: Path, args: argparse.Namespace) -> None:
    """Simulate, and keep the recording."""
    settings = command.Settings(
        trace=None, synthetic=f"requests={args.requests} rate=0 prompt=400 output=256 prefixes=64 seed={args.seed}",
        num_blocks=args.blocks, block_size=16, max_num_seqs=args.seqs, max_num_batched_tokens=8192, max_model_len=None,
        prefix_caching=True, max_requests=None, max_waiting=args.waiting, speed=1.0, chunk_size=512, step_us=8000.0,
        token_us=40.0, context_us=0.066, allocator="paged",
    )  # fmt: skip
    command.simulate(settings, record=path, force=True, as_json=False)


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    call()
    return clock() - started


def quantiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"p50 {1e3 * statistics.median(ordered):.1f} ms, p95 {1e3 * ordered[int(len(ordered) * 0.95)]:.1f} ms"


def measure(path: Path, args: argparse.Namespace) -> None:
    """Print the table; runs in a process that has only read the file."""
    rng = random.Random(args.seed)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    started = clock()
    source = ReplaySource(open_recording(path))
    player = source.player
    source.start()
    player.seek_end()
    row("open, and show the last frame", f"{clock() - started:.2f} s")
    num_events = player.index.events_before[player.length]
    row("recording", f"{num_events:,} events, {player.length:,} batches, {len(source.view.state.ref_counts):,} blocks")
    size = path.stat().st_size
    row("file", f"{size / 2**20:.1f} MiB, {size / num_events:.1f} bytes per event")
    row("file, per block event", f"{size / num_events / block_event_share(player, rng, args.samples):.1f} bytes")
    row("last frame, again", f"{1e3 * timed(lambda: (player.seek_start(), player.seek_end()), clock):.1f} ms")
    seeks = [timed(lambda: player.seek(rng.randrange(player.length)), clock) for _ in range(args.samples)]
    row("seek anywhere", quantiles(seeks))
    for name, move in (("one event", player.event_back), ("one batch", player.step_back)):
        backs = []
        for _ in range(args.samples // 10):
            player.seek(rng.randrange(player.length // 2, player.length))
            backs += [timed(move, clock) for _ in range(10)]
        row(f"step back {name}", quantiles(backs))
    look_back(source, rng, clock, args.samples // 10)
    row("resident memory, peak so far", peak())
    play(source)
    player.survey.close()
    fold(player, min(player.length, args.folded), clock)
    row("resident memory, peak", peak())
    source.close()


def block_event_share(player: Player, rng: random.Random, samples: int) -> float:
    """How many of all events are about blocks, from batches taken at random, as many as there are samples."""
    batches = [player.index.batch(rng.randrange(player.length)) for _ in range(samples)]
    kinds = [type(event) for batch in batches for event in batch.events]
    return sum(kind in BLOCK_EVENTS for kind in kinds) / len(kinds)


def look_back(source: ReplaySource, rng: random.Random, clock: Callable[[], float], samples: int) -> None:
    """From moments of the second half: to the last change of any block, to who held it before, to an admission."""
    player = source.player
    found: dict[str, list[float]] = {"a block's last change": [], "who held it before": [], "a request's admission": []}
    for _ in range(samples):
        here = rng.randrange(player.length // 2, player.length)
        player.seek(here)
        block_id = rng.randrange(len(source.view.state.ref_counts))
        running = [name for name, one in source.view.state.requests.items() if one.status == "running"]
        looks: list[Callable[[], object]] = [
            partial(player.back_to_block_change, block_id),
            partial(player.back_to_block_release, block_id),
            partial(player.back_to_admission, rng.choice(running or ["r0"])),
        ]
        for seconds, look in zip(found.values(), looks, strict=True):
            seconds.append(timed(look, clock))
            player.seek(here)
    for name, seconds in found.items():
        row(f"look back to {name}", f"{quantiles(seconds)}, longest {max(seconds):.2f} s")


def play(source: ReplaySource) -> None:
    """The whole recording at the highest speed, looked at as often as a dashboard does."""
    player, view, frames = source.player, source.view, []
    player.seek_start()
    player.speed = MAX_SPEED
    started = time.perf_counter()
    player.play()
    while player.playing:
        time.sleep(1 / FRAMES_PER_S)
        with view.lock:
            frames.append((view.last_seq, view.state.step))
            if len(frames) % 8 == 4 and len(frames) < 8 * CHECKED_FRAMES and view.last_seq is not None:
                frames[-1] = (view.last_seq, digest(view.state))
    elapsed_s = time.perf_counter() - started
    num_events = player.index.events_before[player.length]
    row(
        f"played at {MAX_SPEED:g}x",
        f"{num_events / elapsed_s:,.0f} events/s: {elapsed_s:.1f} s, {len(set(frames))} pictures",
    )
    for seq, found in frames:
        if isinstance(found, bytes):
            player.seek(player.index.after_seq(seq))
            assert found == digest(source.view.state), f"the picture at {seq} was another one"


def fold(player: Player, stop: int, clock: Callable[[], float]) -> None:
    """Apply every event from the start: with lines for the log, as step by step; and without, as `check` does."""
    num_events = player.index.events_before[stop]
    player.seek_start()
    elapsed_s = timed(lambda: [player.step_forward() for _ in range(stop)], clock)
    row("folded, each batch shown with its log", f"{num_events / elapsed_s:,.0f} events/s")
    elapsed_s = timed(lambda: fold_all(player, stop), clock)
    row("folded, nothing shown", f"{num_events / elapsed_s:,.0f} events/s")
    batches = [player.index.batch(position) for position in range(stop // 2, min(stop, stop // 2 + PEER_BATCHES))]
    payloads, num_events = list(map(encode_batch, batches)), sum(len(batch.events) for batch in batches)
    elapsed_s = timed(lambda: [msgpack.unpackb(payload) for payload in payloads], clock)
    row("peer: msgpack.unpackb, no fold", f"{num_events / elapsed_s:,.0f} events/s")


def fold_all(player: Player, stop: int) -> None:
    state = EngineState()
    finder = Finder(state)
    for position in range(stop):
        state = player.index.fold(state, position, finder)


def digest(state: EngineState) -> bytes:
    return hashlib.sha256(encode_state(state)).digest()


def peak() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"


def row(name: str, value: str) -> None:
    print(f"{name:<40}{value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400, help="about 540 events each")
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--seqs", type=int, default=64, help="running at once")
    parser.add_argument("--waiting", type=int, default=100, help="in the queue; every state holds their prompts")
    parser.add_argument("--folded", type=int, default=5000, help="batches whose fold is timed")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="time of this thread alone: for a busy machine")
    parser.add_argument("--keep", type=Path, help="where to keep the recording")
    parser.add_argument("--recording", type=Path, help="one made earlier")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.recording, args)
        return
    with tempfile.TemporaryDirectory() as directory:
        path = args.recording or args.keep or Path(directory) / "replay.mcap"
        if args.recording is None:
            generate(path, args)
        arguments = [__file__, *sys.argv[1:], "--recording", str(path), "--measure"]
        subprocess.run([sys.executable, *arguments], check=True)


if __name__ == "__main__":
    main()
