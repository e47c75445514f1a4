"""The type of numbers on a CPU: as asked for, else as the checkpoint and a probe of the machine say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from kvscope.engine import dtype_probe, model_loader
from kvscope.engine.config import EMBEDDED_MODEL, EngineConfig
from kvscope.engine.dtype_probe import faster_dtype, typical_linear
from kvscope.engine.model_hub import resolve_model

LARGE = {"hidden_size": 640, "intermediate_size": 1600, "num_hidden_layers": 12, "num_attention_heads": 10}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kernels"))


@pytest.fixture
def milliseconds(monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, float]:
    """How long a layer takes in either type, by a clock that nothing else moves."""
    now, takes = [0.0], {torch.float32: 1.0, torch.bfloat16: 0.5}

    def layer(_in: int, _out: int, dtype: torch.dtype) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + takes[dtype] / 1e3)

    monkeypatch.setattr(dtype_probe, "_layer", layer)
    monkeypatch.setattr(dtype_probe.time, "perf_counter", lambda: now[0])
    return takes


@pytest.mark.parametrize(("took", "chosen"), [(0.5, torch.bfloat16), (0.95, torch.float32), (3.0, torch.float32)])
def test_bfloat16_must_be_clearly_faster(milliseconds: Any, took: float, chosen: torch.dtype) -> None:
    milliseconds[torch.bfloat16] = took
    assert faster_dtype(64, 64) == (chosen, pytest.approx({torch.float32: 1.0, torch.bfloat16: took}))


def test_the_next_start_has_the_same_type(milliseconds: Any) -> None:
    """Though the machine is busy then."""
    first = faster_dtype(64, 64)
    milliseconds[torch.bfloat16] = 3.0
    assert faster_dtype(64, 64) == first
    assert faster_dtype(64, 32)[0] is torch.float32


def test_both_types_are_really_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype_probe, "BUDGET_S", 0)
    _, milliseconds = faster_dtype(96, 1 << 30)  # a part of it
    assert all(0 < took < float("inf") for took in milliseconds.values())
    for dtype in milliseconds:
        assert dtype_probe._layer(96, 32, dtype)().equal(torch.full((16, 32), 48, dtype=dtype))


def test_the_typical_layer_is_not_the_head() -> None:
    with torch.device("meta"):
        model = nn.ModuleList(
            [nn.Linear(8, 90), nn.Linear(8, 20), nn.Linear(8, 20), nn.Linear(20, 4), nn.Linear(20, 4)]
        )
    assert typical_linear(model) == (8, 20)
    assert typical_linear(model[:1]) == (8, 90)


@pytest.mark.parametrize(
    ("sizes", "stored", "asked", "expected"),
    [
        (LARGE, torch.float16, "auto", torch.bfloat16),
        (LARGE, torch.bfloat16, "auto", torch.bfloat16),
        (LARGE, torch.float32, "auto", torch.float32),  # would lose what was stored
        (LARGE, torch.bfloat16, "float32", torch.float32),
        (
            {**LARGE, "num_hidden_layers": 1, "vocab_size": 99},
            torch.bfloat16,
            "auto",
            torch.float32,
        ),  # too small to gain
    ],
)
def test_a_probe_where_the_checkpoint_has_16_bits(
    milliseconds: Any, tmp_path: Path, capsys: Any, sizes: Any, stored: torch.dtype, asked: Any, expected: torch.dtype
) -> None:
    LlamaConfig(**sizes, dtype=stored).save_pretrained(tmp_path)
    assert model_loader._choose_dtype(str(tmp_path), EngineConfig(dtype=asked), CPU) == expected
    said = "kvscope: --dtype bfloat16: a layer takes 1.00 ms in float32 and 0.50 ms in bfloat16 on this CPU\n"
    assert capsys.readouterr().err == (said if expected == torch.bfloat16 else "")


def test_the_embedded_model_stays_exact(milliseconds: Any) -> None:
    assert model_loader._choose_dtype(resolve_model(EMBEDDED_MODEL), EngineConfig(), CPU) == torch.float32
