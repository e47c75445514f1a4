"""Blocks that fell out of a sliding window: the table keeps its logical numbers in fold, audit and words."""

from collections.abc import Callable

import msgspec
import pytest

from kvscope.events import transposed
from kvscope.events import types as ev
from kvscope.events.audit import Auditor
from kvscope.events.codec import DecodeError, decode_state, encode_batch, encode_state
from kvscope.events.describe import describe
from kvscope.events.fold_transposed import apply_transposed
from kvscope.events.keyframe import Keyframe
from kvscope.events.state import FoldError
from kvscope.events.types import Batch, Event

MakeBatch = Callable[..., Batch]

ALLOCATED = ev.BlocksAllocated(sequence_id="r1.0", first_logical_block=0, block_ids=[5, 2, 4])
WRITTEN = ev.SlotsWritten(sequence_id="r1.0", start=0, stop=9)
GONE = ev.BlocksOutOfWindow(sequence_id="r1.0", first_logical_block=0, block_ids=[5], freed_block_ids=[5])
SHARED = ev.BlocksShared(sequence_id="r1.1", from_sequence_id="r1.0", block_ids=[2, 4])


@pytest.fixture
def window(pool: Auditor) -> Auditor:
    """A pool whose model looks back 5 positions: a token at position 9 reads from 5 on, so L0 may go."""
    assert pool.state.info is not None
    pool.state.info = msgspec.structs.replace(pool.state.info, sliding_window=5)
    return pool


def observe(pool: Auditor, batch_of: MakeBatch, *events: Event) -> list[tuple[int, str]]:
    return [finding[:2] for event in events for finding in pool.observe(batch_of(event))]


def test_what_is_left_keeps_its_logical_numbers(window: Auditor, batch_of: MakeBatch) -> None:
    assert observe(window, batch_of, ALLOCATED, WRITTEN, GONE) == []
    state, sequence = window.state, window.state.sequence("r1.0")
    assert (sequence.num_released, sequence.block_table, sequence.num_written) == (1, [2, 4], 9)
    assert (state.ref_counts[5], state.written_slots[5], state.num_free_blocks()) == (0, 0, 4)
    assert state.holders(4) == [("r1.0", 2)]
    assert [sequence.blocks(0, 2), sequence.blocks(1, 3), sequence.blocks(2, 9)] == [[2], [2, 4], [4]]

    grown = ev.BlocksAllocated(sequence_id="r1.0", first_logical_block=3, block_ids=[5])
    assert observe(window, batch_of, grown, ev.SlotsWritten(sequence_id="r1.0", start=9, stop=13)) == []
    assert list(state.written_slots) == [0, 0, 4, 0, 4, 1]
    wrote = ev.SlotsWritten(sequence_id="r1.0", start=13, stop=14)
    assert describe(wrote, state) == "r1.0 wrote position 13 (P5 slot 1)"


def test_a_fork_takes_over_what_is_left(window: Auditor, batch_of: MakeBatch) -> None:
    copied = ev.BlockCopied(sequence_id="r1.1", logical_block=2, source_block=4, target_block=0, num_slots=1)
    assert observe(window, batch_of, ALLOCATED, WRITTEN, GONE, SHARED, copied) == []
    child = window.state.sequence("r1.1")
    assert (child.num_released, child.block_table, child.num_written) == (1, [2, 0], 9)
    released = ev.BlocksReleased(sequence_id="r1.1", block_ids=[2, 0], freed_block_ids=[0])
    assert observe(window, batch_of, released) == []
    assert (child.num_released, child.num_written) == (0, 0)


def test_a_swap_keeps_the_logical_numbers(window: Auditor, batch_of: MakeBatch) -> None:
    state = window.state
    state.host_ref_counts = [0, 0, 0]
    out = ev.BlocksSwappedOut(
        sequence_id="r1.0", block_ids=[2, 4], host_block_ids=[1, 0], freed_block_ids=[2, 4], cached_block_ids=[]
    )
    back = ev.BlocksSwappedIn(sequence_id="r1.0", host_block_ids=[1, 0], block_ids=[0, 3])
    preempted = ev.RequestPreempted(
        request_id="r1", for_request_id="r2", blocks_needed=1, blocks_gained=2, tokens_lost=0
    )
    assert observe(window, batch_of, ALLOCATED, WRITTEN, GONE) == []
    assert window.observe(batch_of(preempted, out)) == []
    assert window.observe(batch_of(ev.RequestAdmitted(request_id="r1"), back)) == []
    sequence = state.sequence("r1.0")
    assert (sequence.num_released, sequence.block_table, sequence.num_written) == (1, [0, 3], 9)
    assert (state.written_slots[0], state.written_slots[3]) == (4, 1)


BROKEN: dict[str, tuple[int, str, Event]] = {
    "still read": (
        4,
        "gives up positions to 7, its next token reads from 5 on",
        ev.BlocksOutOfWindow(sequence_id="r1.0", first_logical_block=0, block_ids=[5, 2], freed_block_ids=[5, 2]),
    ),
    "not freed": (1, "reach ref count 0", msgspec.structs.replace(GONE, freed_block_ids=[])),
    "a write before the table": (3, "wrote from 4", ev.SlotsWritten(sequence_id="r1.0", start=4, stop=5)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_audit_tells(name: str, window: Auditor, batch_of: MakeBatch) -> None:
    rule, words, event = BROKEN[name]
    assert observe(window, batch_of, ALLOCATED, WRITTEN) == []
    findings = observe(window, batch_of, event)
    assert any(found == rule and words in message for found, message in findings), findings


def test_without_a_window_nothing_may_fall_out_of_one(pool: Auditor, batch_of: MakeBatch) -> None:
    [(rule, message)] = observe(pool, batch_of, ALLOCATED, WRITTEN, GONE)
    assert (rule, "its next token reads from 0 on" in message) == (4, True)


@pytest.mark.parametrize(
    "event",
    [
        msgspec.structs.replace(GONE, first_logical_block=1),
        msgspec.structs.replace(GONE, block_ids=[2]),
        msgspec.structs.replace(GONE, block_ids=[5, 2, 4, 1]),
    ],
)
def test_what_is_not_the_tables_beginning_does_not_fit(event: Event, window: Auditor, batch_of: MakeBatch) -> None:
    observe(window, batch_of, ALLOCATED, WRITTEN)
    with pytest.raises(FoldError, match="does not begin with"):
        window.observe(batch_of(event))


@pytest.mark.parametrize(
    "event",
    [
        ev.BlocksAllocated(sequence_id="r1.0", first_logical_block=2, block_ids=[0]),
        ev.SlotsWritten(sequence_id="r1.0", start=3, stop=4),
        ev.SlotsWritten(sequence_id="r1.0", start=3, stop=6),
        ev.SlotsWritten(sequence_id="r1.0", start=12, stop=13),
    ],
)
def test_positions_that_are_gone_do_not_fit(event: Event, window: Auditor, batch_of: MakeBatch) -> None:
    observe(window, batch_of, ALLOCATED, WRITTEN, GONE)
    with pytest.raises(FoldError):
        window.observe(batch_of(event))


@pytest.mark.parametrize("start", [9, 3])
def test_columns_fold_as_events_do(
    start: int, window: Auditor, batch_of: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a block reserved ahead, so that the wrong place in the table would be one, too."""
    monkeypatch.setattr(transposed, "MIN_GROUP", 1)
    ahead = ev.BlocksAllocated(sequence_id="r1.0", first_logical_block=3, block_ids=[5, 0])
    observe(window, batch_of, ALLOCATED, WRITTEN, GONE, ahead)
    data = transposed.transpose(
        encode_batch(batch_of(ev.SlotsWritten(sequence_id="r1.0", start=start, stop=start + 1)))
    )
    assert data is not None
    if start == 3:
        with pytest.raises(FoldError):
            apply_transposed(window.state, transposed.read_transposed(data))
        return
    state = apply_transposed(window.state, transposed.read_transposed(data))
    assert (state.written_slots[4], state.written_slots[5]) == (2, 0)


def test_a_copy_of_what_is_gone_does_not_fit(window: Auditor, batch_of: MakeBatch) -> None:
    observe(window, batch_of, ALLOCATED, WRITTEN, GONE)
    copied = ev.BlockCopied(sequence_id="r1.0", logical_block=0, source_block=4, target_block=0, num_slots=1)
    with pytest.raises(FoldError, match="no logical block L0"):
        window.observe(batch_of(copied))


def test_states_at_rest_remember(window: Auditor, batch_of: MakeBatch) -> None:
    observe(window, batch_of, ALLOCATED, WRITTEN, GONE)
    keyframe = Keyframe(window.state)
    assert decode_state(encode_state(window.state)) == keyframe.restore() == window.state
    window.state.sequence("r1.0").num_released = -1
    with pytest.raises(DecodeError, match="no sequence has had that many blocks"):
        decode_state(encode_state(window.state))


def test_in_words(window: Auditor) -> None:
    event = msgspec.structs.replace(GONE, first_logical_block=3, block_ids=[5, 2], cached_block_ids=[5])
    assert describe(event, window.state) == (
        "r1.0 lets go of P5 P2: L3-L4 out of the sliding window, 1 back to the pool, 1 of them cached, 1 still shared"
    )
