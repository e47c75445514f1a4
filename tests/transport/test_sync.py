"""The synchronizer's rules, step by step, under a clock that the test moves."""

import copy
from typing import Any

import pytest

from kvscope.events.codec import encode_batch, encode_state
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.events.text import make_printable
from kvscope.transport import sync
from kvscope.transport.requests import Op
from kvscope.transport.source import Status, View
from kvscope.transport.sync import ANSWER_TIMEOUT_S, Phase, Synchronizer
from kvscope.transport.wire import STALE_AFTER_S, Heartbeat


class Bench:
    """A synchronizer, the questions it asked, and an engine's stream to answer them from."""

    def __init__(self, stream) -> None:
        self.now = 100.0
        self.asked: list[tuple[Op, dict[str, Any]]] = []
        self.connected = True
        self.stream = stream
        self.view = View()
        self.sync = Synchronizer(self.view, self.ask, clock=lambda: self.now, wall_clock=lambda: 0.0)

    def ask(self, op: Op, **fields: Any) -> int | None:
        if not self.connected:
            return None
        self.asked.append((op, fields))
        return len(self.asked)

    @property
    def status(self) -> Status:
        return self.view.status

    def tick(self, seconds: float = 0.2) -> None:
        self.now += seconds
        self.sync.tick()

    def batch(self, seq: int) -> None:
        self.sync.on_batch(seq, encode_batch(self.stream.batches[seq]))

    def heartbeat(self, last_seq: int, late_s: float = 0.0) -> None:
        """One that was sent `late_s` ago."""
        self.sync.on_heartbeat(Heartbeat(self.stream.epoch, last_seq, 1, round((self.now - late_s) * 1e9)))

    def state_at(self, seq: int) -> EngineState:
        state = EngineState()
        for batch in self.stream.batches[: seq + 1]:
            state = apply_batch(state, copy.deepcopy(batch))
        return state

    def snapshot(self, seq: int) -> None:
        self.sync.on_reply({"id": len(self.asked), "ok": True, "seq": seq, "state": encode_state(self.state_at(seq))})

    def replay(self, seqs: range, *, complete: bool = True) -> None:
        for seq in seqs:
            payload = encode_batch(self.stream.batches[seq])
            self.sync.on_reply({"id": len(self.asked), "seq": seq, "payload": payload})
        self.sync.on_reply(
            {"id": len(self.asked), "ok": True, "end": True, "next_seq": seqs.stop, "complete": complete}
        )

    def go_live(self, seq: int) -> None:
        self.tick()
        self.snapshot(seq)
        self.heartbeat(seq)
        assert self.status is Status.LIVE


@pytest.fixture
def bench(lab) -> Bench:
    stream = lab.Stream()
    stream.take(60)
    return Bench(stream)


def test_a_warning_of_the_engine_is_text_and_ends_with_it(bench: Bench) -> None:
    bench.sync.on_heartbeat(Heartbeat(b"e", 1, 1, 1, "\x1b]0;x\x07" + "full " * 1000))
    assert bench.view.engine_warning.startswith(make_printable("\x1b]0;x\x07full"))
    assert len(bench.view.engine_warning) <= 1000
    bench.sync.on_heartbeat(Heartbeat(b"f", 1, 1, 1))
    assert bench.view.engine_warning == ""


def test_nothing_is_live_before_the_stream_agrees(bench: Bench) -> None:
    assert bench.status is Status.CONNECTING
    bench.tick()
    assert bench.asked == [(Op.SNAPSHOT, {})]
    bench.snapshot(9)
    assert bench.status is Status.SYNCING
    bench.heartbeat(9)
    assert bench.status is Status.LIVE


def test_a_snapshot_ahead_of_the_stream(bench: Bench) -> None:
    bench.tick()
    for seq in (5, 6, 7):
        bench.batch(seq)
    bench.snapshot(9)
    for seq in (8, 9):
        bench.batch(seq)
    assert bench.view.last_seq == 9
    bench.batch(10)
    assert bench.status is Status.LIVE
    assert bench.view.state == bench.state_at(10)


def test_batches_kept_aside_follow_the_snapshot(bench: Bench) -> None:
    bench.tick()
    for seq in range(5, 15):
        bench.batch(seq)
    bench.snapshot(9)
    assert (bench.view.last_seq, bench.status) == (14, Status.LIVE)
    assert bench.view.state == bench.state_at(14)


def test_what_is_missing_while_joining_is_not_a_gap(bench: Bench) -> None:
    bench.tick()
    bench.snapshot(9)
    bench.batch(12)
    assert (bench.status, bench.sync.phase) == (Status.SYNCING, Phase.REPLAYING)
    bench.tick()
    assert bench.asked[-1] == (Op.REPLAY, {"seq": 10})
    bench.replay(range(10, 13))
    assert (bench.status, bench.view.num_gaps, bench.view.last_seq) == (Status.LIVE, 0, 12)


def test_a_gap_is_never_live(bench: Bench) -> None:
    bench.go_live(9)
    bench.batch(12)
    assert (bench.status, bench.view.status_detail) == (Status.GAP, "batches 10 to 11 are missing")
    bench.tick()
    bench.batch(13)
    assert bench.status is Status.GAP
    bench.replay(range(10, 12))
    assert (bench.status, bench.view.last_seq, bench.view.num_gaps) == (Status.LIVE, 13, 1)
    assert bench.view.state == bench.state_at(13)


def test_a_second_gap_among_the_batches_kept_aside(bench: Bench) -> None:
    bench.go_live(9)
    bench.batch(12)
    bench.batch(15)
    bench.tick()
    bench.replay(range(10, 12))
    assert (bench.status, bench.view.last_seq) == (Status.GAP, 12)
    bench.tick()
    bench.replay(range(13, 15))
    assert (bench.status, bench.view.last_seq) == (Status.LIVE, 15)


def test_an_incomplete_replay_leads_to_a_snapshot(bench: Bench) -> None:
    bench.go_live(9)
    bench.batch(20)
    bench.tick()
    bench.replay(range(10, 10), complete=False)
    assert bench.status is Status.GAP
    bench.tick()
    assert bench.asked[-1] == (Op.SNAPSHOT, {})
    bench.snapshot(21)
    assert bench.status is Status.LIVE, "batch 20 was heard, and the state is past it"
    bench.batch(22)
    assert (bench.status, bench.view.state) == (Status.LIVE, bench.state_at(22))


def test_a_replay_that_ends_short_leads_to_a_snapshot(bench: Bench) -> None:
    bench.go_live(9)
    bench.heartbeat(20)
    bench.tick()
    bench.replay(range(10, 15))
    bench.tick()
    assert (bench.status, bench.asked[-1][0]) == (Status.GAP, Op.SNAPSHOT)


def test_a_replay_with_a_hole_leads_to_a_snapshot(bench: Bench) -> None:
    bench.go_live(9)
    bench.batch(20)
    bench.tick()
    bench.sync.on_reply({"id": 2, "seq": 11, "payload": encode_batch(bench.stream.batches[11])})
    bench.tick()
    assert (bench.status, bench.asked[-1][0]) == (Status.GAP, Op.SNAPSHOT)


def test_a_batch_that_does_not_fit_leads_to_a_snapshot(bench: Bench) -> None:
    bench.go_live(9)
    bench.view.state.requests.clear()
    for seq in range(10, 30):
        bench.batch(seq)
    assert bench.status is Status.GAP
    assert "does not fit" in bench.view.status_detail
    bench.tick()
    bench.snapshot(29)
    bench.heartbeat(29)
    assert (bench.status, bench.view.state) == (Status.LIVE, bench.state_at(29))


def test_duplicates_and_old_batches_are_skipped(bench: Bench) -> None:
    bench.go_live(9)
    for seq in (9, 3, 10, 10, 9):
        bench.batch(seq)
    assert (bench.view.last_seq, bench.view.state) == (10, bench.state_at(10))


def test_silence(bench: Bench) -> None:
    bench.go_live(9)
    bench.tick(1.9)
    assert bench.status is Status.LIVE
    bench.tick(0.2)
    assert bench.status is Status.STALE
    assert bench.view.status_detail.startswith("no heartbeat since ")
    bench.heartbeat(9)
    assert bench.status is Status.LIVE


def test_after_silence_what_was_missed_is_fetched_first(bench: Bench) -> None:
    bench.go_live(9)
    bench.tick(3.0)
    bench.batch(30)
    assert bench.status is Status.GAP
    bench.tick(3.0)
    assert bench.status is Status.STALE, "silence while replaying"
    bench.heartbeat(30)
    assert bench.status is Status.GAP
    bench.tick()
    bench.replay(range(10, 31))
    assert bench.status is Status.LIVE


def test_another_life(bench: Bench, lab) -> None:
    bench.go_live(9)
    bench.stream = lab.Stream(99)
    bench.stream.take(40)
    bench.batch(10)
    assert (bench.status, bench.view.last_seq) == (Status.SYNCING, 9)
    bench.tick()
    bench.snapshot(12)
    bench.batch(13)
    assert (bench.status, bench.view.state) == (Status.LIVE, bench.state_at(13))
    assert bench.view.num_gaps == 0


def test_a_snapshot_of_the_life_before_is_not_taken(bench: Bench, lab) -> None:
    bench.tick()
    old = bench.stream
    bench.stream = lab.Stream(99)
    bench.stream.take(40)
    bench.batch(10)
    new, bench.stream = bench.stream, old
    bench.snapshot(9)
    assert bench.view.last_seq is None
    bench.stream = new
    bench.tick()
    bench.snapshot(12)
    bench.heartbeat(12)
    assert bench.status is Status.LIVE


def test_goodbye(bench: Bench) -> None:
    bench.stream.stop()
    bench.go_live(59)
    bench.batch(60)
    assert bench.status is Status.ENDED
    bench.tick(10.0)
    assert bench.status is Status.ENDED


def test_no_engine_is_asked_again_and_again(bench: Bench) -> None:
    bench.connected = False
    bench.tick()
    bench.connected = True
    bench.tick()
    assert len(bench.asked) == 1
    bench.tick(ANSWER_TIMEOUT_S / 2)
    assert len(bench.asked) == 1
    bench.tick(ANSWER_TIMEOUT_S)
    assert len(bench.asked) == 2


def test_a_late_answer_to_an_old_question_is_skipped(bench: Bench) -> None:
    bench.tick()
    bench.tick(ANSWER_TIMEOUT_S + 1)
    bench.sync.on_reply({"id": 1, "ok": True, "seq": 5, "state": encode_state(bench.state_at(5))})
    assert bench.view.last_seq is None
    bench.snapshot(9)
    assert bench.view.last_seq == 9


def test_questions_are_paced_whatever_the_engine_sends(bench: Bench) -> None:
    bench.tick()
    for _ in range(1_000):
        bench.sync.on_reply({"id": len(bench.asked), "ok": True, "seq": 1, "state": b"\xc1"})
        bench.tick(0.0001)
    assert len(bench.asked) <= 3
    assert bench.view.num_refused_events <= 3
    assert "not MessagePack" in bench.view.status_detail


# --- lag ---------------------------------------------------------------------------------------------------------


def test_a_viewer_that_falls_behind_says_so_and_skips_to_the_present(bench: Bench) -> None:
    bench.go_live(9)
    for seq in (10, 11):
        bench.batch(seq)
    bench.now += STALE_AFTER_S
    bench.heartbeat(11, late_s=STALE_AFTER_S)
    assert bench.status is Status.LIVE  # what is on the screen is as old as LIVE allows, and no older
    bench.now += 1
    bench.heartbeat(11, late_s=STALE_AFTER_S + 1)
    assert (bench.status, bench.view.num_gaps) == (Status.GAP, 1)
    assert bench.view.status_detail == "this viewer was 3.0 s behind; it skips to the present"
    bench.tick()
    assert bench.asked[-1] == (Op.SNAPSHOT, {})
    for seq in range(12, 30):
        bench.batch(seq)
    bench.snapshot(40)
    assert (bench.view.last_seq, bench.status) == (40, Status.LIVE)
    for seq in range(30, 42):  # the rest of the queue, and what came after the state
        bench.batch(seq)
        if seq == 35:
            bench.heartbeat(35, late_s=2.9)
    bench.heartbeat(41)
    assert (bench.view.last_seq, bench.status, bench.view.num_gaps) == (41, Status.LIVE, 1)
    assert bench.view.state == bench.state_at(41)


def test_who_joins_behind_begins_again_at_once(bench: Bench) -> None:
    """Nobody has seen this life yet: half a second behind is enough to skip, and no gap. Later it is not."""
    behind = sync.JOIN_LAG_S + 0.1
    bench.heartbeat(0)
    bench.tick()
    bench.snapshot(9)
    bench.batch(10)
    bench.now += 1
    bench.heartbeat(10, late_s=behind)
    assert (bench.status, bench.view.num_gaps) == (Status.SYNCING, 0)
    bench.tick()
    assert bench.asked[-2:] == [(Op.SNAPSHOT, {})] * 2
    bench.snapshot(40)
    bench.batch(41)
    assert (bench.view.last_seq, bench.status, bench.view.num_gaps) == (41, Status.LIVE, 0)
    bench.heartbeat(41)
    bench.now += 1
    bench.heartbeat(41, late_s=behind)
    assert (bench.status, len(bench.asked)) == (Status.LIVE, 2)


def test_what_a_snapshot_makes_superfluous_is_not_decoded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.go_live(9)
    bench.heartbeat(9, late_s=9)
    bench.tick()
    decoded = []
    decode_batch = sync.decode_batch
    monkeypatch.setattr(
        sync, "decode_batch", lambda payload, **kw: decoded.append(payload) or decode_batch(payload, **kw)
    )
    for seq in range(10, 30):
        bench.batch(seq)
    bench.snapshot(27)
    assert decoded == [encode_batch(bench.stream.batches[seq]) for seq in (28, 29)]


def test_what_comes_after_a_silence_is_not_live_before_a_heartbeat(bench: Bench) -> None:
    """A viewer that was stopped finds ten minutes of batches in its queue."""
    bench.go_live(9)
    bench.now += 600
    bench.batch(10)
    assert (bench.view.last_seq, bench.status) == (10, Status.SYNCING)
    bench.heartbeat(10, late_s=599)
    assert bench.status is Status.GAP
    bench.tick()
    bench.snapshot(50)
    bench.heartbeat(11, late_s=598)
    assert bench.status is Status.LIVE  # the state is newer than that heartbeat


def test_an_engine_that_was_silent_itself_is_live_with_its_next_heartbeat(bench: Bench) -> None:
    bench.go_live(9)
    bench.now += 5
    bench.batch(10)
    assert bench.status is Status.SYNCING
    bench.heartbeat(10)
    assert (bench.status, bench.view.num_gaps, bench.sync.phase) == (Status.LIVE, 0, Phase.FOLLOWING)


def test_a_clock_that_jumps_costs_one_snapshot(bench: Bench) -> None:
    bench.go_live(9)
    bench.now += 0.5
    bench.heartbeat(9, late_s=1_000)
    bench.tick()
    bench.snapshot(9)
    for _ in range(20):
        bench.tick(0.5)
        bench.heartbeat(9, late_s=1_000)
        assert bench.status is Status.LIVE
    assert len(bench.asked) == 2


def test_clocks_that_drift_apart_are_not_lag(bench: Bench) -> None:
    bench.go_live(9)
    for second in range(1, 20_000):
        bench.now += 1.0
        bench.heartbeat(9, late_s=second * 300e-6)
        assert bench.status is Status.LIVE


def test_batches_kept_aside_are_bounded_in_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "MAX_ASIDE_BYTES", 1_000)
    bench.tick()
    for seq in range(60):
        bench.batch(seq)
    assert 0 < sum(len(received.payload) for received in bench.sync._aside) <= 1_000
    bench.snapshot(3)
    assert bench.sync.phase is Phase.REPLAYING  # the hole is found, and asked for
    bench.tick()
    assert bench.asked[-1] == (Op.REPLAY, {"seq": 4})
    bench.replay(range(4, 60))
    assert bench.view.state == bench.state_at(59)


def test_a_late_heartbeat_from_before_the_state_is_no_lag(bench: Bench) -> None:
    bench.go_live(9)
    bench.sync.on_batch(10, b"\xc1")  # a fresh state is fetched
    bench.tick()
    bench.snapshot(50)
    bench.heartbeat(20, late_s=5)
    assert (bench.status, len(bench.asked)) == (Status.LIVE, 2)
