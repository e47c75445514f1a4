"""One pass over a recording: folds every batch and shows observers the state before and after each event.

What cannot be folded costs the batches up to the next full state and is reported, never raised: a broken recording
is what these commands are for.
"""

import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from kvscope.events.fold import apply_event, begin_batch
from kvscope.events.state import EngineState, FoldError, FullState
from kvscope.events.text import make_printable
from kvscope.events.types import Batch, Event
from kvscope.transport.healing import receivable
from kvscope.transport.recording.stored_series import AnyRecording


class Hole(NamedTuple):
    """Batches `first_seq` to `last_seq` are not there. Marked: a full state stands in their place."""

    first_seq: int
    last_seq: int
    is_marked: bool


class Misfit(NamedTuple):
    """A batch that does not fit the state before it; the fold goes on at the next full state."""

    seq: int
    step: int
    message: str


class Observer:
    """Looks at a recording while it is folded. Every method may be left out; none may change what it is given."""

    def on_state(self, state: EngineState) -> None:
        """A whole state replaced what was known: where a recording begins in mid-life, or after a loss."""

    def before_event(self, state: EngineState, event: Event) -> None:
        """The state is the one just before the event, its step and time already the event's."""

    def after_event(self, state: EngineState, event: Event) -> None: ...

    def after_batch(self, seq: int, state: EngineState) -> None: ...


@dataclass(slots=True)
class Walk:
    """What a pass over a recording found. `state` is the last one; sound unless a misfit was never healed."""

    state: EngineState
    first_state: EngineState | None = None  # before the first batch, where recording began in mid-life
    num_batches: int = 0
    num_events: int = 0
    num_skipped_batches: int = 0  # from a misfit up to the next full state
    is_sound: bool = True
    holes: list[Hole] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)


class _Hooks:
    """The observers' methods that do something: most are left out, and there are millions of events."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        self.on_state = [o.on_state for o in observers if type(o).on_state is not Observer.on_state]
        self.before_event = [o.before_event for o in observers if type(o).before_event is not Observer.before_event]
        self.after_event = [o.after_event for o in observers if type(o).after_event is not Observer.after_event]
        self.after_batch = [o.after_batch for o in observers if type(o).after_batch is not Observer.after_batch]


def walk(recording: AnyRecording, *observers: Observer) -> Walk:
    """Fold the recording from its beginning to its end; the recording is left as it is."""
    result, hooks = Walk(EngineState()), _Hooks(observers)
    if recording.initial_state is not None:
        result.first_state = recording.initial_state
        result.state = copy.deepcopy(recording.initial_state)
        for look_at_state in hooks.on_state:
            look_at_state(result.state)
    last_seq = recording.initial_seq
    for seq, whole_batch in recording.batches:
        batch = receivable(whole_batch)
        has_state = any(isinstance(event, FullState) for event in batch.events)
        _note_hole(result, last_seq, seq, batch, is_marked=has_state)
        result.is_sound = (result.is_sound or has_state) and _fold(result, seq, batch, hooks)
        result.num_batches += 1
        result.num_events += len(whole_batch.events)
        result.num_skipped_batches += not result.is_sound
        last_seq = seq
    return result


def _fold(result: Walk, seq: int, batch: Batch, hooks: _Hooks) -> bool:
    """Fold one batch; False when it does not fit."""
    state = result.state
    try:
        begin_batch(state, batch)
        for event in batch.events:
            for look in hooks.before_event:
                look(state, event)
            state = result.state = apply_event(state, event)
            if isinstance(event, FullState):
                for look_at_state in hooks.on_state:
                    look_at_state(state)
            else:
                for look in hooks.after_event:
                    look(state, event)
        for look_at_batch in hooks.after_batch:
            look_at_batch(seq, state)
    except FoldError as error:
        result.misfits.append(Misfit(seq, batch.step, make_printable(" ".join(str(error).split()))))
        return False
    return True


def _note_hole(result: Walk, last_seq: int | None, seq: int, batch: Batch, *, is_marked: bool) -> None:
    first_missing = 0 if last_seq is None else last_seq + 1
    # A lone full state was written in place of a batch: what happened in that one is not known either.
    is_keyframe = len(batch.events) == 1 and is_marked
    last_missing = seq if is_keyframe else seq - 1
    if first_missing <= last_missing:
        result.holes.append(Hole(first_missing, last_missing, is_marked))
