"""The engine's own account of its state, built from its live structures and not from events.

It is what a viewer gets after a loss, and what every test compares the fold of the events with (invariant 8).
"""

from typing import TYPE_CHECKING

import msgspec

from kvscope.engine.block_pool import BlockPool
from kvscope.engine.request import Request, Sequence
from kvscope.events.columns import Column
from kvscope.events.state import EngineState, RequestState, SequenceState
from kvscope.events.types import SCHEMA_VERSION

if TYPE_CHECKING:
    from kvscope.engine.engine import Engine


def export_state(engine: "Engine", pool: BlockPool, host_pool: BlockPool) -> EngineState:
    """A new state that shares nothing with the engine. O(pool + tokens)."""
    return EngineState(
        epoch=engine.epoch,
        step=engine.step_number,
        phase=engine.phase,
        time_ns=engine.now_ns,
        status=engine.status,
        wall_time_ns=engine.wall_time_ns,
        schema_version=SCHEMA_VERSION,
        info=engine.info,
        ref_counts=Column(pool.ref_counts),
        written_slots=Column(_written_slots(engine, pool)),
        requests={request_id: _export_request(request) for request_id, request in engine.requests.items()},
        finished_order=list(engine.finished_order),
        counters=msgspec.structs.replace(engine.counters),
        step_elapsed_ns=engine.step_elapsed_ns,
        host_ref_counts=host_pool.ref_counts,
        pause_reason=engine.pause_reason,
        breakpoints=engine.breakpoints.wanted,
    )


def _written_slots(engine: "Engine", pool: BlockPool) -> list[int]:
    """Written slots per block, from the tables and how far each sequence is computed. Cached blocks are full."""
    written = [pool.block_size if pool.is_cached(block_id) else 0 for block_id in range(pool.num_blocks)]
    for request in engine.requests.values():
        for sequence in request.sequences:
            for logical, block_id in enumerate(sequence.block_table, sequence.num_released):
                slots = min(max(sequence.num_computed - logical * pool.block_size, 0), pool.block_size)
                written[block_id] = max(written[block_id], slots)
    return written


def _export_request(request: Request) -> RequestState:
    return RequestState(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        prompt_pieces=list(request.prompt_pieces),
        params=request.params,
        sequences=[_export_sequence(sequence) for sequence in request.sequences],
        status=request.status.value,
        waiting=request.waiting,
        num_preemptions=request.num_preemptions,
        submitted_ns=request.submitted_ns,
        first_token_ns=request.first_token_ns,
        finished_ns=request.finished_ns,
        hypotheses=list(request.search.hypotheses) if request.search is not None else [],
    )


def _export_sequence(sequence: Sequence) -> SequenceState:
    return SequenceState(
        sequence_id=sequence.sequence_id,
        block_table=list(sequence.block_table),
        num_written=sequence.num_computed,
        token_ids=list(sequence.generated),
        pieces=list(sequence.pieces),
        text=sequence.text,
        num_copies=sequence.num_copies,
        finish_reason=sequence.finish_reason,
        host_table=list(sequence.host_table),
        score=sequence.score,
        num_released=sequence.num_released,
    )
