"""Greedy tokens are those of transformers' `generate` on the same weights, whatever the memory does meanwhile.

Where the reference's two best logits differ by less than 1e-4 either token is right; such ties are counted, logged
(`pytest --log-cli-level=INFO`), and end the comparison of that sequence.
"""

import dataclasses
import logging
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvscope.engine.model_hub import resolve_model
from kvscope.engine.model_loader import LoadedModel
from kvscope.events.types import SamplingParams

logger = logging.getLogger(__name__)

TIE = 1e-4
MAX_TOKENS = 24

SHAKESPEARE = [
    "ROMEO:",
    "JULIET:\nO Romeo, Romeo",
    "To be, or not to be",
    "KING RICHARD III:\nNow is the winter",
    "First Citizen:\nBefore we proceed any further, hear me speak.",
    "a",
    "The",
    "My lord, my lord, my lord, my lord, my lord, my lord",
    "GLOUCESTER:\nI would",
    "What, ho!",
    "Good morrow, cousin.\n\nROMEO:\nIs the day so young?",
    "MENENIUS:\nThere was a time when all the body's members",
    "He that will give good words to thee will flatter",
    "0123456789",
    "war and peace and war and peace",
    "\n\n",
    "Tybalt, the reason that I have to love thee",
    "CORIOLANUS:\nYour affections are a sick man's appetite",
    "O",
    "Two households, both alike in dignity, in fair Verona, where we lay our scene",
]
GENERAL = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "1, 2, 3, 4,",
    "The theory of evolution was proposed by",
    "Dear Sir or Madam,",
    "In the beginning",
    "A block table maps",
    "The quick brown fox",
    "Paged attention is a way to",
    "Q: What is 2 + 2?\nA:",
    "The largest planet in our solar system is Jupiter. The smallest planet is",
    "import numpy as np\n",
    "Roses are red,\nviolets are",
    "My favourite colour is",
    "Breaking news:",
    "To make a good cup of tea, first",
    "Le chat est sur",
    "x",
]


@dataclasses.dataclass(frozen=True)
class Reference:
    """Greedy continuation by transformers: tokens, the gap between the two best logits, and the second best token."""

    tokens: list[int]
    gaps: list[float]
    seconds: list[int]


def own_model(name: str) -> Any:
    """The model as transformers makes it: its own linear layers, its own attention."""
    return AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32).eval()


def reference(model: Any, tokenizer: Any, prompt: str) -> Reference:
    """transformers' own generate, with its own cache."""
    output = model.generate(
        **tokenizer(prompt, return_tensors="pt"),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        repetition_penalty=1.0,
    )
    num_prompt = output.sequences.shape[1] - len(output.logits)
    top = [torch.topk(step[0].float(), 2) for step in output.logits]
    return Reference(
        output.sequences[0, num_prompt:].tolist(),
        [(t.values[0] - t.values[1]).item() for t in top],
        [int(t.indices[1]) for t in top],
    )


@pytest.fixture(scope="module")
def references(tiny: LoadedModel) -> dict[str, Reference]:
    model = own_model(tiny.name)
    return {prompt: reference(model, tiny.tokenizer, prompt) for prompt in SHAKESPEARE}


@pytest.fixture(scope="module")
def smollm2_references(smollm2: LoadedModel) -> dict[str, Reference]:
    model = own_model(smollm2.name)
    return {prompt: reference(model, smollm2.tokenizer, prompt) for prompt in GENERAL}


def check_against(fixture: Any, references: dict[str, Reference], n: int) -> None:
    """Run all prompts through one engine and compare every candidate with the reference."""
    params = SamplingParams(n=n, temperature=0.0, max_tokens=MAX_TOKENS)
    requests = {p: fixture.engine.submit(p, params, f"r{i}") for i, p in enumerate(references)}
    fixture.run(checked=False)
    fixture.check()
    ties = [
        (prompt, place)
        for prompt, request in requests.items()
        for sequence in request.sequences
        if (place := first_tie(sequence.generated, references[prompt])) is not None
    ]
    logger.info("%d sequences, %d ties below %g: %s", len(references) * n, len(ties), TIE, ties)


def first_tie(tokens: list[int], expected: Reference) -> int | None:
    """Where the sequences part over a tie; None when they are equal. Fails when they part for any other reason."""
    for place, (ours, theirs) in enumerate(zip(tokens, expected.tokens, strict=False)):
        if ours != theirs:
            assert expected.gaps[place] < TIE, f"token {place}: {ours} != {theirs}, gap {expected.gaps[place]}"
            assert ours == expected.seconds[place]
            return place
    assert len(tokens) == len(expected.tokens)
    return None


CASES = pytest.mark.parametrize(
    ("batch_size", "block_size", "n"),
    [(1, 4, 1), (1, 16, 1), (8, 4, 1), (8, 16, 1), (8, 4, 3), (8, 16, 3)],
    ids=str,
)


@CASES
def test_embedded_model(
    real_engine: Any, tiny: LoadedModel, references: Any, batch_size: int, block_size: int, n: int
) -> None:
    fixture = real_engine(tiny, block_size=block_size, max_num_seqs=max(batch_size, n))
    check_against(fixture, references, n)


@pytest.mark.parametrize("attention_backend", ["torch", "numba"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("block_size", [4, 16])
def test_embedded_model_under_preemption(
    real_engine: Any, tiny: LoadedModel, references: Any, block_size: int, n: int, attention_backend: str
) -> None:
    fixture = real_engine(
        tiny,
        block_size=block_size,
        num_gpu_blocks_override=n * 96 // block_size,
        max_num_batched_tokens=32,
        attention_backend=attention_backend,
    )
    assert fixture.engine.info.attention_backend == attention_backend
    check_against(fixture, references, n)
    assert fixture.engine.counters.preemptions > 0


@pytest.mark.slow
@pytest.mark.smollm2
@CASES
def test_smollm2(
    real_engine: Any, smollm2: LoadedModel, smollm2_references: Any, batch_size: int, block_size: int, n: int
) -> None:
    fixture = real_engine(smollm2, block_size=block_size, max_num_seqs=max(batch_size, n))
    check_against(fixture, smollm2_references, n)


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_under_preemption(real_engine: Any, smollm2: LoadedModel, smollm2_references: Any) -> None:
    fixture = real_engine(smollm2, block_size=4, num_gpu_blocks_override=40)
    check_against(fixture, smollm2_references, 1)
    assert fixture.engine.counters.preemptions > 0
