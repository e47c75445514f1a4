"""The three source roots share one import namespace, and nothing dangerous is in the product."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE_ROOTS = ("runtime", "dashboard", "kernels")
SOURCES = sorted(path for name in SOURCE_ROOTS for path in (ROOT / name).rglob("*.py"))


@pytest.mark.parametrize("name", SOURCE_ROOTS)
def test_source_roots_are_namespaces(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists()
    assert not (ROOT / name / "kvscope" / "__init__.py").exists()
    assert [path.name for path in (ROOT / name / "kvscope").iterdir() if path.is_file()] == []


def test_every_package_says_what_it_is_and_that_it_is_typed() -> None:
    packages = [path for name in SOURCE_ROOTS for path in (ROOT / name / "kvscope").iterdir() if path.is_dir()]
    packages = [path for path in packages if path.name != "__pycache__"]
    assert {path.name for path in packages} == {"events", "engine", "transport", "analysis", "dashboard", "kernels"}
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["packages"]
    assert {f"kvscope.{path.name}" for path in packages} == {*checked}  # of "kvscope" mypy would read one root alone
    for package in packages:
        assert (package / "__init__.py").read_text(encoding="utf-8").startswith('"""')
        assert (package / "py.typed").exists()


# Each of these runs code that came in from outside: a message, a file, a model.
@pytest.mark.parametrize(
    "pattern",
    [
        r"\bpickle\b",
        r"\btorch\.load\b",
        r"\brecv_pyobj\b",
        r"\bsend_pyobj\b",
        r"\btrust_remote_code\b(?! *= *False)",
        r"(?<![\w.])eval\(",
        r"(?<![\w.])exec\(",
    ],
)
def test_nothing_executes_what_came_from_outside(pattern: str) -> None:
    assert SOURCES
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []


def test_readme_names_every_package() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("events", "engine", "transport", "analysis", "dashboard", "kernels"):
        assert f"kvscope.{name}" in readme
