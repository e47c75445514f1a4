#!/usr/bin/env python3
"""Runs the engine far short of memory and compares every request with transformers' `generate`; prints one table.

    python tests/campaigns/stress.py [--model smollm2-135m-instruct] [--requests 64] [--pool 0.3] [--max-tokens 20]
                                     [--references FILE]

The pool holds 30 % of what all requests need together. Half of them are submitted at once, then one more at every step
(so that prefixes are found written), once per preemption mode; prompts share prefixes, requests have 1 to 4 candidates
or 2 to 4 beams. Candidates must be the reference's tokens (float32, greedy); where its two best logits differ by less
than 1e-4 either is right: a tie, counted, and the end of that comparison. Beams must have the reference's scores within
1e-4; other tokens at those scores are a tie too. A file can keep transformers' answers for the next run. Exit code 1:
a mismatch, or a mechanism that was never used.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM

from kvscope.engine.build import build_engine, prepare
from kvscope.engine.config import EMBEDDED_MODEL, EngineConfig
from kvscope.engine.model_hub import resolve_model
from kvscope.engine.model_loader import LoadedModel, load_model
from kvscope.engine.request import RequestStatus
from kvscope.engine.sinks import AuditSink
from kvscope.events import types as ev
from kvscope.events.types import SamplingParams
from kvscope.kernels.backend import get_backend

TIE = 1e-4
BLOCK_SIZE = 4
STEPS_PER_REPORT = 50
OPENINGS = ["The king and his men came to the city, and", "To be, or not to be, that is", "My lord, I would", "O"]
ENDINGS = ["", " the night", " a good man", " the war and the peace", " what say you", " two of us", " love"]


class Job(NamedTuple):
    prompt: str
    params: SamplingParams


class Reference(NamedTuple):
    """transformers' answer, best first; gaps between the two best logits per token (greedy), or a score per beam."""

    sequences: list[list[int]]
    gaps: list[float]
    scores: list[float]


class Row(NamedTuple):
    mode: str
    requests: int
    sequences: int
    tokens: int
    preemptions: int
    swaps: int
    hits: int
    copies: int
    mismatches: int
    ties: int

    def failures(self) -> list[str]:
        """What was wrong, and which mechanisms were never used."""
        needed = ["preemptions", "hits", "copies"] + ["swaps"] * (self.mode == "swap")
        unused = [f"{self.mode}: no {name}" for name in needed if not getattr(self, name)]
        return unused + [f"{self.mode}: {self.mismatches} mismatches"] * bool(self.mismatches)


def make_jobs(num_requests: int, max_tokens: int) -> list[Job]:
    """Prompts with shared openings; every fourth request has 2 to 4 beams, the others 1 to 4 candidates."""
    jobs = []
    for i in range(num_requests):
        shape = {"beam_width": 2 + i // 4 % 3} if i % 4 == 3 else {"n": 1 + i % 7 % 4}
        prompt = OPENINGS[i % 3 if i % 5 else 3] + ENDINGS[i % len(ENDINGS)] + f" {i // 7}" * (i >= 7)
        jobs.append(Job(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, **shape)))
    return jobs


def reference(model: Any, loaded: LoadedModel, job: Job) -> Reference:
    """transformers' own generate on this request alone, with its own linear layers, attention and cache."""
    ids, width = loaded.tokenizer(job.prompt, return_tensors="pt"), job.params.beam_width or 1
    output = model.generate(
        **ids,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=job.params.length_penalty,
        max_new_tokens=job.params.max_tokens,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=width == 1,
        repetition_penalty=1.0,
        eos_token_id=sorted(loaded.eos_token_ids) or None,
        pad_token_id=0,
    )
    sequences = output.sequences[:, ids["input_ids"].shape[1] :].tolist()
    if width > 1:
        return Reference(sequences, [], output.sequences_scores.tolist())
    top = [torch.topk(step[0].float(), 2).values for step in output.logits]
    return Reference(sequences, [(best - second).item() for best, second in top], [])


def compare(request: Any, expected: Reference) -> list[str]:
    """`equal`, `tie` or `mismatch` for every sequence of a finished request."""
    if not expected.scores:
        return [_compare_greedy(sequence.generated, expected) for sequence in request.sequences]
    if len(request.sequences) != len(expected.scores):
        return ["mismatch"]
    return [
        "mismatch"
        if sequence.score is None or not abs(sequence.score - score) <= TIE
        else ("equal" if sequence.generated == tokens[: len(sequence.generated)] else "tie")
        for sequence, tokens, score in zip(request.sequences, expected.sequences, expected.scores, strict=True)
    ]


def _compare_greedy(tokens: list[int], expected: Reference) -> str:
    if tokens == expected.sequences[0]:
        return "equal"
    for ours, theirs, gap in zip(tokens, expected.sequences[0], expected.gaps, strict=False):
        if ours != theirs:
            return "tie" if gap < TIE else "mismatch"
    return "mismatch"


def num_blocks_needed(loaded: LoadedModel, jobs: list[Job]) -> int:
    """Blocks that all requests would hold at their longest, had every sequence its own."""
    return sum(
        -(-(len(loaded.tokenizer(job.prompt).input_ids) + job.params.max_tokens) // BLOCK_SIZE)
        * (job.params.beam_width or job.params.n)
        for job in jobs
    )


def run_mode(loaded: LoadedModel, jobs: list[Job], references: list[Reference], mode: Any, pool: float) -> Row:
    """All requests through one engine; its events and structures are checked at the end."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=int(pool * num_blocks_needed(loaded, jobs)),
        max_num_seqs=256,
        preemption=mode,
        swap_space=0.25 if mode == "swap" else 0.0,
    )
    sink = AuditSink(keep=True)
    engine = build_engine(prepare(config, loaded=loaded), sink)
    requests = []
    for i, job in enumerate(jobs):
        requests.append(engine.submit(job.prompt, job.params, f"r{i}"))
        if i >= len(jobs) // 2:
            engine.step()
    while engine.has_work():
        engine.step()
        if engine.step_number % STEPS_PER_REPORT == 0:
            num_done = sum(request.status is RequestStatus.FINISHED for request in requests)
            report(f"{mode}: step {engine.step_number}, {num_done} of {len(requests)} requests finished")
    problems = [*sink.auditor.findings, *engine.check_integrity()]
    if problems:
        raise SystemExit(f"{mode}: {problems[0]}")
    verdicts = [v for request, expected in zip(requests, references, strict=True) for v in compare(request, expected)]
    events = [event for batch in sink.batches for event in batch.events]
    return Row(
        mode,
        len(requests),
        len(verdicts),
        sum(len(sequence.generated) for request in requests for sequence in request.sequences),
        sum(isinstance(event, ev.RequestPreempted) for event in events),
        sum(isinstance(event, ev.BlocksSwappedIn) for event in events),
        sum(isinstance(event, ev.PrefixLookup) and event.num_hit_tokens > 0 for event in events),
        sum(isinstance(event, ev.BlockCopied) for event in events),
        verdicts.count("mismatch"),
        verdicts.count("tie"),
    )


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def find_references(loaded: LoadedModel, jobs: list[Job], path: Path | None) -> list[Reference]:
    """transformers' answers, those of an earlier run read from the file; it knows them by all they depend on."""
    known: dict[str, Reference] = {}
    if path is not None and path.is_file():
        known = {key: Reference(*fields) for key, fields in json.loads(path.read_text()).items()}
    keys = [f"{loaded.name} {transformers.__version__} {job.prompt!r} {job.params}" for job in jobs]
    model = AutoModelForCausalLM.from_pretrained(resolve_model(loaded.name), dtype=torch.float32).eval()
    for number, (key, job) in enumerate(zip(keys, jobs, strict=True), 1):
        if key not in known:
            known[key] = reference(model, loaded, job)
            report(f"transformers: {number} of {len(jobs)} requests")
    if path is not None:
        path.write_text(json.dumps(known))
    return [known[key] for key in keys]


def stress(
    loaded: LoadedModel, num_requests: int, max_tokens: int, pool: float, references_path: Path | None = None
) -> list[Row]:
    """One row per preemption mode; both are compared with the same references."""
    jobs = make_jobs(num_requests, max_tokens)
    references = find_references(loaded, jobs, references_path)
    return [run_mode(loaded, jobs, references, mode, pool) for mode in ("recompute", "swap")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help=f"or {EMBEDDED_MODEL}")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--pool", type=float, default=0.3, help="of the blocks that all requests need at once")
    parser.add_argument("--max-tokens", type=int, default=20)
    parser.add_argument("--references", type=Path, help="a file that keeps what transformers answered")
    args = parser.parse_args()
    loaded = load_model(EngineConfig(model=args.model, dtype="float32"), get_backend("torch"))
    rows = stress(loaded, args.requests, args.max_tokens, args.pool, args.references)
    print("".join(f"{name:>12}" for name in Row._fields))
    for row in rows:
        print("".join(f"{value:>12}" for value in row))
    failures = [failure for row in rows for failure in row.failures()]
    print("\n".join(failures), file=sys.stderr, end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
