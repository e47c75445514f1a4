#!/usr/bin/env python3
"""Feeds the decoders what nobody should send, and prints one table.

    python tests/campaigns/fuzz_decoder.py [--inputs 10000000] [--seed N]

Random bytes, mutated, truncated and spliced valid frames, and valid MessagePack that means nothing; as batches, as
batches of recordings (transposed), states, heartbeats and control requests. A batch that decodes is folded, and one
reply in eight goes through a client's synchronizer. Documented are DecodeError from a decoder and FoldError from a
fold; anything else ends the run with the input, and exit code 1. So does growth of the resident memory by more than
64 MiB after the first 2 %.
"""

import argparse
import contextlib
import importlib.util
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgpack
import msgspec

from kvscope.events import transposed
from kvscope.events.codec import DecodeError, decode_batch, decode_state, encode_batch, encode_state
from kvscope.events.fold import apply_batch
from kvscope.events.fold_transposed import apply_transposed
from kvscope.events.state import EngineState, FoldError
from kvscope.events.types import Batch
from kvscope.transport.recording.format import RecordingError
from kvscope.transport.recording.packing import BatchPacker, Form, Unpacker
from kvscope.transport.recording.reader import decode_kept
from kvscope.transport.requests import decode_request
from kvscope.transport.source import View
from kvscope.transport.sync import Synchronizer
from kvscope.transport.wire import Heartbeat, decode_heartbeat, encode_heartbeat

MAX_GROWTH_BYTES = 64 << 20
SCALARS = (
    *(None, True, False, 0, 1, -1, 255, 1 << 31, 1 << 63, -(1 << 63), (1 << 64) - 1),
    *(0.5, float("nan"), float("inf"), "", "r1", "r1.0", "\x1b[2J", "\u202e", "plan", b"", b"\xff" * 16),
)


def _stream_class() -> type:
    """The tests' own source of valid batches."""
    path = Path(__file__).resolve().parents[1] / "transport" / "conftest.py"
    spec = importlib.util.spec_from_file_location("transport_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Stream


class Corpus:
    """Valid frames of each kind, and the ways to spoil them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        stream = _stream_class()(seed)
        batches: list[Batch] = stream.take(400)
        states = [encode_state(_fold(batches[:count])) for count in (1, 30, 200, 400)]
        self.frames: dict[str, list[bytes]] = {
            "batch": [encode_batch(batch) for batch in batches],
            "transposed": _transposed(batches),
            "state": states,
            "heartbeat": [encode_heartbeat(Heartbeat(stream.epoch, n, n, n * 10**6)) for n in (0, 5, 10**9)],
            "request": [
                msgpack.packb({"id": 7, "op": op, "prompt": "x", "options": {"n": 2}, "seq": 4, "num_steps": 1})
                for op in ("snapshot", "replay", "submit", "step", "ping")
            ],
        }
        self.opening, self.frames["packed"] = _packed(self.frames["batch"])
        self.epoch: bytes = stream.epoch
        self.events = [event for frame in self.frames["batch"] for event in msgpack.unpackb(frame)[4]]
        self.words = sorted({word for event in self.events for word in (*event, event["type"])})
        self.spoil: dict[str, Callable[[str], bytes]] = {
            "random": self._noise,
            "mutated": self._mutated,
            "truncated": self._truncated,
            "spliced": self._spliced,
            "hostile": self._hostile,
        }

    def _pick(self, kind: str) -> bytes:
        frames = self.frames[kind]
        return frames[int(self.random.random() * len(frames))]

    def _noise(self, kind: str) -> bytes:
        return self.random.randbytes(int(self.random.random() ** 2 * 200))

    def _mutated(self, kind: str) -> bytes:
        frame = bytearray(self._pick(kind))
        uniform = self.random.random
        for _ in range(1 + int(uniform() * 4)):
            frame[int(uniform() * len(frame))] = int(uniform() * 256)
        return bytes(frame)

    def _truncated(self, kind: str) -> bytes:
        frame = self._pick(kind)
        return frame[: int(self.random.random() * len(frame))]

    def _spliced(self, kind: str) -> bytes:
        one, other = self._pick(kind), self._pick(kind)
        cut, start = int(self.random.random() * len(one)), int(self.random.random() * len(other))
        return one[:cut] + other[start:]

    def _hostile(self, kind: str) -> bytes:
        """Valid MessagePack of a shape that is nearly right, or a header that promises what is not there."""
        if self.random.random() < 0.1:
            lead = self.random.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9", b"\x91", b"\x81\xa1x"))
            return lead * int(1 + self.random.random() ** 40 * 30_000) + b"\xff" * 4
        events = [self._event() for _ in range(int(self.random.random() * 4))]
        shapes = {
            "batch": lambda: [self.epoch, self._value(1) if self.random.random() < 0.1 else 5, "plan", 5, events],
            "transposed": lambda: [self.epoch, 5, "plan", 5, bytes(4) + b"\xff" * len(events), [self._group()], events],
            "packed": lambda: [1, self.random.randrange(3), self._value(0), self._value(0) or self._noise(kind)],
            "state": lambda: {word: self._value(3) for word in self.random.sample(self.words, 4)},
            "heartbeat": lambda: [self._value(1) for _ in range(4)],
            "request": lambda: {"id": self._value(0), "op": self._value(0), "options": self._value(2)},
        }
        return msgpack.packb(shapes[kind]())

    def _group(self) -> object:
        """Four events of one kind, of columns in every form there is."""
        names = self.random.sample(self.words, int(self.random.random() * 4))
        values = [self._value(2) for _ in range(4)]
        forms = [0, values], [1, self._value(1), 4], [2, self._value(0)], [3, [0, values]], [4, 0, 1], [5, values]
        return self.random.choice(self.words), names, [self.random.choice(forms) for _ in names]

    def _event(self) -> object:
        fields = {word: self._value(2) for word in self.random.sample(self.words, 3)}
        if self.random.random() < 0.3:
            return {"type": self.random.choice(self.words), **fields}
        valid = self.events[int(self.random.random() * len(self.events))]
        return valid | {self.random.choice(list(valid)): self._value(2)}  # one field is not what it was

    def _value(self, depth: int) -> object:
        pick = self.random.random()
        if depth == 0 or pick < 0.6:
            return SCALARS[int(self.random.random() * len(SCALARS))]
        values = [self._value(depth - 1) for _ in range(int(self.random.random() * 4))]
        return values if pick < 0.8 else {str(index): value for index, value in enumerate(values)}


class Targets:
    """What the frames are fed to. Each call returns whether the frame was taken."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus, self._count = corpus, 0
        self._state_bytes = encode_state(_fold(_stream_class()(1).take(60)))
        self._new_synchronizer()
        self.calls: dict[str, Callable[[bytes], bool]] = {
            "batch": self._batch,
            "transposed": self._transposed,
            "packed": self._packed,
            "state": self._decoded(lambda frame: decode_state(frame, printable=True)),
            "heartbeat": self._heartbeat,
            "request": self._decoded(decode_request),
        }

    def _new_synchronizer(self) -> None:
        self._sync = Synchronizer(View(), lambda op, **fields: 1)
        self._sync.tick()

    def _decoded(self, decode: Callable[[bytes], object]) -> Callable[[bytes], bool]:
        def call(frame: bytes) -> bool:
            self._maybe_reply(frame)
            decode(frame)
            return True

        return call

    def _batch(self, frame: bytes) -> bool:
        self._sync.on_batch(self._count % 50, frame)
        batch = decode_batch(frame, printable=True).batch
        with contextlib.suppress(FoldError):
            apply_batch(decode_state(self._state_bytes), batch)
        return True

    def _transposed(self, frame: bytes) -> bool:
        self._maybe_reply(frame)
        read = transposed.read_transposed(frame, printable=True)
        with contextlib.suppress(FoldError):
            apply_transposed(decode_state(self._state_bytes), read)
        return True

    def _packed(self, frame: bytes) -> bool:
        """As the second one of its frame."""
        unpacker = Unpacker()
        unpacker.unpack(self._corpus.opening)
        try:
            decode_kept(*unpacker.unpack(frame))
        except RecordingError as error:
            raise DecodeError(str(error)) from None
        return True

    def _heartbeat(self, frame: bytes) -> bool:
        self._sync.on_heartbeat(decode_heartbeat(frame))
        return True

    def _maybe_reply(self, frame: bytes) -> None:
        self._count += 1
        if self._count % 8 == 0:
            replies = (
                {"id": 1, "ok": True, "seq": 7, "state": frame},
                {"id": 1, "seq": self._count % 50, "payload": frame},
                {"id": 1, "ok": True, "end": True, "complete": True},
            )
            self._sync.on_reply(replies[self._count // 8 % 3])
            self._sync.tick()
        if self._count % 5_000 == 0:
            self._new_synchronizer()


def _fold(batches: list[Batch]) -> EngineState:
    state = EngineState()
    for batch in batches:
        state = apply_batch(state, batch)
    return state


def _transposed(batches: list[Batch]) -> list[bytes]:
    """What eight of them say, as one."""
    transposed.MIN_GROUP = 2
    joined = [[event for batch in batches[at : at + 8] for event in batch.events] for at in range(0, len(batches), 8)]
    whole = [msgspec.structs.replace(batches[0], events=tuple(events)) for events in joined]
    return [data for batch in whole if (data := transposed.transpose(encode_batch(batch))) is not None]


def _packed(payloads: list[bytes]) -> tuple[bytes, list[bytes]]:
    """The first of them, and each as the second one of a frame that it begins."""
    packer, opening, seconds = BatchPacker(), b"", []
    for payload in payloads:
        packer.end_frame()
        opening = packer.pack(Form.WIRE, payloads[0])
        seconds.append(packer.pack(Form.WIRE, payload))
    return opening, seconds


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    args = parser.parse_args()
    corpus = Corpus(args.seed)
    targets = Targets(corpus)
    plan = [
        (spoil, kind)
        for spoil in corpus.spoil
        for kind in ("batch", "transposed", "packed", "state", "heartbeat", "request")
    ]
    taken, refused = Counter[str](), Counter[str]()
    started, before, most = time.monotonic(), 0, 0
    for number in range(args.inputs):
        spoil, kind = plan[number % len(plan)]
        frame = corpus.spoil[spoil](kind)
        try:
            is_taken, reason = targets.calls[kind](frame), ""
        except DecodeError as error:
            is_taken, reason = False, str(error)
        except Exception as error:
            print(f"seed {args.seed}, input {number}: {type(error).__name__}: {error}\n{kind} {frame.hex()}")
            raise
        assert reason.isprintable(), frame.hex()  # one line, safe for a terminal
        (taken if is_taken else refused)[f"{spoil:<10}{kind}"] += 1
        if number == args.inputs // 50:
            before = resident_bytes()
        elif number % 65_536 == 0:
            most = max(most, resident_bytes())
    growth = max(most, resident_bytes()) - before
    print(f"{'input':<10}{'as':<12}{'decoded':>12}{'refused':>12}{'other':>8}")
    for name in dict.fromkeys(f"{spoil:<10}{kind}" for spoil, kind in plan):
        print(f"{name:<22}{taken[name]:>12,}{refused[name]:>12,}{0:>8}")
    print(f"{'all':<22}{taken.total():>12,}{refused.total():>12,}{0:>8}")
    print(f"seed {args.seed}; {args.inputs / (time.monotonic() - started):,.0f} inputs/s", end="; ")
    print(f"memory grew by {growth / 2**20:.1f} MiB (limit 64)")
    return 0 if growth <= MAX_GROWTH_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
