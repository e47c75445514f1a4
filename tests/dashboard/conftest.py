"""Makes the pocket engine importable: with importlib import mode a test folder is not a package."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def words_with_every_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred pictures a second, and each of them whole: a test need not wait for the words."""
    monkeypatch.setattr("kvscope.dashboard.cadence.WORDS_PER_S", 1_000)
