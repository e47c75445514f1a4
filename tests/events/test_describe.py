"""Sentences about events are in good English, also about one of something."""

import pytest

from kvscope.events.describe import describe, describe_waiting
from kvscope.events.state import EngineState
from kvscope.events.types import RequestPreempted, RequestSubmitted, SamplingParams


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("blocks", "needs 1 block, 0 free"),
        ("worst_case", "could come to need 1 block, 0 not promised to others"),
        ("watermark", "needs 1 block, 0 free above the watermark"),
        ("reservation", "reserves 1 block for its maximum, 0 free"),
        ("fragmentation", "needs a run of 1 block, the longest left has 0"),
        ("sequence_cap", "needs 1 sequence seat, 0 free"),
    ],
)
def test_one_of_something_is_waited_for(kind, words):
    assert describe_waiting(kind, 1, 0) == words


def test_one_token_and_one_block():
    submitted = RequestSubmitted(
        request_id="r1", prompt="x", prompt_token_ids=[1], prompt_pieces=["x"], params=SamplingParams()
    )
    assert "1 prompt token," in describe(submitted, EngineState())
    preempted = RequestPreempted(
        request_id="r1", for_request_id="r2", blocks_needed=1, blocks_gained=2, tokens_lost=3, mode="recompute"
    )
    assert "r2 needed 1 block;" in describe(preempted, EngineState())
