"""Architectures we never named: each runs token for token like transformers' own generate, or is refused by name.

The models are tiny and random; prompts are longer than every sliding window.
"""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvscope.engine.build import prepare
from kvscope.engine.config import EMBEDDED_MODEL, ConfigError, EngineConfig
from kvscope.engine.model_hub import resolve_model
from kvscope.engine.model_loader import LoadedModel, load_model
from kvscope.events.types import SamplingParams
from kvscope.kernels.backend import get_backend

PROMPT = "ROMEO:\nMy lord, what light through yonder window breaks? It is the east, and Juliet is the sun."
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 = {"vocab_size": 1024, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    "mistral, window 8": ("MistralConfig", {**SMALL, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", SMALL),
    "qwen3, head size 24": ("Qwen3Config", {**SMALL, "head_dim": 24}),
    "gemma2, soft cap, every other layer with window 8": (
        "Gemma2Config",
        {**SMALL, "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3, windows": (
        "Gemma3TextConfig",
        {**SMALL, "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 3},
    ),
    "phi3": ("Phi3Config", {**SMALL, "sliding_window": None}),
    "olmo2": ("Olmo2Config", SMALL),
    "granite, own scale": ("GraniteConfig", {**SMALL, "attention_multiplier": 0.1}),
    "starcoder2": ("Starcoder2Config", SMALL),
    "gpt2, learned positions": ("GPT2Config", GPT2),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "deepseek_v3, K of 24 and V of 16": (
        "DeepseekV3Config",
        {
            **SMALL,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 3,
        },
    ),
}


def save(config: Any, directory: Path) -> None:
    """A random model of this configuration, with the embedded model's tokenizer beside it."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(resolve_model(EMBEDDED_MODEL)).save_pretrained(directory)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", RUNS)
def test_runs_like_generate(real_engine: Any, tmp_path: Path, name: str, block_size: int) -> None:
    config_class, values = RUNS[name]
    save(getattr(transformers, config_class)(**values), tmp_path)
    loaded = load_model(EngineConfig(model=str(tmp_path)), get_backend("torch"))
    expected = generate(loaded)
    fixture = real_engine(loaded, block_size=block_size, max_num_batched_tokens=11)
    request = fixture.engine.submit(PROMPT, SamplingParams(n=2, temperature=0.0, max_tokens=16, ignore_eos=True), "r")
    fixture.run()
    for sequence in request.sequences:
        assert sequence.generated == expected or min(sequence.choice_margins) < 1e-4


def generate(loaded: Any) -> list[int]:
    model, ids = loaded.model, loaded.tokenizer(PROMPT, return_tensors="pt")
    model.set_attn_implementation("eager")
    output = model.generate(**ids, do_sample=False, max_new_tokens=16, min_new_tokens=16, pad_token_id=0)
    model.set_attn_implementation("kvscope_paged")
    tokens: list[int] = output[0, ids["input_ids"].shape[1] :].tolist()
    return tokens


LONG_WINDOW = 40  # longer than what the logits are compared over

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("MambaConfig", {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2}, "Mamba"),
    "bloom, alibi": ("BloomConfig", {"vocab_size": 1024, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "Bloom"),
    "gpt_oss, attention sinks": (
        "GptOssConfig",
        {**SMALL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        "s_aux",
    ),
    "phimoe, a window it does not pass on": (
        "PhimoeConfig",
        {**SMALL, "sliding_window": LONG_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        "Phimoe.* sliding window of 40 .*--max-model-len 40",
    ),
    "llama4, chunks": (
        "Llama4TextConfig",
        {
            **SMALL,
            "head_dim": 16,
            "attention_chunk_size": LONG_WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
        },
        "Llama4.* chunks of 40 .*--max-model-len 40",
    ),
    "qwen3_next, linear attention": (
        "Qwen3NextConfig",
        {**SMALL, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "Qwen3Next",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(tmp_path: Path, name: str) -> None:
    config_class, values, word = REFUSED[name]
    save(getattr(transformers, config_class)(**values), tmp_path)
    with pytest.raises(ConfigError, match=word) as caught:
        load_model(EngineConfig(model=str(tmp_path)), get_backend("torch"))
    assert "\n" not in str(caught.value)


def test_a_wrong_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard behind the guard: attention that ignores the window is caught by its logits."""
    save(transformers.MistralConfig(**{**SMALL, "sliding_window": 8}), tmp_path)
    backend = get_backend("torch")
    right = backend.attention
    monkeypatch.setattr(
        backend, "attention", lambda *args, **kwargs: right(*args, **{**kwargs, "sliding_window": None})
    )
    with pytest.raises(ConfigError, match="MistralForCausalLM cannot run on paged KV: its logits would differ"):
        load_model(EngineConfig(model=str(tmp_path)), backend)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./no-such-directory", "no model directory at ./no-such-directory"),
        ("nobody/no-such-model", "'nobody/no-such-model' is neither .* and HF_HUB_OFFLINE is set; unset it"),
        ("no-such-name", "'no-such-name' is neither .* and HF_HUB_OFFLINE is set; unset it"),
        ("no such name!", "nor a hub id"),
    ],
)
def test_an_unknown_model_names_the_fix(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(EngineConfig(model=model), get_backend("torch"))


def test_a_window_that_never_matters_is_no_obstacle(tmp_path: Path) -> None:
    config_class, values, _ = REFUSED["phimoe, a window it does not pass on"]
    save(getattr(transformers, config_class)(**values), tmp_path)
    config = EngineConfig(model=str(tmp_path), max_model_len=LONG_WINDOW)
    assert len(load_model(config, get_backend("torch")).layers) == 3


def test_rotary_embeddings_that_depend_on_the_batch_are_cut_off_before_they_do(tmp_path: Path) -> None:
    """longrope changes its factors for all sequences of a forward pass, once one of them is long."""
    factors = [1.0 + i / 8 for i in range(8)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": factors,
        "original_max_position_embeddings": 64,
    }
    save(transformers.Phi3Config(**{**SMALL, "rope_parameters": rope}, original_max_position_embeddings=64), tmp_path)
    assert load_model(EngineConfig(model=str(tmp_path)), get_backend("torch")).max_model_len == 64


def test_a_hub_out_of_reach_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="the model hub does not answer; check the network and HF_ENDPOINT"):
        load_model(EngineConfig(model="nobody/no-such-model"), get_backend("torch"))


def test_a_directory_without_config_or_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model(EngineConfig(model=str(tmp_path)), get_backend("torch"))
    save(transformers.LlamaConfig(**SMALL), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="has no usable tokenizer"):
        load_model(EngineConfig(model=str(tmp_path)), get_backend("torch"))


def test_a_missing_weight_is_not_made_up(tmp_path: Path) -> None:
    """transformers fills the gap with random numbers; greedy output then differs from run to run."""
    save(transformers.LlamaConfig(**SMALL), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"weights are missing: model\.layers\.1\.self_attn\.q_proj\.weight"):
        load_model(EngineConfig(model=str(tmp_path)), get_backend("torch"))


def test_nan_weights_are_refused(tmp_path: Path) -> None:
    save(transformers.LlamaConfig(**SMALL), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="logits that are not finite"):
        load_model(EngineConfig(model=str(tmp_path)), get_backend("torch"))


def test_code_in_a_model_directory_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(transformers.LlamaConfig(**SMALL), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.E", "AutoModelForCausalLM": "evil.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what a user might answer, were he asked
    with pytest.raises(ConfigError):
        load_model(EngineConfig(model=str(tmp_path)), get_backend("torch"))
    assert not (tmp_path / "ran").exists()


def test_a_pool_larger_than_memory_is_refused_with_the_numbers(tiny: LoadedModel) -> None:
    config = EngineConfig(num_gpu_blocks_override=1 << 24, block_size=64)
    with pytest.raises(ConfigError, match=r"a pool of 16777216 blocks takes 3072\.0 GiB, .* GiB are free on cpu"):
        prepare(config, loaded=tiny)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "--block-size must be at least 1"),
        ({"block_size": 10**10}, "--block-size is at most 65536"),
        ({"max_num_seqs": 10**20}, "--max-num-seqs is at most 1048576"),
        ({"max_num_batched_tokens": 10**20}, "--max-num-batched-tokens is at most 1073741824"),
        ({"max_model_len": 10**20}, "--max-model-len is at most 1073741824"),
        ({"seed": 1 << 64}, "--seed is a whole number from 0"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization is a share"),
        ({"max_model_len": 0}, "--max-model-len must be at least 1"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes)


def test_weights_cut_in_half(tmp_path: Path) -> None:
    save(transformers.LlamaConfig(**SMALL), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ConfigError, match="cannot load the model in") as caught:
        load_model(EngineConfig(model=str(tmp_path)), get_backend("torch"))
    assert "\n" not in str(caught.value)
