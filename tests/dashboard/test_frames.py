"""Frames: values copied out of a view, and the totals computed from them."""

import copy
import gc
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
from dashboard_story import (
    EPOCH,
    StoryEngine,
    article_batches,
    candidates_batches,
    crowded_engine,
    swapping_engine,
)
from hypothesis import given
from hypothesis import strategies as st

from kvscope.dashboard.column_copies import ColumnCopies
from kvscope.dashboard.copies import RequestFrame, SequenceFrame
from kvscope.dashboard.frames import FrameBuilder, RateMeter, build_frame
from kvscope.dashboard.owners import NOBODY, NUM_OWNER_COLOURS, SEVERAL, OwnerCodes, owner_code
from kvscope.dashboard.pool_frame import PoolCopy, build_pool, count_blocks
from kvscope.dashboard.pump import FramePump
from kvscope.events import types as ev
from kvscope.events.audit import Finding
from kvscope.events.columns import Column
from kvscope.events.fold import apply_event
from kvscope.events.state import FullState
from kvscope.events.types import Batch, SamplingParams
from kvscope.transport.source import ListSource


def view_of(batches):
    source = ListSource(batches)
    source.start()
    return source.view


def test_totals_of_the_article():
    pool = build_frame(view_of(article_batches()), FrameBuilder()).pool
    assert (pool.num_blocks, pool.num_held, pool.num_reserved_slots, pool.num_written_slots) == (6, 4, 16, 12)
    assert (pool.num_wasted_slots, pool.num_shared, pool.num_saved, pool.num_cached) == (4, 0, 0, 0)


def test_sharing_is_counted_in_blocks():
    pool = build_frame(view_of(candidates_batches(1)), FrameBuilder()).pool
    assert (pool.num_held, pool.num_shared, pool.num_saved) == (2, 2, 2)
    pool = build_frame(view_of(candidates_batches(2)), FrameBuilder()).pool
    assert (pool.num_held, pool.num_shared, pool.num_saved) == (3, 1, 1)


def test_totals_agree_with_a_plain_count_at_every_step():
    engine, batches = crowded_engine()
    source = ListSource(batches)
    source.start()
    for _ in range(60):
        source.feed(engine.step())
        pool = build_frame(source.view, FrameBuilder()).pool
        state = source.view.state
        held = [block_id for block_id, refs in enumerate(state.ref_counts) if refs]
        assert pool.num_held == len(held)
        assert pool.num_shared == sum(refs > 1 for refs in state.ref_counts)
        assert pool.num_written_slots == sum(state.written_slots[block_id] for block_id in held)
    assert source.view.findings == []


def test_the_cycle_collector_has_nothing_to_look_at_in_the_tables_of_a_frame():
    """Of a tuple it looks at every number, and a pool of a million blocks has as many in its tables."""
    engine, batches = crowded_engine()
    source = ListSource(batches + engine.run(5))
    source.start()
    requests = build_frame(source.view, FrameBuilder()).requests
    tables = [sequence.table for request in requests for sequence in request.sequences if sequence.table]
    assert tables
    assert not any(isinstance(seen, int) for table in tables for seen in gc.get_referents(table))


def test_cached_blocks_are_neither_held_nor_waste():
    pool = build_pool(4, (0, 0, 1), (0, 3, 2), ())
    assert (pool.num_cached, pool.num_held, pool.num_written_slots, pool.num_wasted_slots) == (1, 1, 2, 2)


def test_a_frame_does_not_change_when_the_state_does():
    engine, batches = crowded_engine()
    source = ListSource(batches + engine.step())
    source.start()
    frame = build_frame(source.view, FrameBuilder())
    before = repr(frame)
    source.feed(engine.run(5))
    assert repr(frame) == before


def holding(name: str, *tables: tuple[int, ...]) -> RequestFrame:
    sequences = [SequenceFrame(f"{name}.{place}", table, 0, (), 0, "", 0, None) for place, table in enumerate(tables)]
    return RequestFrame(name, "", "running", None, 0, SamplingParams(), tuple(sequences), owner_code(name))


TABLES = st.lists(st.sampled_from([(), (0,), (1,), (0, 1), (2, 1), (0, 1, 2)]), max_size=2)


@given(st.lists(st.fixed_dictionaries({}, optional={"r1": TABLES, "r2": TABLES, "r9": TABLES}), max_size=6))
def test_colours_follow_tables_block_by_block(moments):
    codes = OwnerCodes()
    for tables in moments:
        requests = [holding(name, *own) for name, own in tables.items()]
        assert codes.update(3, requests).tolist() == OwnerCodes().update(3, requests).tolist()


def test_owner_colours_are_stable_and_shared_between_requests_is_its_own():
    assert owner_code("r1") == 1
    assert owner_code(f"r{NUM_OWNER_COLOURS + 1}") == 1
    assert owner_code("a-name") == owner_code("a-name")
    assert 1 <= owner_code("a-name") <= NUM_OWNER_COLOURS

    pool = build_pool(4, (1, 2, 0, 1), (4, 4, 0, 1), [holding("r1", (0, 1)), holding("r2", (1, 3))])
    assert list(pool.owners) == [1, SEVERAL, NOBODY, 2]


WRITES = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from([0, 1, 3, 4])), max_size=6)
LOOKS = st.lists(
    st.tuples(WRITES, st.sampled_from(["look", "look", "somebody else looks", "another pool"])), max_size=8
)


@given(LOOKS)
def test_totals_of_what_was_touched_are_those_of_the_whole_pool(looks):
    """Handed-out arrays stay as they were; others who look, and other pools, do no harm."""
    columns, ours, handed_out = [Column.zeros(6), Column.zeros(6)], PoolCopy(), []
    for writes, kind in looks:
        if kind == "another pool":
            columns = [Column(column[::-1]) for column in columns]
        for is_written, place, value in writes:
            columns[is_written][place], columns[is_written].touched[place] = value, 1
        if kind == "somebody else looks":
            PoolCopy().update(*columns)
            continue
        ours.update(*columns)
        assert (ours.refs.tolist(), ours.written.tolist()) == tuple(column.tolist() for column in columns)
        assert ours.totals == count_blocks(ours.refs, ours.written)
        handed_out.append((ours.refs, ours.written, columns[0].tolist(), columns[1].tolist()))
        assert all((refs.tolist(), written.tolist()) == (a, b) for refs, written, a, b in handed_out)


CHANGES = st.lists(st.tuples(st.lists(st.integers(0, 63), max_size=4), st.sampled_from(["drop", "keep", "a part"])))


@given(CHANGES)
def test_a_copy_is_written_again_only_when_nobody_holds_any_of_it(changes):
    column, copies, held = np.zeros(64, np.int32), ColumnCopies(), []
    for number, (places, fate) in enumerate(changes, 1):
        column[places] = number
        taken = copies.take(column, np.array(places, np.intp) if number % 7 else None)
        assert taken.tolist() == column.tolist()
        if fate != "drop":
            held.append((part := taken if fate == "keep" else taken[5:40], part.tolist()))
        taken = part = None
        assert all(part.tolist() == said for part, said in held)


def test_a_copy_that_nobody_holds_is_brought_up_to_date():
    column, copies, one = np.zeros(64, np.int32), ColumnCopies(), np.array([1])
    first = copies.take(column)
    address = first.__array_interface__["data"]
    assert copies.take(column, one).__array_interface__["data"] != address
    del first
    held = copies.take(column, one), copies.take(column, one)
    assert address in [array.__array_interface__["data"] for array in held]


@pytest.mark.parametrize("jump", ["nothing", "a moment", "half a batch", "a snapshot", "another life", "a full state"])
def test_requests_that_nothing_happened_to_are_those_of_the_last_frame(jump):
    engine, batches = crowded_engine()
    source, builder = ListSource(batches + engine.run(5)), FrameBuilder()
    source.start()
    view, before = source.view, build_frame(source.view, builder)
    batch, seq = Batch(epoch=EPOCH, step=99, phase="commit", time_ns=10**12, events=()), view.last_seq
    running = next(request for request in before.requests if request.status == "running")
    said = ev.TokensGenerated(sequence_id=f"{running.request_id}.0", token_ids=[1], pieces=["!"], text="!")
    state = copy.deepcopy(view.state)
    apply_event(state, said)
    if jump == "nothing":
        view.apply(seq + 1, msgspec.structs.replace(batch, events=(said,)))
    elif jump == "a moment":
        apply_event(view.state, said)
        view.show_moment(view.state, seq, ())
    elif jump == "half a batch":
        view.advance(seq + 1, msgspec.structs.replace(batch, events=(said, said)), 0, 1)
    elif jump == "a full state":
        view.apply(seq + 1, msgspec.structs.replace(batch, events=(FullState(state=state),)))
    else:
        view.replace_state(msgspec.structs.replace(state, epoch=EPOCH if jump == "a snapshot" else b"other"), seq)
    after, fresh = build_frame(view, builder), build_frame(view, FrameBuilder())
    assert after.request(running.request_id).sequences[0].text.endswith("!")
    assert repr(after.requests) == repr(fresh.requests)
    is_same = [a is b for a, b in zip(before.requests, after.requests, strict=True)]
    assert is_same.count(False) == 1


@pytest.mark.parametrize("look_often", [False, True])
@pytest.mark.parametrize("make", [crowded_engine, swapping_engine])
def test_frames_built_one_after_the_other_equal_those_built_afresh(make, look_often):
    engine, batches = make()
    source, builder = ListSource(batches), FrameBuilder()
    source.start()
    build_frame(source.view, builder)
    for number in range(60):
        source.feed(engine.step())
        if look_often or number % 7 == 0:
            build_frame(source.view, builder)
    whole = build_frame(source.view, builder), build_frame(source.view, FrameBuilder())
    told = [repr(frame._replace(tokens_per_s=None, pool=frame.pool._replace(changes=None))) for frame in whole]
    assert told[0] == told[1]


def plain_owners(frame) -> list[int]:
    """One block after the other, without arithmetic."""
    found: list[set[str]] = [set() for _ in range(frame.pool.num_blocks)]
    for request in frame.requests:
        for block_id in (block_id for sequence in request.sequences for block_id in sequence.table):
            found[block_id].add(request.request_id)
    return [NOBODY if not ids else SEVERAL if len(ids) > 1 else owner_code(next(iter(ids))) for ids in found]


@pytest.mark.parametrize("story", ["preemption", "copy-on-write"])
def test_remembered_colours_equal_those_computed_afresh(story):
    engine, batches = crowded_engine()
    later = engine.run(80) if story == "preemption" else candidates_batches(8)
    source = ListSource(batches if story == "preemption" else [])
    source.start()
    builder, asked_later = FrameBuilder(), []
    for number, batch in enumerate(later):
        source.feed([batch])
        frame = build_frame(source.view, builder)
        if number % 3:
            asked_later.append(frame)
            continue
        fresh = OwnerCodes().update(frame.pool.num_blocks, frame.requests)
        assert frame.pool.owners[:].tolist() == fresh.tolist() == plain_owners(frame)
        assert repr(frame.requests) == repr(build_frame(source.view, FrameBuilder()).requests)  # copied or remembered
    for frame in asked_later:
        assert frame.pool.owners[:].tolist() == plain_owners(frame)
        holders = [frame.holders(block_id) for block_id in range(frame.pool.num_blocks)]
        assert holders == plain_holders(frame)
        assert list(map(frame.owner_of, holders)) == plain_owners(frame)


def plain_holders(frame) -> list[list[tuple[str, int]]]:
    sequences = [sequence for request in frame.requests for sequence in request.sequences]
    return [
        [
            (sequence.sequence_id, list(sequence.table).index(block_id))
            for sequence in sequences
            if block_id in sequence.table
        ]
        for block_id in range(frame.pool.num_blocks)
    ]


def test_holders_are_found_wherever_their_requests_are():
    """The first, the last, and one in the middle, of two hundred."""
    requests = tuple(holding(f"r{number}", (0,) if number in (1, 90, 200) else (number,)) for number in range(1, 201))
    frame = build_frame(ListSource().view, FrameBuilder())
    frame = frame._replace(requests=requests, pool=build_pool(4, [3, *[1] * 200], [4] * 201, requests))
    assert frame.holders(0) == [("r1.0", 0), ("r90.0", 0), ("r200.0", 0)]
    assert all(frame.holders(number) == [(f"r{number}.0", 0)] for number in range(2, 200) if number != 90)


def test_a_ref_count_that_is_known_to_be_wrong_hides_no_holder():
    source = ListSource(candidates_batches(4))
    source.start()
    frame = build_frame(source.view, FrameBuilder())
    (shared, *_) = np.flatnonzero(frame.pool.refs > 1)
    frame = frame._replace(pool=frame.pool._replace(refs=np.zeros_like(frame.pool.refs)))
    assert not frame.holders(shared)
    assert len(frame._replace(findings=(Finding(1, "wrong", 1),)).holders(shared)) == 2


def test_tokens_per_second_is_over_event_time():
    meter = RateMeter()
    assert meter.observe(EPOCH, 0, 0) is None
    assert meter.observe(EPOCH, 1_000_000_000, 40) == pytest.approx(40)
    assert meter.observe(EPOCH, 2_000_000_000, 40) == pytest.approx(20)


def test_the_rate_starts_over_when_time_runs_backwards_or_the_engine_is_new():
    meter = RateMeter()
    meter.observe(EPOCH, 5_000_000_000, 100)
    assert meter.observe(EPOCH, 1_000_000_000, 10) is None
    meter.observe(EPOCH, 2_000_000_000, 20)
    assert meter.observe(b"another-life", 3_000_000_000, 30) is None


def test_an_idle_engine_has_no_rate():
    engine = StoryEngine(6, 4)
    assert build_frame(view_of(engine.start()), FrameBuilder()).tokens_per_s is None


def test_the_pump_posts_only_when_something_changed_and_one_frame_at_a_time():
    source = ListSource(article_batches())
    source.start()
    frames, arrived = [], threading.Event()

    def post(frame) -> bool:
        frames.append(frame)
        arrived.set()
        return True

    pump = FramePump(source.view, post, fps=500)
    pump.start()
    assert arrived.wait(5)
    arrived.clear()
    engine_view = source.view
    engine_view.set_status(engine_view.status, "more")  # a change while the first frame is not yet drawn
    assert not arrived.wait(0.05)
    pump.shown()
    assert arrived.wait(5)
    pump.shown()
    arrived.clear()
    assert not arrived.wait(0.05)  # nothing has changed since
    pump.close()
    assert [frame.status_detail for frame in frames] == ["", "more"]


def test_the_pump_builds_nothing_while_there_is_no_room():
    source, frames, waiting, asked = ListSource(article_batches()), [], [], threading.Event()
    source.start()

    def has_room(callback) -> bool:
        waiting.append(callback)
        asked.set()
        return False

    arrived = threading.Event()
    pump = FramePump(source.view, lambda frame: frames.append(frame) or arrived.set() or True, 500, has_room)
    pump.start()
    assert asked.wait(5)
    source.view.set_status(source.view.status, "newer")
    assert not arrived.wait(0.05)
    waiting[0]()
    assert arrived.wait(5)
    asked.clear()
    pump.close()
    assert [frame.status_detail for frame in frames] == ["newer"]  # what is there when there is room


def test_the_dashboard_never_loads_torch():
    code = (
        "import sys, kvscope.dashboard.app\n"
        "bad = [m for m in ('torch', 'triton', 'transformers', 'kvscope.engine') if m in sys.modules]\n"
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_frame_that_cannot_be_built_is_told_and_the_last(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr("kvscope.dashboard.pump.build_frame", broken)
    posted, arrived = [], threading.Event()
    pump = FramePump(view_of(article_batches()), lambda frame: posted.append(frame) or arrived.set() or True, fps=200)
    pump.start()
    assert arrived.wait(10)
    pump.close()
    assert [type(frame) for frame in posted] == [ZeroDivisionError]


def test_a_silence_is_no_slow_work():
    """40 tokens a second, ten idle minutes, 40 tokens a second again."""
    engine, batches = crowded_engine()
    source, builder = ListSource(batches + engine.run(60)), FrameBuilder()
    source.start()
    assert build_frame(source.view, builder).tokens_per_s is None
    builder.meter.observe(EPOCH, 0, 0)
    assert builder.meter.observe(EPOCH, 10**9, 40) == pytest.approx(40)
    builder.meter.forget()
    assert builder.meter.observe(EPOCH, 600 * 10**9, 41) is None
    assert builder.meter.observe(EPOCH, 601 * 10**9, 81) == pytest.approx(40)


def test_an_idle_engine_makes_the_meter_forget():
    engine, batches = crowded_engine()
    source, builder = ListSource(batches), FrameBuilder()
    source.start()
    had_rate = False
    while builder.meter.length or not had_rate:
        source.feed(engine.step())
        had_rate |= build_frame(source.view, builder).tokens_per_s is not None
        assert source.view.state.step < 200
    assert build_frame(source.view, builder).tokens_per_s is None
    assert not builder.meter.length
