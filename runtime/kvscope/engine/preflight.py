"""What can be refused before torch is imported, which takes seconds: names, files, ports. Nothing is claimed."""

import re
from pathlib import Path

from kvscope.engine.model_hub import resolve_model
from kvscope.transport.discovery import check_unclaimed
from kvscope.transport.keys import Listening
from kvscope.transport.recording import check_recordable
from kvscope.transport.sockets import check_bindable


def check_run(model: str, *, record: Path | None, force: bool, max_bytes: int | None) -> None:
    """Raises ConfigError: no such model. RecordingError: no recording could be begun, or there is none to limit."""
    check_recordable(record, force=force, max_bytes=max_bytes)
    resolve_model(model)


def check_serve(
    model: str,
    *,
    name: str | None,
    listening: Listening | None,
    record: Path | None,
    force: bool,
    max_bytes: int | None,
) -> None:
    """As `check_run`. Raises EndpointError besides: the name or a port is taken."""
    check_unclaimed(name if name is not None else name_after(model))
    if listening is not None:
        check_bindable(listening.endpoints)
    check_run(model, record=record, force=force, max_bytes=max_bytes)


def name_after(model: str) -> str:
    """An engine name made of the model's last path component."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip(".-")[:64] or "engine"
