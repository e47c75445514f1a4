"""A request and its sequences: the state the scheduler works on. No torch, no IO."""

from dataclasses import dataclass, field
from enum import Enum

from kvscope.engine.beam_search import BeamSearch
from kvscope.engine.prefix_cache import BlockKey
from kvscope.events.state import WaitingReason
from kvscope.events.types import SamplingParams


class RequestStatus(Enum):
    """WAITING -> RUNNING -> FINISHED; RUNNING -> PREEMPTED -> RUNNING."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One candidate. Its tokens are the prompt's followed by what it generated.

    ```
    position   0 ......... num_computed ......... num_tokens
               |  KV written  |  to be computed      |
    ```
    The last token chosen has no KV until a later step processes it.
    """

    sequence_id: str
    index: int
    prompt_token_ids: list[int]
    generated: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    text: str = ""
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)  # where its KV is while swapped out
    num_released: int = 0  # logical blocks 0:num_released fell out of every window; the tables begin after them
    num_computed: int = 0
    block_keys: list[BlockKey] = field(default_factory=list)  # of its full blocks; they depend on tokens alone
    num_indexed: int = 0  # blocks 0:num_indexed have been offered to the prefix cache
    num_copies: int = 0
    finish_reason: str | None = None
    score: float | None = None  # beam search
    choice_margins: list[float] = field(default_factory=list)  # best minus second best score, per chosen token

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.generated)

    @property
    def num_logical_blocks(self) -> int:
        """Where its device table ends; those before `num_released` are gone."""
        return self.num_released + len(self.block_table)

    @property
    def alive(self) -> bool:
        return self.finish_reason is None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions `start:stop`."""
        num_prompt = len(self.prompt_token_ids)
        return (
            self.prompt_token_ids[start:stop] + self.generated[max(start - num_prompt, 0) : max(stop - num_prompt, 0)]
        )


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its n candidates, or its beams.

    Until the KV they have in common is written only the lead sequence (the first alive one) holds blocks; then it is
    forked and the others share all of them. At first that is the prompt's; after a preemption, which makes all of it
    be computed again, whatever the candidates' tokens have in common by then.
    """

    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    prompt_pieces: list[str]
    params: SamplingParams
    sequences: list[Sequence]
    submitted_ns: int
    status: RequestStatus = RequestStatus.WAITING
    waiting: WaitingReason | None = None
    forked: bool = False
    num_preemptions: int = 0
    first_token_ns: int | None = None
    finished_ns: int | None = None
    search: BeamSearch | None = None
    fork_at: int = field(init=False)  # positions 0:fork_at are computed once, for all sequences

    def __post_init__(self) -> None:
        self.fork_at = len(self.prompt_token_ids)

    @property
    def swapped_out(self) -> bool:
        return any(sequence.host_table for sequence in self.sequences)

    def alive_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.alive]

    def active_sequences(self) -> list[Sequence]:
        """Sequences that can be computed now: the lead until the fork, then all that are alive."""
        alive = self.alive_sequences()
        return alive if self.forked else alive[:1]

    def compute_limit(self, sequence: Sequence) -> int:
        """Positions `0:limit` may be computed now: what all have in common before the fork, every token after it."""
        return sequence.num_tokens if self.forked else self.fork_at

    def common_positions(self) -> int:
        """How far all alive sequences have the same tokens, such that each of them keeps one to compute.

        Equal sequences have everything in common: then the lead's logits are the next token's of all of them.
        """
        alive = self.alive_sequences()
        shortest = min(sequence.num_tokens for sequence in alive)
        common = self._num_common_tokens(alive)
        if common == shortest and any(sequence.num_tokens > shortest for sequence in alive):
            common -= 1
        return max(common, len(self.prompt_token_ids))

    def _num_common_tokens(self, sequences: list[Sequence]) -> int:
        common = 0
        for tokens in zip(*(sequence.generated for sequence in sequences), strict=False):
            if len(set(tokens)) > 1:
                break
            common += 1
        return len(self.prompt_token_ids) + common
