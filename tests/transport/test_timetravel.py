"""Any moment of a recording, reached in any way, is the moment a straight fold reaches."""

import copy
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvscope.events import types as ev
from kvscope.events.codec import encode_state
from kvscope.events.columns import Column
from kvscope.events.fold import begin_batch
from kvscope.events.keyframe import Keyframe
from kvscope.events.notable import notable
from kvscope.events.state import EngineState, FullState, RequestState, SequenceState
from kvscope.events.types import Batch
from kvscope.transport.healing import receivable
from kvscope.transport.recording import Player, Recording
from kvscope.transport.source import LogEntry, View, tell
from kvscope.transport.timetravel import Place
from kvscope.transport.timetravel import keyframes as keyframes_module
from kvscope.transport.timetravel.keyframes import Keyframes
from kvscope.transport.timetravel.survey import Survey, held_after
from kvscope.transport.timetravel.track import TrackIndex
from kvscope.transport.timetravel.watch import changes_block

NUM_BATCHES = 400


class SeenPlainly:
    """What was seen of each block, from the events one by one: steps of last writes, and hits; of a moment a copy."""

    def __init__(self) -> None:
        self.writes: dict[int, int] = {}
        self.hits: dict[int, int] = {}

    def see(self, event: ev.Event, state: EngineState) -> None:
        """`state` is the one after the event."""
        match event:
            case ev.EngineStarted() | FullState():
                self.writes, self.hits = {}, {}
            case ev.BlocksAllocated(block_ids=blocks):
                self._forget(blocks)
            case ev.BlocksReused(block_ids=blocks):
                self.hits |= {block_id: self.hits.get(block_id, 0) + 1 for block_id in blocks}
            case ev.BlocksSwappedIn(block_ids=blocks):
                self._forget(blocks)
                self.writes |= dict.fromkeys(blocks, state.step)
            case ev.BlockCopied(target_block=block_id):
                self._forget([block_id])
                self.writes[block_id] = state.step
            case ev.SlotsWritten(sequence_id=name, start=start, stop=stop):
                size, sequence = state.info.block_size, state.sequence(name)
                places = {at // size - sequence.num_released for at in range(start, stop)}
                written = [sequence.block_table[place] for place in places]
                self.writes |= dict.fromkeys(written, state.step)

    def _forget(self, blocks: list[int]) -> None:
        for block_id in blocks:
            self.writes.pop(block_id, None)
            self.hits.pop(block_id, None)


def seen_by(state: EngineState) -> tuple[dict[int, int], dict[int, int]]:
    """The same of a state's own traces."""
    traces = state.traces
    writes = {block: traces.since_step - 1 + stamp for block, stamp in enumerate(traces.writes) if stamp}
    return writes, {block: hits for block, hits in enumerate(traces.hits) if hits}


class Moments:
    """Every moment of a stream by a straight fold: the state's hash, and how many lines the log has then."""

    def __init__(self, batches: list[Batch]) -> None:
        self.hashes: dict[Place, str] = {}
        self.seen: dict[Place, tuple[dict[int, int], dict[int, int]]] = {}
        self.plain = SeenPlainly()
        self.num_lines: dict[Place, int] = {}
        self.log: list[LogEntry] = []
        self.notable: list[Place] = []
        state = EngineState()
        self._keep(Place(0), state)
        for position, whole in enumerate(batches):
            batch = receivable(copy.deepcopy(whole))
            begin_batch(state, batch)
            for event in range(1, len(batch.events) + 1):
                state, entries = tell(state, position, batch, event - 1, event)
                self.log += entries
                self.plain.see(batch.events[event - 1], state)
                place = Place(position, event) if event < len(batch.events) else Place(position + 1)
                self._keep(place, state)
                if notable(batch.events[event - 1]) is not None:
                    self.notable.append(place)
            self._keep(Place(position + 1), state)

    def _keep(self, place: Place, state: EngineState) -> None:
        self.hashes[place], self.num_lines[place] = digest(state), len(self.log)
        self.seen[place] = dict(self.plain.writes), dict(self.plain.hits)


def digest(state: EngineState) -> str:
    return hashlib.sha256(encode_state(state)).hexdigest()


@pytest.fixture(scope="module")
def stream(make_stream):
    made = make_stream(11)
    made.take(NUM_BATCHES // 2)
    made.full_state(2)
    made.take(NUM_BATCHES // 2 - 1)
    return made


@pytest.fixture(scope="module")
def moments(stream) -> Moments:
    return Moments(stream.batches)


@pytest.fixture
def few_keyframes(monkeypatch) -> None:
    """So sparse and with so short a tail that a small stream needs all of it."""
    monkeypatch.setattr(keyframes_module, "MIN_SPACING_EVENTS", 50)
    monkeypatch.setattr("kvscope.transport.timetravel.walker.TRAIL_EVENTS", (60, 20, 5))
    monkeypatch.setattr("kvscope.transport.timetravel.walker.TAIL_EVENTS", 40)
    monkeypatch.setattr("kvscope.transport.timetravel.walker.MIN_TAIL_EVENTS", 20)
    for module in ("source", "timetravel.walker"):
        monkeypatch.setattr(f"kvscope.transport.{module}.MAX_LOG_ENTRIES", 120)


@pytest.fixture
def player(stream, few_keyframes) -> Iterator[Player]:
    view = View()
    made = Player(Recording(Path("run.mcap"), list(enumerate(stream.batches))), view)
    made.view = view
    made.start()
    made.pause()
    made.seek_start()
    yield made
    made.close()


def check(player: Player, moments: Moments) -> None:
    """State and log of the moment on show."""
    place, view = player.place, player.view
    assert digest(view.state) == moments.hashes[place], place
    assert seen_by(view.state) == moments.seen[place], place
    straight = moments.log[: moments.num_lines[place]]
    log = list(view.log)
    assert log == straight[len(straight) - len(log) :], place
    assert len(log) >= min(10, len(straight)), place
    assert view.last_seq == (place.position if place.event else place.position - 1 if place.position else None)


def test_every_position_by_seek(player: Player, moments: Moments) -> None:
    order = list(range(len(player.index) + 1))
    random.Random(2).shuffle(order)
    for position in order:
        player.seek(position)
        assert player.place == Place(position)
        check(player, moments)


@pytest.mark.parametrize("seed", range(6))
def test_random_walks(player: Player, moments: Moments, seed: int) -> None:
    rng = random.Random(seed)
    places = sorted(moments.hashes)
    moves = [
        player.step_forward, player.step_back, player.event_forward, player.event_back, player.engine_step_forward,
        player.engine_step_back, player.next_notable, player.previous_notable,
        lambda: player.seek(*rng.choice(places)), lambda: player.seek_step(rng.randrange(NUM_BATCHES // 2)),
    ]  # fmt: skip
    for _ in range(150):
        for _ in range(rng.choice((1, 1, 2, 7))):
            rng.choice(moves)()
        check(player, moments)


def test_events_one_by_one_there_and_back(player: Player, moments: Moments) -> None:
    places = [player.place]
    while player.event_forward():
        places.append(player.place)
        assert digest(player.view.state) == moments.hashes[player.place]
    assert places[-1] == Place(NUM_BATCHES)
    back = [player.place]
    while player.event_back():
        back.append(player.place)
        assert digest(player.view.state) == moments.hashes[player.place]
    assert back == places[::-1]


def test_engine_steps(player: Player, stream) -> None:
    ends = []
    while player.engine_step_forward():
        ends.append(player.position)
        assert player.view.state.step == stream.batches[player.position - 1].step
        assert player.position == NUM_BATCHES or stream.batches[player.position].step > player.view.state.step
    back = []
    while player.engine_step_back():
        back.append(player.position)
    assert back == [*ends[-2::-1], 0]
    player.seek_step(17)
    assert (player.view.state.step, stream.batches[player.position].step) == (17, 18)
    player.seek_time(stream.batches[40].time_ns)
    assert player.position == 41


def test_notable_moments_show_the_event(player: Player, moments: Moments) -> None:
    assert len(moments.notable) > 10
    for expected in moments.notable:
        assert player.next_notable()
        assert player.place == expected
        kinds = [type(entry.event) for entry in player.view.log]
        assert kinds[-1] in (ev.BlockCopied, ev.BatchesDropped)
    assert not player.next_notable()
    player.seek_end()
    for expected in reversed(moments.notable):
        assert player.previous_notable()
        assert player.place == expected
    assert not player.previous_notable()


def test_playing_goes_on_from_a_begun_batch(lab, player: Player, moments: Moments) -> None:
    begun = next(place for place in moments.hashes if place.event and place.position > 300)
    player.seek(*begun)
    player.speed = 100.0
    player.play()
    lab.wait_until(lambda: not player.playing)
    assert player.position == player.length
    check(player, moments)


def test_a_keyframe_shares_nothing_that_changes(stream) -> None:
    state = EngineState()
    for position, batch in enumerate(stream.batches):
        begin_batch(state, batch)
        before, expected = Keyframe(state), digest(state)
        state, _ = tell(state, position, receivable(copy.deepcopy(batch)))
        restored = before.restore()
        assert digest(restored) == expected
        for values in (restored.ref_counts, restored.written_slots, restored.finished_order):
            values.append(1)
        for request in restored.requests.values():
            request.status = "changed"
            for sequence in request.sequences:
                sequence.text = "changed"
                for values in (sequence.block_table, sequence.token_ids, sequence.pieces):
                    values.append(1)
        assert digest(before.restore()) == expected


def test_a_keyframe_holds_any_number() -> None:
    state = EngineState(ref_counts=Column([0, 300, 1]), written_slots=Column([0, 1 << 30, -4]))
    assert Keyframe(state).restore() == state


def test_keyframes_are_few_and_evenly_spread() -> None:
    events_before = range(0, 1_000_001, 10)
    kept = Keyframes(events_before, max_count=64, max_bytes=0, spacing=1024)
    for position in range(1, len(events_before)):
        kept.offer(position, EngineState(ref_counts=Column([0])))
    assert 32 <= len(kept) <= 64
    positions = [kept.nearest(position)[0] for position in range(10_000, len(events_before), 100)]
    farthest = max(
        position - found for position, found in zip(range(10_000, len(events_before), 100), positions, strict=True)
    )
    assert farthest * 10 <= 2 * 1_000_000 / 32
    assert kept.nearest(10) is None


def test_small_keyframes_may_be_many() -> None:
    events_before = range(0, 1_000_001, 10)
    kept = Keyframes(events_before, max_count=8, max_bytes=30_000, spacing=1000)
    for position in range(1, len(events_before)):
        kept.offer(position, EngineState(ref_counts=Column.zeros(1000)))
    assert 15 <= len(kept) <= 30


def test_the_survey_measures_and_marks(stream, moments: Moments) -> None:
    track = Recording(Path("run.mcap"), list(enumerate(stream.batches)))
    index = TrackIndex(track)
    survey = Survey(track, index, Keyframes(index.events_before))
    survey.run()
    state = EngineState()
    for position, batch in enumerate(stream.batches):
        state, _ = tell(state, position, receivable(batch))
        assert survey.held[position] == len(state.ref_counts) - state.ref_counts.count(0)
    marked = {position for position, kind in enumerate(survey.kinds) if kind}
    assert marked == {place.position - (place.event == 0) for place in moments.notable}
    assert survey.findings == []
    assert survey.num_audited == NUM_BATCHES


def test_findings_belong_to_their_moment(lab, stream) -> None:
    """A planted fault: from that batch on the finding is there, before it is not."""
    batches = list(enumerate(stream.batches[:60]))
    fault = ev.AuditFinding(rule=3, message="planted")
    seq, batch = batches[40]
    batches[40] = (seq, msgspec.structs.replace(batch, events=(*batch.events, fault)))
    view = View()
    player = Player(Recording(Path("run.mcap"), batches), view)
    player.start()
    player.pause()
    lab.wait_until(lambda: player.survey.num_audited == 60)
    player.seek(40)
    assert view.findings == []
    player.seek(41)
    assert [finding.message for finding in view.findings] == ["planted"]
    player.step_back()
    assert view.findings == []
    player.close()


def test_held_after_reuse_and_eviction() -> None:
    state = EngineState(ref_counts=Column([1, 2, 0]), written_slots=Column([4, 4, 0]))
    reused = ev.BlocksReused(sequence_id="r1.0", block_ids=[0, 1], num_tokens=8)
    assert held_after(1, state, reused) == 2


def test_watchpoints_find_the_last_change_of_a_block(player: Player, stream) -> None:
    """Against every block's ref count, written slots and holders at every moment of a straight fold."""
    block_ids, state = range(12), EngineState()
    seen: dict[int, list[Place]] = {block_id: [] for block_id in block_ids}
    released: dict[int, list[Place]] = {block_id: [] for block_id in block_ids}

    def look(block_id: int) -> tuple[object, ...]:
        return (
            *state.ref_counts[block_id : block_id + 1],
            *state.written_slots[block_id : block_id + 1],
            *state.holders(block_id),
        )

    for position, whole in enumerate(stream.batches):
        batch = receivable(copy.deepcopy(whole))
        begin_batch(state, batch)
        for number, event in enumerate(batch.events, 1):
            before = [look(block_id) for block_id in block_ids]
            state, _ = tell(state, position, batch, number - 1, number)
            place = Place(position, number) if number < len(batch.events) else Place(position + 1)
            for block_id in block_ids:
                if look(block_id) != before[block_id] or isinstance(event, FullState):
                    seen[block_id].append(place)
                if look(block_id)[0] < (before[block_id] or (0,))[0]:
                    released[block_id].append(place)
    rng = random.Random(5)
    for _ in range(60):
        here, block_id = Place(rng.randrange(NUM_BATCHES + 1)), rng.choice(block_ids)
        for look_back, places in ((player.back_to_block_change, seen), (player.back_to_block_release, released)):
            player.seek(*here)
            expected = [place for place in places[block_id] if place < here]
            for place in reversed(expected[-4:]):
                assert look_back(block_id)
                assert player.place == place
            if len(expected) <= 4:
                assert not look_back(block_id)


def test_watchpoints_of_a_request(player: Player, stream) -> None:
    player.seek_end()
    assert player.back_to_admission("r3")
    assert player.view.log[-1].sentence == "r3 admitted"
    assert not player.back_to_preemption("r3")
    assert player.view.log[-1].sentence == "r3 admitted"


def test_a_write_beside_a_block_does_not_change_it(stream) -> None:
    """The block is L1 of r9.0, four slots to a block: positions 4 to 7."""
    info = stream.batches[0].events[0].info
    sequence = SequenceState(sequence_id="r9.0", block_table=[2, 5, 3])
    request = RequestState(
        request_id="r9",
        prompt="",
        prompt_token_ids=[],
        prompt_pieces=[],
        params=ev.SamplingParams(),
        sequences=[sequence],
    )
    matches, _ = changes_block(5, EngineState(info=info, requests={"r9": request}))
    for start, stop, expected in ((0, 4, False), (3, 5, True), (7, 8, True), (8, 9, False), (0, 12, True)):
        assert matches(ev.SlotsWritten(sequence_id="r9.0", start=start, stop=stop)) is expected
    assert not matches(ev.SlotsWritten(sequence_id="r8.0", start=4, stop=8))
    assert matches(ev.BlocksEvicted(block_ids=[1, 5], for_sequence_id="r1.0"))
