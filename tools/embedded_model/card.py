"""Measures the written model as anyone who loads it would, and writes its log, card and checksums."""

import hashlib
import json
import math
from pathlib import Path

import torch
from corpus import TEXT_IN_WHEEL, TEXT_SHA256, Corpus
from model import CONTEXT, held_out_loss
from transformers import AutoModelForCausalLM

TEMPLATE = Path(__file__).with_name("card.md")


def write_card(out: Path, corpus: Corpus, recipe: object, rows: list[dict]) -> None:
    """Close the log of the run with the loss of the files in `out`, and fill in the card."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    loss, loss_128 = (held_out_loss(model, corpus.held_out, length) for length in (CONTEXT, 128))
    shipped = {"shipped": True, "step": rows[-1]["step"], "held_out_loss": round(loss, 4)}
    (out / "training_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, shipped]))
    figures = {
        "num_params": model.num_parameters(),
        "num_weight_bytes": (out / "model.safetensors").stat().st_size,
        "text_in_wheel": TEXT_IN_WHEEL,
        "text_sha256": TEXT_SHA256,
        "num_train_tokens": corpus.num_train_tokens,
        "num_held_out_tokens": len(corpus.held_out),
        "num_held_out_chars": len(corpus.held_out_text),
        "minutes_taken": rows[-1]["wall_s"] / 60,
        "loss": loss,
        "loss_128": loss_128,
        "bits": bits_per_char(loss, corpus),
        "bits_128": bits_per_char(loss_128, corpus),
        "uniform_loss": math.log(model.config.vocab_size),
    }
    card = TEMPLATE.read_text().format(**figures, config=model.config, recipe=recipe)
    (out / "MODEL_CARD.md").write_text(card)
    print(f"held-out loss {loss:.4f} nats per token, {figures['bits']:.4f} bits per character", flush=True)


def bits_per_char(nats_per_token: float, corpus: Corpus) -> float:
    return nats_per_token * len(corpus.held_out) / math.log(2) / len(corpus.held_out_text)


def write_sums(out: Path) -> None:
    files = sorted(path for path in out.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines))
