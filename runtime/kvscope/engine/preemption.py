"""How a request that must give way keeps what it has computed: not at all, or in host blocks. No torch, no state."""

from typing import NamedTuple

from kvscope.events.types import PreemptionMode, PreemptionReason


class Decision(NamedTuple):
    mode: PreemptionMode
    reason: PreemptionReason


def choose_mode(
    policy: str, *, host_blocks_needed: int, host_blocks_available: int, tokens_lost: int, tokens_per_step: int
) -> Decision:
    """The policy `recompute`, `swap` or `auto`, as far as the host pool has room.

    `auto` swaps what would take more than one step to compute again. Up to a step's budget, recomputing is one
    forward pass, which batches well and needs no copies; beyond, it would push others out of several steps.
    """
    if policy == "recompute":
        return Decision("recompute", "asked")
    if not 0 < host_blocks_needed <= host_blocks_available:
        return Decision("recompute", "no_host_room")
    if policy == "swap":
        return Decision("swap", "asked")
    return Decision("swap", "many_steps") if tokens_lost > tokens_per_step else Decision("recompute", "one_step")
