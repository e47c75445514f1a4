"""The shape of the model, the dropout it trains with, and the loss it is measured by."""

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 512


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


def summed_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the cross-entropy of every next token in `windows` `[n, length + 1]`, summed, in nats."""
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
