"""What may enter an engine: prompts as token ids, and a refusal in one line for what can never run there."""

import copy
import threading
from collections.abc import Sequence
from typing import Any

from kvscope.engine.admission import Admission
from kvscope.engine.beam_search import num_candidates
from kvscope.events.types import EngineInfo, SamplingParams

MAX_CHARACTERS_PER_TOKEN = 128  # the longest tokens of real vocabularies are runs of this many spaces


class RequestRefusedError(ValueError):
    """The request can never run here. One line, with the numbers."""


class Intake:
    """Any thread may call it: it has a tokenizer of its own, and looks at no state that changes."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Any,
        admission: Admission,
        *,
        eos_token_ids: frozenset[int],
        ranks_beams: bool,
    ) -> None:
        self._info = info
        self._tokenizer = copy.deepcopy(tokenizer)  # a tokenizer must not be used by two threads at once
        self._lock = threading.Lock()
        self._admission = admission
        self._eos_token_ids = eos_token_ids
        self._ranks_beams = ranks_beams

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, special tokens added as the tokenizer does by default.

        Raises:
            RequestRefusedError: too long for any tokenizer to make it fit, or not text at all.
        """
        longest = MAX_CHARACTERS_PER_TOKEN * self._info.max_model_len
        if len(prompt) > longest:
            raise RequestRefusedError(
                f"the prompt has {len(prompt)} characters; more than {longest} cannot fit in --max-model-len "
                f"{self._info.max_model_len}"
            )
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise RequestRefusedError("the prompt is not valid UTF-8")
        with self._lock:
            return list(self._tokenizer(prompt).input_ids)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestRefusedError when no state of the pool could ever serve the request. Does not mutate."""
        self._check_prompt(prompt_token_ids)
        wish = f"beam_width={params.beam_width}" if params.beam_width > 1 else f"n={params.n}"
        if params.num_sequences > self._info.max_num_seqs:
            raise RequestRefusedError(
                f"{wish} needs {params.num_sequences} sequence seats; --max-num-seqs is {self._info.max_num_seqs}"
            )
        if params.beam_width > 1:
            self._check_beam_search(params, wish)
        num_prompt, num_blocks = len(prompt_token_ids), self._info.num_blocks
        needed = self._admission.worst_case_blocks(num_prompt, params)
        if needed > num_blocks:
            raise RequestRefusedError(
                f"{num_prompt} prompt tokens with {wish} max_tokens={params.max_tokens} can need "
                f"{needed} blocks; the pool has {num_blocks} of {self._info.block_size} slots"
            )

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        info, num_prompt = self._info, len(prompt_token_ids)
        if num_prompt == 0:
            raise RequestRefusedError("the prompt is empty")
        if num_prompt >= info.max_model_len:
            raise RequestRefusedError(
                f"the prompt has {num_prompt} tokens; with --max-model-len {info.max_model_len} at most "
                f"{info.max_model_len - 1} fit, since one more must be generated"
            )
        if max(prompt_token_ids) >= info.vocab_size:
            raise RequestRefusedError(
                f"the prompt holds token {max(prompt_token_ids)}, which the tokenizer knows and the model does not: "
                f"it has {info.vocab_size} tokens"
            )

    def _check_beam_search(self, params: SamplingParams, wish: str) -> None:
        if self._info.allocator == "contiguous":
            raise RequestRefusedError(f"{wish} needs --allocator paged: beams share the blocks of their history")
        if not self._ranks_beams:
            raise RequestRefusedError("this engine has no model to compare beams by")
        if num_candidates(params.beam_width, self._eos_token_ids) > self._info.vocab_size:
            raise RequestRefusedError(f"{wish} is too much for a vocabulary of {self._info.vocab_size} tokens")
