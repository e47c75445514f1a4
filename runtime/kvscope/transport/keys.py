"""CURVE keys in files: one's own pair, the engine's public key, and the public keys that an engine lets in.

    NAME.key          public: give it to whoever runs the engine, or attaches to it
    NAME.key_secret   both halves; 0600, and refused when others could have read it

The files are ZeroMQ certificates, as `zmq.auth` and czmq write them.
"""

import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import platformdirs
import zmq
import zmq.auth

from kvscope.transport.directory import make_private
from kvscope.transport.endpoints import ClientKeys, EndpointError, Endpoints, KeyPair, parse_listen

DEFAULT_NAME = "default"
SECRET_SUFFIX, PUBLIC_SUFFIX = ".key_secret", ".key"
MAX_KEY_FILE_BYTES = 1 << 16
MAX_ALLOWED_KEYS = 10_000
NEW_KEYS_HINT = "make a pair with: kvscope keys new"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


class KeyFiles(NamedTuple):
    public: Path
    secret: Path


class ServerKeys(NamedTuple):
    """The engine's pair, and the public keys of the clients it lets in; `public_file` is what they need."""

    own: KeyPair
    allowed: frozenset[bytes]
    public_file: Path


class Listening(NamedTuple):
    """Where an engine listens on TCP, and for whom; without keys for everybody on this machine."""

    endpoints: Endpoints
    keys: ServerKeys | None


def key_directory() -> Path:
    """Where `kvscope keys new` puts keys, and where the default ones are looked for."""
    return platformdirs.user_config_path("kvscope") / "keys"


def create_keys(name: str = DEFAULT_NAME, directory: Path | None = None) -> KeyFiles:
    """A new pair of files. Raises EndpointError: a bad name, the files exist, or they cannot be written."""
    if _NAME.fullmatch(name) is None:
        raise EndpointError(f"key name {name!r}: use 1 to 64 of A-Z a-z 0-9 . _ -, no leading dot")
    folder = directory if directory is not None else key_directory()
    files = KeyFiles(folder / (name + PUBLIC_SUFFIX), folder / (name + SECRET_SUFFIX))
    for path in files:
        if path.exists():
            raise EndpointError(f"{path} exists; choose another name, or remove it together with its other half")
    previous = os.umask(0o077)  # zmq.auth writes secrets as readable as the umask lets it
    try:
        if directory is None:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private(folder)
        zmq.auth.create_certificates(folder, name)
        files.public.chmod(0o644)
    except OSError as error:
        raise EndpointError(f"cannot write {files.secret}: {error.strerror}") from None
    finally:
        os.umask(previous)
    return files


def read_pair(path: Path | None = None) -> KeyPair:
    """A secret file's pair; the default one unless named.

    Raises:
        EndpointError: there is none, others could read it, or it is no secret key.
    """
    chosen = path if path is not None else key_directory() / (DEFAULT_NAME + SECRET_SUFFIX)
    if not chosen.exists():
        raise EndpointError(f"no key {chosen}; {NEW_KEYS_HINT}")
    found = chosen.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise EndpointError(f"{chosen} belongs to another user; {NEW_KEYS_HINT}")
    public, secret = _load(chosen)
    if secret is None:
        raise EndpointError(f"{chosen} is the public half; give {chosen.with_suffix(SECRET_SUFFIX)}")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise EndpointError(f"{chosen} has mode {mode:o}; others could read the secret: chmod 600 it, or make new keys")
    if zmq.curve_public(secret) != public:
        raise EndpointError(f"{chosen} is broken: its public key does not belong to its secret key")
    return KeyPair(public, secret)


def read_public(path: Path) -> bytes:
    """A public key. Raises EndpointError: there is none, or the file holds a secret, which should not travel."""
    if not path.exists():
        raise EndpointError(f"no key {path}; the other side's {PUBLIC_SUFFIX} file is needed")
    public, secret = _load(path)
    if secret is not None:
        raise EndpointError(f"{path} holds a secret key; name its {PUBLIC_SUFFIX} file")
    return public


def read_allowed(paths: Iterable[Path]) -> frozenset[bytes]:
    """The public keys in these files, and in the `.key` files of these directories. Raises EndpointError."""
    files = [file for path in paths for file in (sorted(path.glob("*" + PUBLIC_SUFFIX)) if path.is_dir() else [path])]
    if not files:
        raise EndpointError(f"no {PUBLIC_SUFFIX} file to allow; {NEW_KEYS_HINT}, on the machine that attaches")
    if len(files) > MAX_ALLOWED_KEYS:
        raise EndpointError(f"{len(files)} keys to allow; the limit is {MAX_ALLOWED_KEYS}")
    return frozenset(read_public(file) for file in files)


def listening(listen: str | None, key: Path | None, allow: Sequence[Path]) -> Listening | None:
    """What `--listen`, `--key` and `--allow` ask for; None: no TCP at all.

    Raises:
        EndpointError: they do not fit together, or a key cannot be used.
    """
    if listen is None:
        if key is not None or allow:
            raise EndpointError("--key and --allow are for --listen; the default sockets are your own already")
        return None
    if not allow:
        if key is not None:
            raise EndpointError("--key needs --allow: nobody could connect")
        return Listening(parse_listen(listen, has_keys=False), None)
    endpoints = parse_listen(listen, has_keys=True)
    own = read_pair(key)
    secret_file = key if key is not None else key_directory() / (DEFAULT_NAME + SECRET_SUFFIX)
    # Whoever holds the engine's own secret is let in: its owner attaches on this machine without a key of their own.
    return Listening(
        endpoints, ServerKeys(own, read_allowed(allow) | {own.public}, secret_file.with_suffix(PUBLIC_SUFFIX))
    )


def client_keys(key: Path | None, server_key: Path | bytes | None) -> ClientKeys | None:
    """What `--key` and `--server-key` ask for; None: connect without keys.

    Raises:
        EndpointError: a key cannot be used, or the engine's is missing.
    """
    if server_key is None:
        if key is not None:
            raise EndpointError("--key needs --server-key: the engine's .key file")
        return None
    server = server_key if isinstance(server_key, bytes) else read_public(server_key)
    return ClientKeys(read_pair(key), server)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        if not path.is_file() or path.stat().st_size > MAX_KEY_FILE_BYTES:
            raise EndpointError(f"{path} is not a key file")
        public, secret = zmq.auth.load_certificate(path)
        for half in (public, secret):
            if half is not None:
                zmq.curve_public(half)  # raises for what is no key: both halves are 32 bytes in Z85
    except (ValueError, zmq.ZMQError):
        raise EndpointError(f"{path} is not a key file") from None
    except OSError as error:
        raise EndpointError(f"cannot read {path}: {error.strerror}") from None
    return public, secret
