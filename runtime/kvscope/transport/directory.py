"""Private directories: the only thing that keeps other users away from the sockets in them."""

import os
import stat
from pathlib import Path

import platformdirs

from kvscope.transport.endpoints import EndpointError


def runtime_root() -> Path:
    """`$XDG_RUNTIME_DIR/kvscope`, created private. Raises EndpointError when somebody else could tamper with it."""
    configured = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    # platformdirs quietly goes elsewhere when the directory's mode is not 0700; ours below it is private by itself.
    base = configured if configured.is_absolute() else Path(platformdirs.user_runtime_dir())
    root = base / "kvscope"
    try:
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EndpointError(f"cannot create {root.parent}: {error.strerror}; set XDG_RUNTIME_DIR") from None
    _check_parent(root.parent)
    make_private(root)
    return root


def make_private(directory: Path) -> None:
    """Create the directory 0700, or check that it already is, and that it is ours. Raises EndpointError."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise EndpointError(f"cannot create {directory}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise EndpointError(f"{directory} is not a directory of yours; remove it or set XDG_RUNTIME_DIR")
    if found.st_mode & 0o077:
        raise EndpointError(f"{directory} has mode {found.st_mode & 0o777:o}; others could read prompts: chmod 700 it")


def _check_parent(parent: Path) -> None:
    # Whoever may rename entries here could put another directory in our directory's place.
    found = parent.stat()
    writable = bool(found.st_mode & 0o022) and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (0, os.geteuid()) or writable:
        raise EndpointError(f"{parent} can be changed by other users; set XDG_RUNTIME_DIR to a directory of yours")
