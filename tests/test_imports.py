"""What an import drags in, looked at in a fresh interpreter."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "tokenizers", "safetensors")
_PROBE = """
import importlib, json, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", []), name + "."):
        importlib.import_module(found.name)
print(json.dumps(sorted(sys.modules)))
"""


def modules_after_importing(*names: str) -> set[str]:
    """Every module loaded once these, and the modules directly inside them, have been imported."""
    result = subprocess.run([sys.executable, "-c", _PROBE, *names], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


@pytest.mark.parametrize(
    "name",
    ["kvscope.events", "kvscope.transport", "kvscope.transport.recording", "kvscope.analysis", "kvscope.dashboard"],
)
def test_the_viewer_loads_no_tensors(name: str) -> None:
    assert modules_after_importing(name).isdisjoint(HEAVY)


def test_events_load_no_sockets_and_no_screen() -> None:
    assert modules_after_importing("kvscope.events").isdisjoint({*HEAVY, "zmq", "textual", "mcap"})


def test_analysis_loads_no_sockets_and_no_screen() -> None:
    assert modules_after_importing("kvscope.analysis").isdisjoint({"zmq", "textual"})


@pytest.mark.parametrize(
    "name",
    [
        "kvscope.engine.config",
        "kvscope.engine.block_pool",
        "kvscope.engine.block_tables",
        "kvscope.engine.scheduler",
        "kvscope.engine.engine",
        "kvscope.engine.simulation",
    ],
)
def test_the_engines_bookkeeping_is_plain_python(name: str) -> None:
    assert modules_after_importing(name).isdisjoint({"torch", "triton", "transformers"})


def test_the_command_line_starts_without_screen_sockets_or_tensors() -> None:
    assert modules_after_importing("kvscope.dashboard.cli").isdisjoint({*HEAVY, "numpy", "textual", "zmq", "mcap"})


def test_kernels_load_nothing_of_the_rest() -> None:
    loaded = modules_after_importing("kvscope.kernels.batch", "kvscope.kernels.reference")
    others = [name for name in loaded if name.startswith("kvscope.") and not name.startswith("kvscope.kernels")]
    assert others == []
    assert loaded.isdisjoint({"transformers", "zmq", "textual"})


_EACH_FIRST = """
import importlib, os, pkgutil, sys
import mcap.reader, msgspec, numpy, textual.app, textual.widgets, zmq  # what is not ours is loaded once
def names(package):
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        yield found.name
        if found.ispkg:
            yield from names(found.name)
listed = sorted(names("kvscope.events")) + sorted(names("kvscope.transport")) + sorted(names("kvscope.dashboard"))
for loaded in [name for name in sys.modules if name.startswith("kvscope")]:
    del sys.modules[loaded]
for name in listed:
    if os.fork() == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(name, repr(error), flush=True)
        os._exit(0)
    os.wait()
print(len(listed), "modules")
"""


def test_every_module_can_be_the_first_one_imported() -> None:
    """No import of ours works only because another came before it."""
    result = subprocess.run([sys.executable, "-c", _EACH_FIRST], capture_output=True, text=True, check=True)
    *failed, last = result.stdout.splitlines()
    assert failed == []
    assert int(last.split()[0]) > 100
