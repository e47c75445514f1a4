"""What a live view keeps of its past: bounded, whole, and unchanged once frozen."""

import copy
import random

import msgpack
import msgspec
import pytest

from kvscope.events import keyframe as keyframe_module
from kvscope.events.codec import decode_batch, encode_batch, encode_state
from kvscope.events.fold import apply_batch
from kvscope.events.keyframe import Keyframe
from kvscope.events.state import EngineState
from kvscope.events.types import RequestSubmitted, SamplingParams
from kvscope.transport.healing import receivable
from kvscope.transport.source import Status, View
from kvscope.transport.timetravel import History, ReplaySource
from kvscope.transport.timetravel import history as history_module


@pytest.fixture(autouse=True)
def short_segments(monkeypatch) -> None:
    monkeypatch.setattr(history_module, "SEGMENT_EVENTS", 20)


def feed(view: View, batches, first_seq: int = 0) -> None:
    for seq, batch in enumerate(batches, first_seq):
        view.apply(seq, receivable(batch), payload=encode_batch(batch))


def states_of(batches) -> list[bytes]:
    """The state after each batch, by a straight fold."""
    state, states = EngineState(), []
    for batch in batches:
        state = apply_batch(state, receivable(copy.deepcopy(batch)))
        states.append(encode_state(state))
    return states


@pytest.mark.parametrize("limit", [{"max_batches": 60}, {"max_bytes": 300_000}, {}])
def test_the_past_is_bounded_and_every_moment_of_it_is_right(lab, limit) -> None:
    stream, history = lab.Stream(3), History(**limit)
    view = View(history)
    batches = stream.take(300)
    states = states_of(batches)
    for number in range(10):
        feed(view, batches[30 * number : 30 * number + 30], 30 * number)
        assert len(history) <= limit.get("max_batches", 300)
        assert history.num_bytes <= limit.get("max_bytes", 1 << 30)
    track = history.freeze()
    assert len(track.batches) == len(history) >= 20
    past = ReplaySource(track, status=Status.HISTORY)
    past.start()
    player = past.player
    assert (past.view.status, player.position, player.playing) == (Status.HISTORY, player.length, False)
    positions = list(range(player.length + 1))
    random.Random(1).shuffle(positions)
    for position in positions:
        player.seek(position)
        seq = past.view.last_seq
        assert seq == 299 - (player.length - position)
        assert encode_state(past.view.state) == states[seq]
    past.close()
    assert past.view.findings == []


def test_what_is_long_ago_goes(lab) -> None:
    """A batch a second: of fifty seconds' memory, fifty batches are left, and what else is in their segment."""
    stream, history = lab.Stream(3), History(max_ns=50 * 10**9)
    view = View(history)
    batches = [msgspec.structs.replace(batch, time_ns=10**9 * second) for second, batch in enumerate(stream.take(300))]
    feed(view, batches)
    seqs = [seq for seq, _ in history.freeze().batches]
    assert seqs == list(range(seqs[0], 300))
    assert 50 <= len(seqs) <= 50 + 40
    assert len(seqs) == len(history)


def test_batches_are_kept_as_they_came_and_cleaned_again_when_looked_at(lab) -> None:
    stream, history = lab.Stream(3), History()
    view = View(history)
    batches = stream.take(40)
    feed(view, batches)
    track = history.freeze()
    assert [batch for _, batch in track.batches[5:10]] == batches[6:11]  # the first one began the memory
    event = RequestSubmitted(
        request_id="r9", prompt="\x1b]0;title", prompt_token_ids=[1], prompt_pieces=["\x1b"], params=SamplingParams()
    )
    hostile = msgspec.structs.replace(batches[-1], events=(event,))
    view.apply(40, decode_batch(encode_batch(hostile), printable=True).batch, payload=encode_batch(hostile))
    found = history.freeze().batches[-1][1].events[0]
    assert "\x1b" not in found.prompt + found.prompt_pieces[0]


def test_what_is_over_is_packed(lab, monkeypatch) -> None:
    """Packed batches, with more copies of the state, take a third less than the batches as they came."""
    batches, sizes = lab.Stream(3).take(600), []
    for num_events in (1_000, 1_000_000):
        monkeypatch.setattr(history_module, "SEGMENT_EVENTS", num_events)
        history = History()
        feed(View(history), copy.deepcopy(batches))
        sizes.append(history.num_bytes)
    assert sizes[0] < 0.7 * sizes[1]


@pytest.mark.parametrize("most", [0, 1 << 40])
def test_a_copy_of_a_state_is_the_same_packed_and_as_it_is(lab, monkeypatch, most) -> None:
    """With what a viewer saw of each block; a large one stays as it is, since to pack it takes too long."""
    monkeypatch.setattr(keyframe_module, "MAX_PACKED_TOKENS", most)
    stream = lab.Stream(3)
    state = EngineState()
    for batch in stream.take(300):
        state = apply_batch(state, receivable(copy.deepcopy(batch)))
        if batch is stream.batches[100]:
            state.trace()
    keyframe = Keyframe(state)
    packed = keyframe.packed()
    assert (packed is keyframe) == (most == 0)
    for _ in range(2):
        restored = packed.restore()
        assert restored == state
        assert (restored.traces.since_step, restored.traces.writes, restored.traces.hits) == (
            state.traces.since_step,
            state.traces.writes,
            state.traces.hits,
        )
        restored.ref_counts[0] += 1  # somebody's own
        restored.requests.clear()
    assert packed.epoch == state.epoch


def test_a_frozen_past_does_not_change(lab) -> None:
    stream, history = lab.Stream(3), History(max_batches=60)
    view = View(history)
    feed(view, stream.take(100))
    track = history.freeze()
    before = [seq for seq, _ in track.batches]
    feed(view, stream.take(100), 100)
    assert [seq for seq, _ in track.batches] == before
    assert history.freeze().batches[-1][0] == 199


def test_a_snapshot_in_between_is_part_of_the_past(lab) -> None:
    """Batches 50 to 79 were lost: the walk goes over the hole by the state that replaced them."""
    stream, history = lab.Stream(3), History()
    view = View(history)
    feed(view, stream.take(50))
    stream.take(30)
    view.replace_state(copy.deepcopy(stream.state), 79)
    feed(view, stream.take(20), 80)
    states = states_of(stream.batches)
    past = ReplaySource(history.freeze(), status=Status.HISTORY)
    past.start()
    seqs = []
    while past.player.step_back():
        seqs.append(past.view.last_seq)
        assert encode_state(past.view.state) == states[past.view.last_seq]
    assert seqs == [*range(98, 78, -1), *range(49, -1, -1)]
    past.close()


def test_another_life_begins_a_new_past(lab) -> None:
    stream, other, history = lab.Stream(3), lab.Stream(4), History()
    view = View(history)
    feed(view, stream.take(50))
    other.take(10)
    view.replace_state(copy.deepcopy(other.state), 9)
    assert len(history) == 0
    feed(view, other.take(5), 10)
    assert [seq for seq, _ in history.freeze().batches] == [10, 11, 12, 13, 14]


def test_a_client_keeps_what_it_was_sent(lab) -> None:
    """Over real sockets, with a late join: the past begins at the snapshot."""
    history = History()
    served = lab.serve()
    served.publish(20)
    served.drain()
    client = lab.attach(view=View(history))
    lab.wait_live(client, served)
    served.publish(40)
    lab.wait_live(client, served)
    assert [seq for seq, _ in history.freeze().batches] == list(range(20, 60))
    past = ReplaySource(history.freeze(), status=Status.HISTORY)
    past.start()
    past.player.seek_start()
    assert encode_state(past.view.state) == states_of(served.stream.batches)[19]
    past.close()


def test_snapshots_alone_do_not_exceed_the_bounds(lab) -> None:
    """A paused engine of a large pool, asked again and again."""
    stream, history = lab.Stream(3), History(max_bytes=20_000)
    view = View(history)
    feed(view, stream.take(30))
    for _ in range(200):
        view.replace_state(copy.deepcopy(stream.state), 29)
    assert history.num_bytes <= 20_000 + 2 * 20_000 / 16


def test_unreadable_events_of_the_past_are_counted_once(lab) -> None:
    """As they are met; all of them once everything has been looked at, as the audit does."""
    history = History()
    view = View(history)
    for seq, batch in enumerate(lab.Stream(3).take(60)):
        fields = msgpack.unpackb(encode_batch(batch))
        fields[4] += [{"type": "of_tomorrow"}] * (seq % 2)
        view.apply(seq, batch, seq % 2, payload=msgpack.packb(fields))
    source = ReplaySource(history.freeze(), status=Status.HISTORY)
    source.start()
    lab.wait_until(lambda: not source.player.survey.is_working)
    lab.wait_until(lambda: source.view.num_refused_events == view.num_refused_events)
    source.player.seek_start()
    source.player.seek_end()
    assert source.view.num_refused_events == view.num_refused_events == 30
    source.close()
