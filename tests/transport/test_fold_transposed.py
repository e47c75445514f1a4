"""A batch on its side folds to the state that its events fold to, and fails where they fail."""

import copy
import random
from itertools import chain

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvscope.events import fold as fold_module
from kvscope.events import transposed as transposed_module
from kvscope.events import types as ev
from kvscope.events.codec import encode_batch, encode_state
from kvscope.events.finder import Finder
from kvscope.events.fold import apply_batch
from kvscope.events.fold_transposed import apply_transposed, apply_watched
from kvscope.events.keyframe import Keyframe
from kvscope.events.state import EngineState, FoldError
from kvscope.events.transposed import read_transposed, transpose
from kvscope.events.types import Batch, Event

SAME_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


@pytest.fixture(autouse=True)
def every_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transposed_module, "MIN_GROUP", 1)


def outcome(fold, state: EngineState, batch: object) -> bytes | type[Exception]:
    """The state afterwards, or how it failed."""
    try:
        return encode_state(fold(state, batch))
    except Exception as error:
        return type(error)


@given(st.integers(0, 1 << 32), st.integers(1, 6), st.floats(0, 0.1))
@SAME_FIXTURE
def test_the_same_state_after_every_batch(make_stream, seed: int, together: int, lost: float) -> None:
    """Also where several batches are one, with long runs; and where events were lost, so that some do not fit.

    A finder that goes along from batch to batch, in both forms, never means another sequence than the state does.
    """
    rng, batches = random.Random(seed), make_stream(seed).take(60)
    plain, other = EngineState(), EngineState()
    plain.trace()
    other.trace()
    finder = Finder(other)
    for start in range(0, len(batches), together):
        part = batches[start : start + together]
        events = [event for event in chain(*[batch.events for batch in part]) if rng.random() >= lost]
        rng.random() < 0.5 and events.sort(key=lambda event: type(event).__name__ == "TokensGenerated")
        batch = msgspec.structs.replace(part[-1], events=tuple(events))
        data = transpose(encode_batch(batch))
        before = Keyframe(plain)
        found = outcome(apply_batch, plain, batch)
        if data is None or rng.random() < 0.2:
            assert outcome(lambda *given: apply_watched(*given, finder), other, batch) == found
        else:
            assert outcome(lambda *given: apply_transposed(*given, finder), other, read_transposed(data)) == found
        if not isinstance(found, bytes):
            return
        assert all(other.find(name) == known for name, known in finder.items())
        for name in ("ref_counts", "written_slots"):
            assert getattr(other, name).take_touched().tolist() == getattr(plain, name).take_touched().tolist()
        assert plain.traces
        assert other.traces
        assert (other.traces.writes, other.traces.hits) == (plain.traces.writes, plain.traces.hits)
        if data is not None:
            assert outcome(apply_transposed, before.restore(), read_transposed(data)) == found


def with_holders(stream, count: int) -> tuple[EngineState, list[str]]:
    """The first state of the stream in which so many sequences hold blocks, and their names."""
    state, holders = EngineState(), []
    while len(holders) < count:
        state = apply_batch(state, stream.next())
        sequences = [sequence for request in state.requests.values() for sequence in request.sequences]
        holders = [sequence.sequence_id for sequence in sequences if sequence.block_table]
    return state, holders


def test_runs_of_scores_lists_and_ranges_fold_too(make_stream) -> None:
    """What is out of the ordinary in a run of writes or tokens: several at once, none, with a score."""
    state, holders = with_holders(make_stream(1), 2)
    names = [sequence.sequence_id for request in state.requests.values() for sequence in request.sequences]
    events: list[Event] = [
        ev.SlotsWritten(sequence_id=name, start=0, stop=stop) for stop in (0, 1, 3) for name in holders
    ]
    for ids, score in (([1], None), ([1, 2], None), ([], None), ([3], -0.5)):
        events += [
            ev.TokensGenerated(sequence_id=name, token_ids=ids, pieces=["x"] * len(ids), text="x", score=score)
            for name in names
        ]
    for kept in (
        events,
        [event for event in events if getattr(event, "token_ids", [0]) == [1]],
        events[: len(holders)],
    ):
        batch = Batch(epoch=state.epoch, step=99, phase="commit", time_ns=10**10, events=tuple(kept))
        data = transpose(encode_batch(batch))
        assert data is not None
        assert outcome(apply_transposed, copy.deepcopy(state), read_transposed(data)) == outcome(
            apply_batch, copy.deepcopy(state), batch
        )


def test_a_sequence_that_begins_again_between_two_runs_is_another(make_stream) -> None:
    """The same names in both runs; what is said after the request came anew is said of its new sequences."""
    state, stream = EngineState(), make_stream(1)
    batches = stream.take(2)
    state = apply_batch(apply_batch(state, batches[0]), batches[1])
    [submitted] = batches[1].events
    assert isinstance(submitted, ev.RequestSubmitted)
    names = [sequence.sequence_id for sequence in state.request(submitted.request_id).sequences]
    tokens = [ev.TokensGenerated(sequence_id=name, token_ids=[1], pieces=["x"], text="x") for name in names]
    nothing = [ev.SlotsWritten(sequence_id=name, start=0, stop=0) for name in names]
    batch = Batch(
        epoch=state.epoch,
        step=9,
        phase="commit",
        time_ns=10**9,
        events=(*nothing, submitted, *tokens),
    )
    data = transpose(encode_batch(batch))
    assert data is not None
    folded = apply_transposed(copy.deepcopy(state), read_transposed(data))
    assert encode_state(folded) == encode_state(apply_batch(state, batch))
    assert all(folded.sequence(name).text == "x" for name in names)


def test_requests_that_come_anew_or_leave_are_not_found_as_they_were(
    make_stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ids, batch after batch: of a request that is submitted again, and of one that has left the state."""
    monkeypatch.setattr(fold_module, "MAX_FINISHED_REQUESTS", 1)
    state, stream = EngineState(), make_stream(1)
    batches = stream.take(2)
    state = apply_batch(apply_batch(state, batches[0]), batches[1])
    [submitted] = batches[1].events
    assert isinstance(submitted, ev.RequestSubmitted)
    name = f"{submitted.request_id}.0"
    said = ev.TokensGenerated(sequence_id=name, token_ids=[1], pieces=["x"], text="x")
    alias = msgspec.structs.replace(said, sequence_id=f"{submitted.request_id}.00")
    finished = ev.RequestFinished(request_id=submitted.request_id)
    finder = Finder(state)

    def fold(*events: Event) -> EngineState:
        batch = Batch(epoch=state.epoch, step=9, phase="commit", time_ns=10**9, events=events)
        data = transpose(encode_batch(batch))
        return apply_transposed(state, read_transposed(data), finder) if data else apply_watched(state, batch, finder)

    assert fold(said, alias).sequence(name).text == "xx"
    assert list(finder) == [name]
    assert fold(submitted, said).sequence(name).text == "x"
    assert fold(said).sequence(name).text == "xx"
    fold(finished)
    assert fold(said).sequence(name).text == "xxx"  # it has ended, but can still be read
    other = msgspec.structs.replace(submitted, request_id="other")
    fold(other, msgspec.structs.replace(finished, request_id="other"))
    with pytest.raises(FoldError, match="unknown sequence"):
        fold(said)


def test_one_long_write_among_many_short_ones(make_stream) -> None:
    """A prompt that is computed beside decoding sequences: what comes before and after it is folded from columns."""
    state, names = with_holders(make_stream(3), 3)
    far = 1 << 40
    for places in (
        [(0, 1), (0, 2), (1, 2)],
        [(0, 2), (1, 2), (0, 0)],
        [(1, 2), (0, 1), (0, 2)],
        [(0, 1), (0, 1), (far, far + 1)],
    ):
        writes = [
            ev.SlotsWritten(sequence_id=name, start=start, stop=stop)
            for name, (start, stop) in zip(names, places, strict=False)
        ]
        batch = Batch(epoch=state.epoch, step=99, phase="commit", time_ns=10**10, events=tuple(writes))
        data = transpose(encode_batch(batch))
        assert data is not None
        assert outcome(apply_transposed, copy.deepcopy(state), read_transposed(data)) == outcome(
            apply_batch, copy.deepcopy(state), batch
        )
