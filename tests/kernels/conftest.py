"""Paged pools to compute attention on."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from paged_case import PagedCase, build_case


@pytest.fixture
def make_case() -> Callable[..., PagedCase]:
    """Builds a `PagedCase`, see `build_case`."""
    return build_case
