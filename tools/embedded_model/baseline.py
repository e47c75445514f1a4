#!/usr/bin/env python3
"""Train a plain small Llama on the same split, and print its held-out loss: the figure the card compares with.

0.87 M parameters, AdamW under a cosine, 1,200 steps of 16 windows of 128 tokens, none of the measures in `train.py`.
"""

import argparse
import math
from pathlib import Path

import torch
from card import bits_per_char
from corpus import encode, read_text, split, train_tokenizer
from model import CONTEXT, held_out_loss, summed_loss
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

NUM_STEPS, NUM_WARMUP_STEPS = 1200, 60
NUM_WINDOWS, WINDOW = 16, 128
PEAK_LR = 0.002
VOCAB_SIZE = 1024


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def lr_at(step: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - NUM_WARMUP_STEPS) / (NUM_STEPS - NUM_WARMUP_STEPS)))
    return PEAK_LR * min((step + 1) / NUM_WARMUP_STEPS, cosine)


def train(model: LlamaForCausalLM, tokens: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    model.train()
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        starts = torch.randint(len(tokens) - WINDOW, (NUM_WINDOWS, 1))
        loss = summed_loss(model, tokens[starts + torch.arange(WINDOW + 1)]) / (NUM_WINDOWS * WINDOW)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="tiny-Shakespeare; fetched with pip when absent")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    text = read_text(args.text)
    tokenizer = train_tokenizer(split(text)[0], VOCAB_SIZE, CONTEXT)
    corpus = encode(tokenizer, text)
    model = build_model()
    print(f"{model.num_parameters():,} parameters", flush=True)
    train(model, torch.tensor(tokenizer(corpus.train_text, verbose=False)["input_ids"]))
    for length in (WINDOW, CONTEXT):
        loss = held_out_loss(model, corpus.held_out, length)
        bits = bits_per_char(loss, corpus)
        print(f"windows of {length}: {loss:.4f} nats per token, {bits:.4f} bits per character", flush=True)


if __name__ == "__main__":
    main()
