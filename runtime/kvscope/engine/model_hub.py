"""Where a model name leads: the embedded model, the cache, a directory, or the hub; and what to say when it does not.

The hub's own variables are honoured (HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). Its client
retries for a minute when there is no network; one connection attempt beforehand spares that.
"""

import difflib
import socket
import urllib.parse
import urllib.request
from importlib.resources import files
from pathlib import Path

import huggingface_hub
import platformdirs

from kvscope.engine.config import EMBEDDED_MODEL, ConfigError

CONNECT_TIMEOUT_S = 5.0


def resolve_model(name: str) -> str:
    """A directory that holds the model, or the hub id to ask for.

    Raises:
        ConfigError: a path that leads nowhere.
    """
    if name == EMBEDDED_MODEL:
        return str(files("kvscope.engine") / "models" / EMBEDDED_MODEL)
    cached = _converted_models() / name
    if "/" not in name and (cached / "config.json").is_file():
        return str(cached)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{name} holds no config.json; give the directory of a Hugging Face model")
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or path.exists():
        raise ConfigError(f"no model directory at {name}")
    _check_hub(name)
    return name


def _check_hub(name: str) -> None:
    """Raises ConfigError when the hub cannot serve the model and its cache does not hold it."""
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "config.json")
    except huggingface_hub.errors.HFValidationError:
        raise ConfigError(
            f"{name!r} is neither a model directory here nor a hub id (owner/name){_near(name)}"
        ) from None
    if isinstance(cached, str):
        if not huggingface_hub.constants.HF_HUB_OFFLINE and not _hub_answers():
            huggingface_hub.constants.HF_HUB_OFFLINE = True  # everything is here: do not wait for the network
        return
    missing = f"{name!r} is neither a model directory here nor in the hub's cache{_near(name)}"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{missing}, and HF_HUB_OFFLINE is set; unset it, or give a local directory")
    if not _hub_answers():
        raise ConfigError(
            f"{missing}, and the model hub does not answer; "
            "check the network and HF_ENDPOINT, or give a local directory"
        )
    try:
        huggingface_hub.hf_hub_download(name, "config.json")  # loading starts with it; a wrong id is told by it
    except Exception as error:  # whatever the hub and the network come up with
        raise ConfigError(explain_failure(error, name, name, "model") + _near(name)) from None


def _near(name: str) -> str:
    """A model that is here and is called almost the same."""
    here = [EMBEDDED_MODEL, *(path.name for path in _converted_models().glob("*/"))]
    near = difflib.get_close_matches(name, here, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _converted_models() -> Path:
    return platformdirs.user_cache_path("kvscope") / "models"


def _hub_answers() -> bool:
    """Whether something accepts connections there. Behind a proxy nobody can tell; then the client must try."""
    endpoint = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    if urllib.request.getproxies().keys() & {endpoint.scheme, "all"}:
        return True
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        with socket.create_connection((endpoint.hostname or "", port), CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def explain_failure(error: Exception, source: str, name: str, what: str) -> str:
    """One line for whatever loading a tokenizer or a model raised."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if Path(source).is_dir():
        if what == "tokenizer":
            return (
                f"{name} has no usable tokenizer (tokenizer.json or tokenizer.model beside config.json): {first_line}"
            )
        return f"cannot load the model in {name}: {first_line}"
    return f"cannot get {name!r} from the model hub; check the id, HF_TOKEN and HF_ENDPOINT: {first_line}"
