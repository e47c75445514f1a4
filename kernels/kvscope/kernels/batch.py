"""Where one step's tokens read and write KV."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where one step's tokens read and write KV. Tokens of all sequences are packed along one axis.

    A batch is one step's: backends may keep what they derive from it for the other layers of the same step, so its
    tensors must not change once it was used. All tensors live on the device of the KV cache.

    ```
    query_start      0      3  4            sequence 0: 3 tokens of a prefill; sequence 1: one token of a decode
    tokens           a  b  c |d
    context_lengths  3        9             positions with KV, this step's tokens included: d sits at position 8
    block_tables     7  ?  ?
                     3  0  5                `?`: past the context, undefined, never dereferenced
    ```
    """

    query_start: torch.Tensor
    """int32 [num_seqs + 1], cumulative: sequence i owns the tokens [query_start[i], query_start[i + 1])."""
    context_lengths: torch.Tensor
    """int32 [num_seqs], positions with KV once this step's tokens are written, those tokens included."""
    block_tables: torch.Tensor
    """int32 [num_seqs, max_blocks_per_seq], physical block ids; entries past the context hold anything."""
    slot_mapping: torch.Tensor
    """int64 [num_tokens], block_id * block_size + offset: where the K and V of each token go."""
    max_query_length: int
    """Tokens of the sequence with the most of them in this step."""
    max_context_length: int
    """Positions of the longest context."""

    @property
    def num_seqs(self) -> int:
        """Number of sequences in the step."""
        return self.context_lengths.shape[0]
