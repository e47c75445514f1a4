"""Modules that stand for a model's own compute what those do, and only stand for what they are equal to."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvscope.engine import fast_layers, model_loader
from kvscope.engine.config import EngineConfig
from kvscope.engine.fast_layers import FastGatedMLP, FastNorm, restore, speed_up
from kvscope.kernels.backend import get_backend

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
# Which of a layer's modules are replaced: norms, MLPs, rotations.
EXPECTED = {
    "LlamaConfig": (5, 2, 2),
    "Qwen3Config": (9, 2, 2),  # Q and K have norms too
    "Gemma2Config": (9, 0, 2),  # weights around 1, and gelu
    "OlmoConfig": (0, 2, 2),  # its norm has no weight
    "GPTNeoXConfig": (0, 0, 2),  # layer norm, no gate; only a part of each head is rotated, which its own function does
}


def small_model(config_class: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(5)
    sizes = {
        k: v
        for k, v in SIZES.items()
        if config_class != "GPTNeoXConfig" or k not in ("head_dim", "num_key_value_heads")
    }
    config = getattr(transformers, config_class)(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for module in model.modules():
        if "Norm" in type(module).__name__ and hasattr(module, "weight"):
            module.weight.data.normal_()
    return model


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config_class", EXPECTED)
def test_logits_are_the_models_own(config_class: str, dtype: torch.dtype) -> None:
    model = small_model(config_class, dtype)
    ids = torch.arange(3, 40)[None]
    own = model(ids, use_cache=False).logits.float()
    undo = speed_up(model)
    kinds = [type(module) for module in model.modules()]
    rotations = sum("forward" in vars(module) for module in model.modules())
    assert (kinds.count(FastNorm), kinds.count(FastGatedMLP), rotations) == EXPECTED[config_class]
    fast = model(ids, use_cache=False).logits.float()
    assert (fast - own).norm() / own.norm() < (2e-2 if dtype == torch.bfloat16 else 1e-5)
    restore(undo)
    assert model(ids, use_cache=False).logits.float().equal(own)
    assert not {FastNorm, FastGatedMLP} & {type(module) for module in model.modules()}
    assert not any("forward" in vars(module) for module in model.modules())


@torch.inference_mode()
def test_inputs_of_other_shapes_go_to_the_models_own_modules() -> None:
    """As when the model is used without paging: several sequences at once, and Q that lies otherwise."""
    model = small_model("LlamaConfig", torch.float32)
    fast = copy.deepcopy(model)
    speed_up(fast)
    ids = torch.arange(2, 62).view(3, 20)
    torch.testing.assert_close(fast(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert fast.generate(ids, max_new_tokens=5).equal(model.generate(ids, max_new_tokens=5))


class AlmostNorm(nn.Module):
    """What looks like an RMS norm and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / x.abs().mean(-1, keepdim=True)


def test_what_only_looks_alike_stays() -> None:
    model = nn.Sequential(AlmostNorm(), nn.LayerNorm(32, bias=False))
    assert speed_up(model) == []


def test_a_model_that_gets_it_wrong_afterwards_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fast_layers.cpu_layers.rms_norm
    as_tried = 4  # rows, when a module is compared with its replacement
    monkeypatch.setattr(
        fast_layers.cpu_layers, "rms_norm", lambda x, *rest: right(x, *rest) * (1 if x.shape[1] == as_tried else 2)
    )
    loaded = model_loader.load_model(EngineConfig(device="cpu"), get_backend("torch"))
    assert not any(isinstance(module, FastNorm | FastGatedMLP) for module in loaded.model.modules())


@pytest.mark.parametrize("which", ["none", "cos", "sin", "both", "one angle for all tokens", "q", "k"])
def test_what_lies_otherwise_is_rotated_by_the_models_own_function(which: str) -> None:
    """Angles and heads that are not contiguous: as columns of wider rows, or repeated without memory of their own."""
    asked: list[str] = []

    def own(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(which)
        return apply_rotary_pos_emb(q, k, cos, sin)

    rotate_both = fast_layers._fast_rotation(own)
    assert rotate_both is not None
    torch.manual_seed(8)
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    cos, sin = torch.rand(2, 1, 5, 16)
    if which in ("cos", "both"):
        cos = torch.rand(1, 5, 32)[..., ::2]
    if which in ("sin", "both"):
        sin = torch.rand(1, 5, 24)[..., :16]
    if which == "one angle for all tokens":
        cos, sin = (angles[:, :1].expand(1, 5, 16) for angles in (cos, sin))
    if which == "q":
        q = torch.randn(1, 4, 5, 32)[..., ::2]
    if which == "k":
        k = torch.randn(1, 2, 16, 5).transpose(2, 3)
    asked.clear()
    found, expected = rotate_both(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin)
    assert bool(asked) == (which != "none")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
