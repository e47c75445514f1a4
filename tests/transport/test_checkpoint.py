"""A checkpoint is the state that it was made of, with all its text made printable, or is refused."""

from typing import Any

import msgpack
import msgspec
import pytest

from kvscope.events.checkpoint import decode_checkpoint, encode_checkpoint
from kvscope.events.codec import DecodeError, encode_state
from kvscope.events.columns import Column
from kvscope.events.fold import apply_batch
from kvscope.events.keyframe import Keyframe
from kvscope.events.state import EngineState, Hypothesis, RequestState, WaitingReason
from kvscope.events.types import Batch, SamplingParams


@pytest.fixture
def batches(make_stream) -> list[Batch]:
    return make_stream(4).take(60)


def test_not_a_checkpoint() -> None:
    state = EngineState()
    assert decode_checkpoint(encode_checkpoint(state)) == state
    for junk in (b"", b"\xc0", encode_checkpoint(state)[:-1]):
        with pytest.raises(DecodeError):
            decode_checkpoint(junk)


def test_text_of_a_checkpoint_is_made_printable(batches: list[Batch]) -> None:
    state = EngineState()
    for batch in batches[:60]:
        state = apply_batch(state, batch)
    request = next(iter(state.requests.values()))
    request.prompt = "a\x1b]52;c;x\x07"
    request.sequences[0].pieces.append("\x9b1m")
    found = decode_checkpoint(encode_checkpoint(Keyframe(state).restore()))
    shown = found.requests[request.request_id]
    assert shown.prompt == "a␛]52;c;x␇"
    assert found.ref_counts == state.ref_counts
    assert shown.sequences[0].pieces[-1] == "\ufffd1m"


def test_text_in_any_field_of_a_checkpoint_is_made_printable() -> None:
    """Also where hardly any text is, and if it is the only one."""
    hypothesis = Hypothesis(token_ids=[1], pieces=["a"], text="\x1bx", score=0.0, finish_reason="stop")
    params = SamplingParams(stop=("\x1bx",))
    common: dict[str, Any] = {"prompt": "", "prompt_token_ids": [], "prompt_pieces": [], "sequences": []}
    plain = RequestState(request_id="r1", params=SamplingParams(), **common)
    for state in (
        EngineState(pause_reason="\x1bx"),
        EngineState(requests={"r1": RequestState(request_id="r1", params=params, **common)}),
        EngineState(requests={"r1": msgspec.structs.replace(plain, hypotheses=[hypothesis])}),
        EngineState(requests={"r1": msgspec.structs.replace(plain, waiting=WaitingReason("\x1bx", 0, 0))}),
        EngineState(finished_order=["\x1bx"]),
    ):
        found = decode_checkpoint(encode_checkpoint(state))
        assert b"\x1b" not in encode_state(found)
        assert "␛x".encode() in encode_state(found)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda parts: parts[3].append(1),  # a table more than there are sequences
        lambda parts: parts[2].__setitem__(1, b""),  # blocks are missing
        lambda parts: parts[2].__setitem__(0, "f"),  # not whole numbers
        lambda parts: parts[2].__setitem__(1, b"\x7f" * len(parts[2][1])),  # outside of the pool
        lambda parts: parts[0].__setitem__(1, b""),  # no pool
        lambda parts: parts[1].__setitem__(1, b""),  # nothing said of what is written
    ],
)
def test_blocks_of_a_checkpoint_that_do_not_fit(batches: list[Batch], spoil) -> None:
    state = EngineState()
    for batch in batches[:60]:
        state = apply_batch(state, batch)
    assert any(sequence.block_table for request in state.requests.values() for sequence in request.sequences)
    parts = msgpack.unpackb(encode_checkpoint(state))
    spoil(parts)
    with pytest.raises(DecodeError, match=r"not a checkpoint|block lists"):
        decode_checkpoint(msgpack.packb(parts))


def test_ref_counts_that_no_table_explains_come_back(batches: list[Batch]) -> None:
    """Of an engine that leaks blocks, or counts them wrongly."""
    state = apply_batch(EngineState(), batches[0])
    state.ref_counts[:3] = Column([3, -200, 1 << 30])
    state.written_slots[:3] = Column([0, 300, 70_000])
    assert decode_checkpoint(encode_checkpoint(state)) == state
