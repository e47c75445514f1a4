"""How a receiver folds a batch that carries a full state."""

import msgspec

from kvscope.events.state import FullState
from kvscope.events.types import Batch, BatchesDropped


def receivable(batch: Batch) -> Batch:
    """The part of the batch that a receiver can fold: all of it, unless it holds a full state.

    Events before a full state build on batches that nobody received: folding them would report faults that did not
    happen.
    """
    if FullState not in map(type, batch.events):
        return batch
    places = [index for index, event in enumerate(batch.events) if isinstance(event, FullState)]
    dropped = [event for event in batch.events[: places[-1]] if isinstance(event, BatchesDropped)]
    return msgspec.structs.replace(batch, events=(*dropped, *batch.events[places[-1] :]))
