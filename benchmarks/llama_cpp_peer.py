"""llama.cpp as a peer of `throughput.py`: reads requests as JSON lines, answers with the tokens of each prompt.

Run by the Python of an environment that has `llama-cpp-python`, built from its source package for this machine:

    python -m venv llama && llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python
    python benchmarks/throughput.py --llama-python llama/bin/python

All prompts of a request are one batch, each a sequence of its own, decoded greedily for `new_tokens` tokens.
"""

import ctypes
import json
import sys

import llama_cpp
import numpy as np

CONTEXT_TOKENS, MAX_SEQUENCES, BATCH_TOKENS = 8192, 16, 2048


def decode(context, tokens, positions, sequences, wants_logits):
    """One forward pass; returns the greedy token of each row that wants one."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, row in enumerate(zip(tokens, positions, sequences, wants_logits, strict=True)):
        batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.logits[i] = row
        batch.n_seq_id[i] = 1
    if llama_cpp.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context)))
    best = [
        int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (size,)).argmax())
        for i, wanted in enumerate(wants_logits)
        if wanted
    ]
    llama_cpp.llama_batch_free(batch)
    return best


def generate(context, prompts, new_tokens):
    """Greedy tokens of each prompt."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
    rows = [
        (token, place, sequence, place == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for place, token in enumerate(prompt)
    ]
    newest = []
    for first in range(0, len(rows), BATCH_TOKENS):
        newest += decode(context, *zip(*rows[first : first + BATCH_TOKENS], strict=True))
    generated = [[token] for token in newest]
    for step in range(new_tokens - 1):
        positions = [len(prompt) + step for prompt in prompts]
        newest = decode(context, newest, positions, range(len(prompts)), [True] * len(prompts))
        for tokens, token in zip(generated, newest, strict=True):
            tokens.append(token)
    return generated


def main() -> None:
    path, num_threads = sys.argv[1], int(sys.argv[2])
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT_TOKENS, BATCH_TOKENS, 512
    params.n_seq_max, params.n_threads, params.n_threads_batch = MAX_SEQUENCES, num_threads, num_threads
    params.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, params)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(generate(context, request["prompts"], request["new_tokens"])), flush=True)


if __name__ == "__main__":
    main()
