"""Events as sentences, for the ticker and for logs."""

from collections.abc import Sequence

from kvscope.events import types as ev
from kvscope.events.state import EngineState, FullState, holders_in
from kvscope.events.text import counted
from kvscope.events.types import Event

MAX_LISTED_BLOCKS = 6
_FINISH_WORDS = {
    "stop": "reached its end",
    "length": "reached max_tokens",
    "cancelled": "was cancelled",
}


def describe(event: Event, state: EngineState) -> str | None:
    """One sentence for the event, or None for bookkeeping. `state` is the state just after the event."""
    match event:
        case ev.BlocksAllocated(sequence_id=seq, block_ids=ids, first_logical_block=first):
            return f"{seq} reserves {_blocks(ids)} as {_logical(first, len(ids))}"
        case ev.BlocksShared(sequence_id=seq, from_sequence_id=other, block_ids=ids):
            return f"{seq} shares {_blocks(ids)} with {other}: no new blocks"
        case ev.BlockCopied():
            return _describe_copy(event, state)
        case ev.SlotsWritten(sequence_id=seq, start=start, stop=stop):
            return f"{seq} wrote {_positions(start, stop)} {_place(event, state)}".rstrip()
        case ev.BlocksReused(sequence_id=seq, block_ids=ids, num_tokens=count):
            return f"{seq} reuses {_blocks(ids)}: {count} positions from the prefix cache"
        case ev.BlocksEvicted(block_ids=ids, for_sequence_id=seq):
            return f"{_blocks(ids)} evicted from the prefix cache: {seq} needs room"
        case ev.PrefixLookup():
            return _describe_lookup(event, state)
        case ev.BlocksReleased() | ev.BlocksOutOfWindow():
            return _describe_release(event)
        case ev.TokensGenerated(sequence_id=seq, pieces=pieces, score=score):
            scored = f", score {score:.2f}" if score is not None else ""
            return f"{seq} chose {''.join(pieces)!r}{scored} (no KV yet)"
        case _:
            return _describe_request(event) or _describe_beams(event) or _describe_swap(event) or _describe_life(event)


def _describe_request(event: Event) -> str | None:
    match event:
        case ev.RequestSubmitted(request_id=request, prompt_token_ids=ids, params=params):
            candidates = f", n={params.n}" if params.n > 1 else ""
            candidates += f", beam_width={params.beam_width}" if params.beam_width > 1 else ""
            return (
                f"{request} submitted: {counted(len(ids), 'prompt token')}{candidates}, max_tokens={params.max_tokens}"
            )
        case ev.RequestRefused(request_id=request, reason=reason):
            return f"{request} refused: {reason}"
        case ev.RequestWaiting(request_id=request):
            return f"{request} waits: {describe_waiting(event.kind, event.needed, event.available)}"
        case ev.RequestAdmitted(request_id=request):
            return f"{request} admitted"
        case ev.RequestPreempted(request_id=request):
            return _describe_preemption(event)
        case ev.SequenceFinished(sequence_id=seq, reason=reason):
            return f"{seq} {_FINISH_WORDS.get(reason, reason)}"
        case ev.RequestFinished(request_id=request):
            return f"{request} finished"
    return None


def _describe_beams(event: Event) -> str | None:
    match event:
        case ev.SequenceForked(sequence_id=seq, from_sequence_id=parent):
            return f"{seq} died out: in its place goes on another child of {parent}"
        case ev.HypothesisFinished(from_sequence_id=seq, score=score, piece=piece):
            return f"{seq} could end with {piece!r}, score {score:.3f}"
        case ev.BeamSearchFinished(request_id=request):
            return f"{request} beam search ended: no beam can beat the best hypotheses"
    return None


def _describe_life(event: Event) -> str | None:
    match event:
        case ev.EngineStarted(info=info):
            return f"engine {info.name} started: {counted(info.num_blocks, 'block')} of {info.block_size} slots"
        case ev.EngineStopped(reason=reason):
            return f"engine stopped: {reason}"
        case ev.EnginePaused(reason=reason):
            return f"engine paused: {reason}" if reason else "engine paused"
        case ev.BreakpointsChanged(events=names, free_below=free_below):
            return f"breakpoints: {describe_breakpoints(names, free_below) or 'none'}"
        case ev.EngineResumed():
            return "engine resumed"
        case ev.BatchesDropped(num_batches=count):
            return f"{count} batches dropped: queue full; full state follows"
        case ev.AuditFinding(rule=rule, message=message):
            return f"AUDIT invariant {rule}: {message}"
        case FullState():
            return "full state received"
    return None


def describe_breakpoints(names: Sequence[str], free_below: int | None) -> str:
    """What the engine pauses at, in words; nothing for nothing."""
    return ", ".join([*names, *([] if free_below is None else [f"free blocks below {free_below}"])])


def describe_waiting(kind: str, needed: int, available: int) -> str:
    """The reason a request waits, with its two numbers."""
    match kind:
        case "blocks":
            return f"needs {counted(needed, 'block')}, {available} free"
        case "worst_case":
            return f"could come to need {counted(needed, 'block')}, {available} not promised to others"
        case "watermark":
            return f"needs {counted(needed, 'block')}, {available} free above the watermark"
        case "reservation":
            return f"reserves {counted(needed, 'block')} for its maximum, {available} free"
        case "fragmentation":
            return f"needs a run of {counted(needed, 'block')}, the longest left has {available}"
        case "token_budget":
            return f"the step's token budget is spent ({available} left)"
        case "sequence_cap":
            return f"needs {counted(needed, 'sequence seat')}, {available} free"
        case "order":
            return "earlier requests go first"
        case _:
            return kind


def _describe_preemption(event: ev.RequestPreempted) -> str:
    lost = f"{event.tokens_lost} positions to recompute" if event.mode == "recompute" else "KV swapped to the host"
    reasons = {
        "no_host_room": f"{event.host_blocks_needed} host blocks needed, {event.host_blocks_available} free",
        "one_step": "one step's work",
        "many_steps": "more than a step's work to recompute",
    }
    why = f" ({reasons[event.reason]})" if event.reason in reasons else ""
    return (
        f"{event.request_id} preempted, admitted last: {event.for_request_id} needed "
        f"{counted(event.blocks_needed, 'block')}; "
        f"{event.blocks_gained} gained, {lost}{why}"
    )


def _describe_swap(event: Event) -> str | None:
    match event:
        case ev.BlocksSwappedOut(sequence_id=seq, block_ids=ids, host_block_ids=host, freed_block_ids=freed):
            return f"{seq} swapped out: {_blocks(ids)} to host {_blocks(host, 'H')}; {len(freed)} back to the pool"
        case ev.BlocksSwappedIn(sequence_id=seq, block_ids=ids, host_block_ids=host):
            return f"{seq} swapped in: host {_blocks(host, 'H')} to {_blocks(ids)}"
        case ev.HostBlocksReleased(sequence_id=seq, host_block_ids=host):
            return f"{seq} lets go of host {_blocks(host, 'H')}"
    return None


def _describe_copy(event: ev.BlockCopied, state: EngineState) -> str:
    left = [seq for seq, _ in _holders_left(event, state)]
    left_to = f"; P{event.source_block} left to {', '.join(left)}" if left else ""
    return (
        f"{event.sequence_id} needs L{event.logical_block} private: copy-on-write P{event.source_block} -> "
        f"P{event.target_block} ({counted(event.num_slots, 'slot')}){left_to}"
    )


def _holders_left(event: ev.BlockCopied, state: EngineState) -> list[tuple[str, int]]:
    """Nearly always all in the request that copied: only when some are missing there, every table is looked at."""
    near = holders_in(state.request(event.sequence_id.rpartition(".")[0]), event.source_block)
    return near if len(near) == state.ref_counts[event.source_block] else state.holders(event.source_block)


def _describe_release(event: ev.BlocksReleased | ev.BlocksOutOfWindow) -> str:
    kept, cached = len(event.block_ids) - len(event.freed_block_ids), len(event.cached_block_ids)
    tail = f", {cached} of them cached" if cached else ""
    tail += f", {kept} still shared" if kept else ""
    why = ""
    if isinstance(event, ev.BlocksOutOfWindow):
        why = f"{_logical(event.first_logical_block, len(event.block_ids))} out of the sliding window, "
    freed = f"{why}{len(event.freed_block_ids)} back to the pool{tail}"
    return f"{event.sequence_id} lets go of {_blocks(event.block_ids)}: {freed}"


def _describe_lookup(event: ev.PrefixLookup, state: EngineState) -> str | None:
    block_size = state.info.block_size if state.info is not None else 0
    hit = f"{event.request_id} prefix cache: {event.num_hit_tokens} of {event.num_tokens} tokens"
    match event.miss:
        case None:
            return hit
        case "evicted":
            return f"{hit}; the next block was evicted at step {event.evicted_at_step} for {event.evicted_for}"
        case "shorter_than_block":
            return f"{hit}; {event.num_common_tokens} more in common, a block is {block_size}"
        case _:
            return f"{hit}; nothing cached goes on like it"


def _place(event: ev.SlotsWritten, state: EngineState) -> str:
    """`(P2 slot 2)` for one position, the blocks for several."""
    if state.info is None:
        return ""
    block_size = state.info.block_size
    ids = state.sequence(event.sequence_id).blocks(event.start // block_size, (event.stop - 1) // block_size + 1)
    if event.stop - event.start == 1 and ids:
        return f"(P{ids[0]} slot {event.start % block_size})"
    return f"({_blocks(ids)})"


def _positions(start: int, stop: int) -> str:
    return f"position {start}" if stop - start == 1 else f"positions {start}-{stop - 1}"


def _logical(first: int, count: int) -> str:
    return f"L{first}" if count == 1 else f"L{first}-L{first + count - 1}"


def _blocks(block_ids: list[int], letter: str = "P") -> str:
    if len(block_ids) == 1:  # nearly always
        return f"{letter}{block_ids[0]}"
    shown = " ".join(f"{letter}{block_id}" for block_id in block_ids[:MAX_LISTED_BLOCKS])
    more = len(block_ids) - MAX_LISTED_BLOCKS
    return f"{shown} and {more} more" if more > 0 else shown
