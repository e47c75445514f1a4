"""What the doctor finds out about the machine: directories, engines, packages, GPU, ssh."""

import contextlib
import importlib.metadata
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvscope.dashboard.doctor import Check, Section, fail, find_program, ok, warn
from kvscope.dashboard.errors import INSTALL_ENGINE

_ENGINE = {"torch": "runs the model", "triton": "its kernels, on a GPU", "transformers": "loads models"}


def check_directories() -> Iterator[Check]:
    from kvscope.transport.directory import runtime_root
    from kvscope.transport.discovery import list_engines
    from kvscope.transport.endpoints import EndpointError, directory_endpoints

    try:
        root = runtime_root()
        directory_endpoints(root / "demo-4194304")
        engines = list_engines()
    except EndpointError as error:
        yield fail("sockets", str(error), "see the line above")
        return
    yield ok("sockets", f"{root}, mode {stat.S_IMODE(root.stat().st_mode):o}")
    names = ", ".join(engine.name for engine in engines)
    yield ok("engines", names or "none is running; start one with: kvscope serve")


def check_state() -> Iterator[Check]:
    from kvscope.dashboard.prompt_history import history_path

    path = history_path()
    parent = next(folder for folder in path.parents if folder.exists())
    if not os.access(parent, os.W_OK):
        yield warn("prompts", f"{parent} cannot be written: prompts are forgotten", "set XDG_STATE_HOME")
    else:
        yield ok("prompts", f"remembered in {path}")


def check_python() -> Iterator[Check]:
    yield ok("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("kvscope", "textual", "pyzmq", "msgspec")]
    yield ok("viewer", ", ".join(packages))


def check_engine_packages() -> Iterator[Check]:
    """Installed or not, by their metadata: importing torch takes seconds and hundreds of MB."""
    versions = {name: _version(name) for name in _ENGINE}
    if not any(versions.values()):
        yield ok(
            "engine", f"not installed: attach and replay work without it; for demo, serve and run: {INSTALL_ENGINE}"
        )
        return
    for name, about in _ENGINE.items():
        version = versions[name]
        if version is not None:
            yield ok(name, f"{version}: {about}")
        elif name == "triton" and not sys.platform.startswith("linux"):
            yield ok(name, "not for this system; attention runs in torch")
        else:
            yield fail(name, f"not installed: {about}", INSTALL_ENGINE)
    numba = _version("numba")
    yield ok(
        "numba", f"{numba}: compiled attention on a CPU" if numba else "not installed; attention on a CPU is slower"
    )


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def check_gpu() -> Iterator[Check]:
    program = find_program("nvidia-smi")
    found = _gpu_names(program) if program is not None else []
    torch = _version("torch")
    cpu_build = torch is not None and torch.endswith("+cpu")
    if not found:
        amd = Path("/dev/kfd").exists()
        yield ok("gpu", "an AMD GPU" if amd else "none found; models run on the CPU")
    elif cpu_build:
        yield warn("gpu", "; ".join(found), f"torch {torch} is a build for CPUs: install one with CUDA")
    else:
        yield ok("gpu", "; ".join(found))


def _gpu_names(program: str) -> list[str]:
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
        return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    return []


def check_ssh() -> Iterator[Check]:
    program = find_program("ssh")
    if program is None:
        yield warn("ssh", "not found: attach ssh://HOST cannot work", "install the OpenSSH client")
        return
    done = subprocess.run([program, "-V"], capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
    version = (done.stderr or done.stdout).partition(",")[0].strip()
    over_ssh = "; this is a session over ssh: at most 12 frames a second" if "SSH_CONNECTION" in os.environ else ""
    yield ok("ssh", f"{version}{over_ssh}")


SECTIONS: tuple[Section, ...] = (
    check_directories,
    check_state,
    check_python,
    check_engine_packages,
    check_gpu,
    check_ssh,
)
