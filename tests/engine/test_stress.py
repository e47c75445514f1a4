"""The stress campaign on the embedded model: too little memory, prefixes, beams, and the answers of transformers."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from kvscope.engine.model_loader import LoadedModel

SCRIPT = Path(__file__).parents[1] / "campaigns" / "stress.py"


@pytest.fixture(scope="module")
def stress() -> Any:
    spec = importlib.util.spec_from_file_location("stress", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["stress"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_equal_to_transformers_at_a_third_of_the_memory(stress: Any, tiny: LoadedModel) -> None:
    rows = stress.stress(tiny, num_requests=12, max_tokens=16, pool=0.3)
    assert [failure for row in rows for failure in row.failures()] == []
    assert [row.requests for row in rows] == [12, 12]
