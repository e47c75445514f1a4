"""A column is a list to whoever folds, numpy to whoever counts, and a list on the wire."""

import copy

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope.events import types as ev
from kvscope.events.audit import Auditor
from kvscope.events.codec import DecodeError, decode_state, encode_state
from kvscope.events.columns import Column
from kvscope.events.fold import apply_event
from kvscope.events.state import FoldError

NUMBERS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1))


@given(NUMBERS)
def test_a_column_is_the_list_it_was_made_of(values: list[int]) -> None:
    column = Column(values)
    assert column == values
    assert column == Column(values)
    assert column != [*values, 0]
    assert column.numbers.tolist() == values
    for twin in (copy.copy(column), copy.deepcopy(column)):
        assert type(twin) is Column
        assert twin == column
        twin.append(1)
        assert column == values


def test_numbers_are_the_same_memory() -> None:
    column = Column.zeros(3)
    column.numbers[1] = 7
    column[2] += 1
    assert column == [0, 7, 1]
    assert np.count_nonzero(column.numbers) == 2


@pytest.mark.parametrize("wrong", [[1 << 31], [-(1 << 31) - 1], ["1"], [1.5], [True], "1", None])
def test_what_fits_no_column_is_refused(wrong: object, pool: Auditor) -> None:
    fields = msgspec.msgpack.decode(encode_state(pool.state)) | {"ref_counts": wrong}
    with pytest.raises(DecodeError):
        decode_state(msgspec.msgpack.encode(fields))


def test_a_host_table_that_points_outside_the_host_pool_is_refused(pool: Auditor) -> None:
    pool.state.requests["r1"].sequences[0].host_table = [0]
    with pytest.raises(DecodeError, match="outside the host pool"):
        decode_state(encode_state(pool.state))


def test_a_number_too_large_is_a_fold_error(pool: Auditor) -> None:
    apply_event(pool.state, ev.BlocksAllocated(sequence_id="r1.0", first_logical_block=0, block_ids=[0]))
    copied = ev.BlockCopied(sequence_id="r1.0", logical_block=0, source_block=0, target_block=1, num_slots=1 << 40)
    with pytest.raises(FoldError, match="32 bits"):
        apply_event(pool.state, copied)
