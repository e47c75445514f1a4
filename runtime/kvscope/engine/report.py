"""What a headless run prints: a JSON contract for scripts, and plain text for people."""

import json
from collections.abc import Sequence as ListOf

from kvscope.engine.engine import Engine
from kvscope.engine.request import Request, Sequence
from kvscope.events.text import counted, make_printable


def json_report(engine: Engine, requests: ListOf[Request], problems: ListOf[str]) -> str:
    """The contract: requests with their sequences, the pool afterwards, and the audit."""
    report = {
        "requests": [
            {
                "id": request.request_id,
                "prompt": request.prompt,
                "prompt_token_ids": request.prompt_token_ids,
                "sequences": [
                    {
                        "index": sequence.index,
                        "token_ids": sequence.generated,
                        "text": sequence.text,
                        "finish_reason": sequence.finish_reason,
                        **({} if sequence.score is None else {"score": sequence.score}),
                    }
                    for sequence in request.sequences
                ],
            }
            for request in requests
        ],
        "memory": _memory(engine),
        "audit": {"ok": not problems, "findings": list(problems)},
    }
    return json.dumps(report)


def text_report(engine: Engine, requests: ListOf[Request], problems: ListOf[str]) -> str:
    """Outputs and the memory summary; foreign text is made printable, line breaks are kept."""
    lines = []
    for request in requests:
        lines.append(
            f"{request.request_id}  {make_printable(request.prompt)!r}  "
            f"{counted(len(request.prompt_token_ids), 'prompt token')}"
        )
        for sequence in request.sequences:
            ended = f"{sequence.finish_reason}{_score(sequence)}"
            if sequence.finish_reason == "length" and len(sequence.generated) < request.params.max_tokens:
                ended += f" (--max-model-len {engine.info.max_model_len})"
            lines.append(f"  {sequence.sequence_id}  {counted(len(sequence.generated), 'token')}, {ended}")
            lines += [f"    | {make_printable(line)}" for line in sequence.text.splitlines()]
    memory = _memory(engine)
    lines += [
        (
            f"memory    {counted(memory['num_blocks'], 'block')} of {memory['block_size']} slots: "
            f"{memory['free']} free, {memory['held']} held, {memory['cached']} cached"
        ),
        (
            f"          {counted(memory['copies'], 'block')} copied on write, "
            f"{counted(memory['preemptions'], 'preemption')}"
        ),
        (
            f"tokens    {engine.counters.generated_tokens} generated, {engine.counters.computed_tokens} computed, "
            f"{counted(engine.step_number, 'step')}{_graph_steps(engine)}"
        ),
        f"audit     {'ok' if not problems else f'{len(problems)} findings'}",
        *(f"  {make_printable(problem)}" for problem in problems),
    ]
    return "\n".join(lines)


def _graph_steps(engine: Engine) -> str:
    return f", {engine.num_graph_steps} of them replayed" if engine.num_graph_steps else ""


def _score(sequence: Sequence) -> str:
    return "" if sequence.score is None else f", score {sequence.score:.4f}"


def _memory(engine: Engine) -> dict[str, int]:
    pool = engine.scheduler.pool
    return {
        "num_blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "free": pool.num_free_blocks,
        "held": pool.num_blocks - pool.num_available_blocks,
        "cached": pool.num_cached_blocks,
        "copies": engine.counters.copies,
        "preemptions": engine.counters.preemptions,
    }
