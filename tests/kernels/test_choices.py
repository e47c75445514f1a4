"""Answers of probes, kept on disk."""

import math

import numba
import pytest
import torch

from kvscope.kernels import choices
from kvscope.kernels.choices import remembered


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels" / "choices"


def never():
    raise AssertionError("asked again")


@pytest.mark.parametrize("answer", [3, math.inf, [1.5, 0.25]])
def test_a_probe_is_made_once(answer):
    assert remembered("which", lambda: answer) == answer
    assert remembered("which", never) == answer
    assert remembered("another", lambda: 4) == 4


def test_it_holds_for_a_version_of_torch_and_a_number_of_threads(monkeypatch):
    remembered("which", lambda: 1)
    monkeypatch.setattr(torch, "__version__", "0")
    assert remembered("which", lambda: 2) == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert remembered("which", lambda: 3) == 3


@pytest.mark.parametrize("content", [b"", b"{", b"7", b'"ab"', b"\xff"])
def test_what_cannot_be_read_is_asked_again(content, directory):
    remembered("which", lambda: 1)
    (file,) = directory.iterdir()
    file.write_bytes(content)
    assert remembered("which", lambda: 2) == 2
    assert remembered("which", never) == 2


def test_of_two_who_ask_at_once_both_have_the_first_answer():
    assert remembered("which", lambda: remembered("which", lambda: 1) + 1) == 1


def test_where_nothing_can_be_kept_every_start_asks(directory):
    directory.parent.write_text("not a directory")
    assert [remembered("which", lambda count=count: count) for count in (1, 2)] == [1, 2]
    assert choices._directory() == directory
