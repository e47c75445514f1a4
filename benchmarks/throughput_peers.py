"""Who takes part in `throughput.py`: the engine, transformers static and continuous, llama.cpp. All greedy, no stops.

Every peer has `run(jobs)`: serve the jobs as they arrive and return the tokens of each, in order. Peers may be slow in
their own ways only: same weights, same prompts, same threads, everything loaded and warmed up before.
"""

import itertools
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvscope.engine.build import build_engine, prepare
from kvscope.engine.config import EngineConfig
from kvscope.engine.model_loader import LoadedModel
from kvscope.events.types import SamplingParams
from kvscope.transport.publisher import Publisher

MAX_BATCH = 16  # of the static batches and of the engine's sequences
NEVER = -1  # an end-of-sequence token that no model has


class Job(NamedTuple):
    """A request: when it comes, in seconds after the start, its prompt, and how many tokens it wants."""

    arrival_s: float
    prompt: list[int]
    new_tokens: int


class Kvscope:
    """The engine with its default settings but for prefix caching; its events go to a publisher."""

    def __init__(self, loaded: LoadedModel) -> None:
        config = EngineConfig(
            num_gpu_blocks_override=512,  # 8,192 tokens, as many as the pool of `TUNED` has
            enable_prefix_caching=False,
            max_num_batched_tokens=2048,
            max_num_seqs=MAX_BATCH,
        )
        self._publisher = Publisher("inproc://throughput")
        self._engine = build_engine(prepare(config, loaded=loaded), self._publisher)
        self._numbers = itertools.count()

    def run(self, jobs: Sequence[Job]) -> list[list[int]]:
        started, waiting, requests = time.perf_counter(), list(jobs), []
        while waiting or self._engine.has_work():
            while waiting and waiting[0].arrival_s <= time.perf_counter() - started:
                job = waiting.pop(0)
                params = SamplingParams(temperature=0.0, max_tokens=job.new_tokens, ignore_eos=True)
                requests.append(self._engine.submit("", params, f"r{next(self._numbers)}", job.prompt))
            if self._engine.has_work():
                self._engine.step()
            else:
                time.sleep(0.001)
        return [list(request.sequences[0].generated) for request in requests]

    def close(self) -> None:
        """End the publisher's thread."""
        self._publisher.close()


@dataclass
class Generate:
    """transformers' `generate` as a static batch: what has arrived runs together, padded, to the end of the longest."""

    model: Any

    def run(self, jobs: Sequence[Job]) -> list[list[int]]:
        started, waiting, done = time.perf_counter(), list(jobs), []
        while waiting:
            now = time.perf_counter() - started
            batch = [job for job in waiting[:MAX_BATCH] if job.arrival_s <= now]
            if not batch:
                time.sleep(0.001)
                continue
            waiting = waiting[len(batch) :]
            done += self._generate(batch)
        return done

    def _generate(self, batch: list[Job]) -> list[list[int]]:
        longest = max(len(job.prompt) for job in batch)
        ids = torch.tensor([[0] * (longest - len(job.prompt)) + job.prompt for job in batch])
        mask = torch.tensor([[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
        new_tokens = max(job.new_tokens for job in batch)
        output = self.model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, eos_token_id=NEVER, pad_token_id=0
        )
        return [row[longest : longest + job.new_tokens].tolist() for row, job in zip(output, batch, strict=True)]


# What serves `generate_batch` best here; its own choice, made for GPUs, is a competitor of its own. No competitor finds
# a prefix again: all rounds have the same prompts.
TUNED = {"max_batch_tokens": 2048, "num_blocks": 256, "page_size": 32, "allow_block_sharing": False}


class GenerateBatch:
    """transformers' own continuous batching over paged KV, requests added as they arrive; one manager for all runs."""

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(do_sample=False, max_new_tokens=64, eos_token_id=NEVER, pad_token_id=0)
        pool = ContinuousBatchingConfig(**settings)
        self._manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=pool)
        with torch.inference_mode():  # which its thread takes over
            self._manager.start()
        self._numbers = itertools.count()

    def run(self, jobs: Sequence[Job]) -> list[list[int]]:
        started, names, tokens = time.perf_counter(), [], {}
        for job in jobs:
            time.sleep(max(job.arrival_s - (time.perf_counter() - started), 0))
            names.append(f"r{next(self._numbers)}")
            self._manager.add_request(job.prompt, request_id=names[-1], max_new_tokens=job.new_tokens)
        while len(tokens) < len(jobs):
            result = self._manager.get_result(timeout=600)
            if result is None or result.error:
                raise RuntimeError(f"generate_batch stopped: {result and result.error}")
            tokens[result.request_id] = result.generated_tokens
        return [tokens[name] for name in names]

    def close(self) -> None:
        """End the manager's thread."""
        self._manager.stop(block=True)


@dataclass
class GenerateBatchDefaults:
    """The same as its documentation calls it, with nothing chosen: all prompts at once, one number of new tokens.

    Each run so begins with a manager and a pool of its own.
    """

    model: Any

    def run(self, jobs: Sequence[Job]) -> list[list[int]]:
        from transformers import GenerationConfig

        config = GenerationConfig(
            do_sample=False, max_new_tokens=jobs[0].new_tokens, eos_token_id=NEVER, pad_token_id=0
        )
        outputs = self.model.generate_batch([job.prompt for job in jobs], generation_config=config).values()
        tokens = {tuple(output.prompt_ids): output.generated_tokens for output in outputs}
        return [tokens[tuple(job.prompt)] for job in jobs]


class LlamaCpp:
    """llama.cpp in a process of its own (see llama_cpp_peer.py): jobs that arrive together, as one batch."""

    def __init__(self, python: Path, model_file: Path, num_threads: int) -> None:
        script = Path(__file__).with_name("llama_cpp_peer.py")
        self._child = subprocess.Popen(
            [python, script, model_file, str(num_threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, jobs: Sequence[Job]) -> list[list[int]]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        request = {"prompts": [job.prompt for job in jobs], "new_tokens": jobs[0].new_tokens}
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            raise RuntimeError("llama.cpp ended; what it said is above")
        tokens: list[list[int]] = json.loads(answer)
        return tokens

    def close(self) -> None:
        """End the child."""
        self._child.terminate()
        self._child.wait()
