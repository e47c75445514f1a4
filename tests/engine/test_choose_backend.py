"""Which attention an engine gets when none is asked for."""

import sys

import pytest

from kvscope.engine.build import choose_backend
from kvscope.engine.config import EngineConfig

ON_CPU = EngineConfig(device="cpu")


def test_numba_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_backend(ON_CPU).name == "numba"
    assert capsys.readouterr().err == ""


def test_torch_without_numba_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kvscope.kernels.numba_backend", None)
    assert choose_backend(ON_CPU).name == "torch"
    assert capsys.readouterr().err.startswith("kvscope: attention by torch, which is several times slower: no numba")
