"""CURVE: who is let in, and one clear line for everybody else."""

import os
import re
import stat
from pathlib import Path

import pytest
import zmq

from kvscope.transport.client import EngineClient
from kvscope.transport.endpoints import ClientKeys, EndpointError, Endpoints, parse_listen
from kvscope.transport.keys import (
    KeyFiles,
    client_keys,
    create_keys,
    key_directory,
    listening,
    read_allowed,
    read_pair,
    read_public,
)
from kvscope.transport.source import Status


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def alice(tmp_path: Path) -> KeyFiles:
    return create_keys("alice", tmp_path)


@pytest.fixture
def engine(tmp_path: Path) -> KeyFiles:
    return create_keys("engine", tmp_path)


def free_port() -> int:
    """Of two neighbours that nobody uses."""
    with zmq.Context() as context, context.socket(zmq.PUB) as sock:
        return sock.bind_to_random_port("tcp://127.0.0.1", min_port=20_000, max_port=60_000)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def listening_sockets() -> set[str]:
    """`address:port` of every TCP socket that this process listens on."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(str(descriptor.readlink()))
        except OSError:
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def refusal(endpoints: Endpoints, keys: ClientKeys | None) -> str:
    """What a user reads who may not connect."""
    with pytest.raises(EndpointError) as error:
        EngineClient(endpoints._replace(keys=keys)).connect(timeout=5)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_who_is_let_in(lab, tmp_path: Path, alice: KeyFiles, engine: KeyFiles) -> None:
    doors = listening(f"tcp://127.0.0.1:{free_port()}", engine.secret, [alice.public])
    assert doors is not None
    served = lab.serve(endpoints=doors.endpoints, keys=doors.keys)
    served.publish(20)
    good = client_keys(alice.secret, engine.public)
    client = EngineClient(doors.endpoints._replace(keys=good)).connect()
    try:
        lab.wait_live(client, served)
        assert client.view.state == served.stream.state
        assert client.pause().result(10).ok
        assert served.engine.calls == [("pause",)]
    finally:
        client.close()
    own = client_keys(engine.secret, engine.public)
    EngineClient(doors.endpoints._replace(keys=own)).connect().close()  # the owner of the engine's secret

    mallory = create_keys("mallory", tmp_path)
    unknown = client_keys(mallory.secret, engine.public)
    assert "does not know your key" in refusal(doors.endpoints, unknown)
    assert "wants keys" in refusal(doors.endpoints, None)
    assert "another key than the one in --server-key" in refusal(
        doors.endpoints, client_keys(alice.secret, mallory.public)
    )
    served.publish(20)
    served.drain()
    assert served.engine.calls == [("pause",)]


def test_the_stream_itself_is_closed_to_strangers(lab, tmp_path: Path, alice: KeyFiles, engine: KeyFiles) -> None:
    """A subscriber gets nothing without keys, nor with unknown ones, although it never asks anything."""
    doors = listening(f"tcp://127.0.0.1:{free_port()}", engine.secret, [alice.public])
    assert doors is not None
    served = lab.serve(endpoints=doors.endpoints, keys=doors.keys)
    keys = [None, read_pair(create_keys("mallory", tmp_path).secret), read_pair(alice.secret)]
    with zmq.Context() as context:
        subscribers = []
        for pair in keys:
            sock = context.socket(zmq.SUB)
            sock.subscribe(b"")
            if pair is not None:
                sock.curve_publickey, sock.curve_secretkey = pair
                sock.curve_serverkey = read_public(engine.public)
            sock.connect(doors.endpoints.events)
            subscribers.append(sock)
        *strangers, friend = subscribers
        served.publish(5)
        lab.wait_until(lambda: friend.poll(100) or served.publish())
        assert [stranger.poll(300) for stranger in strangers] == [0, 0]
        for sock in subscribers:
            sock.close(linger=0)


def test_keys_for_an_engine_that_takes_none(lab, alice: KeyFiles, engine: KeyFiles) -> None:
    endpoints = parse_listen(f"tcp://127.0.0.1:{free_port()}")
    lab.serve(endpoints=endpoints)
    assert "takes no" in refusal(endpoints, client_keys(alice.secret, engine.public)).replace("takes none", "takes no")


def test_only_what_was_asked_for_listens(lab) -> None:
    before = listening_sockets()
    lab.serve().publish(3)
    assert listening_sockets() == before, "the default is no TCP socket at all"
    port = free_port()
    lab.serve(endpoints=parse_listen(f"tcp://127.0.0.1:{port}"))
    assert listening_sockets() - before == {f"0100007F:{port:04X}", f"0100007F:{port + 1:04X}"}


def test_nobody_is_let_in_when_the_authenticator_is_gone(lab, alice: KeyFiles, engine: KeyFiles) -> None:
    doors = listening(f"tcp://127.0.0.1:{free_port()}", engine.secret, [alice.public])
    assert doors is not None
    served = lab.serve(endpoints=doors.endpoints, keys=doors.keys)
    served.control._listener._authenticator.stop()
    client = EngineClient(doors.endpoints._replace(keys=client_keys(alice.secret, engine.public)))
    with pytest.raises(EndpointError):
        client.connect(timeout=1)


def test_an_engine_that_refuses_control_says_so(lab) -> None:
    served = lab.serve(read_only=True)
    served.publish(3)
    client = EngineClient(served.endpoints).connect()
    try:
        assert client.is_read_only
        lab.wait_until(lambda: client.view.status is Status.LIVE)
        reply = client.submit("x", {}).result(10)
        assert (reply.ok, reply.error) == (False, "submit: this engine takes no control (--no-control)")
    finally:
        client.close()
    assert served.engine.calls == []


def test_files_are_private() -> None:
    previous = os.umask(0)
    try:
        files = create_keys()
    finally:
        os.umask(previous)
    assert (mode(files.secret), mode(files.public), mode(key_directory())) == (0o600, 0o644, 0o700)
    assert read_pair().public == read_public(files.public)
    assert b"secret-key" not in files.public.read_bytes()


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o644, 0o660, 0o777])
def test_a_secret_that_others_can_read_is_refused(alice: KeyFiles, bits: int) -> None:
    alice.secret.chmod(bits)
    with pytest.raises(EndpointError, match=rf"has mode {bits:o}; others could read the secret: chmod 600"):
        read_pair(alice.secret)


def test_keys_are_never_overwritten(tmp_path: Path, alice: KeyFiles) -> None:
    before = alice.secret.read_bytes()
    with pytest.raises(EndpointError, match="exists"):
        create_keys("alice", tmp_path)
    alice.public.unlink()
    with pytest.raises(EndpointError, match="exists"):
        create_keys("alice", tmp_path)
    assert alice.secret.read_bytes() == before
    for name in ("../alice", "", ".", "a/b", "x" * 65):
        with pytest.raises(EndpointError, match="key name"):
            create_keys(name, tmp_path)


def test_what_is_no_key(tmp_path: Path, alice: KeyFiles) -> None:
    text, short, fifo, large = (tmp_path / f"{name}.key" for name in ("text", "short", "fifo", "large"))
    text.write_text("hello")
    short.write_text('curve\n    public-key = "abc"\n')
    large.write_bytes(alice.public.read_bytes() + bytes(1 << 17))
    os.mkfifo(fifo)
    for path in (text, short, fifo, large, tmp_path):
        with pytest.raises(EndpointError, match="is not a key file"):
            read_public(path)
    with pytest.raises(EndpointError, match=r"no key .*missing"):
        read_public(tmp_path / "missing.key")
    with pytest.raises(EndpointError, match="holds a secret key"):
        read_public(alice.secret)
    with pytest.raises(EndpointError, match=r"is the public half; give .*alice\.key_secret$"):
        read_pair(alice.public)
    with pytest.raises(EndpointError, match=r"default.key_secret; make a pair with: kvscope keys new"):
        read_pair()
    other = create_keys("other", tmp_path)
    mixed = re.sub(rb"public-key.*", b'public-key = "' + read_public(other.public) + b'"', alice.secret.read_bytes())
    alice.secret.write_bytes(mixed)
    with pytest.raises(EndpointError, match="is broken"):
        read_pair(alice.secret)


def test_a_folder_of_allowed_keys(tmp_path: Path) -> None:
    (tmp_path / "team").mkdir()
    files = [create_keys(name, tmp_path / "team") for name in ("a", "b")]
    extra = create_keys("c", tmp_path)
    expected = frozenset(read_public(one.public) for one in (*files, extra))
    assert read_allowed([tmp_path / "team", extra.public]) == expected
    (tmp_path / "nobody").mkdir()
    with pytest.raises(EndpointError, match=r"no .key file to allow"):
        read_allowed([tmp_path / "nobody"])


def test_options_that_do_not_fit_together(alice: KeyFiles, engine: KeyFiles) -> None:
    assert listening(None, None, []) is None
    assert client_keys(None, None) is None
    loopback = listening("tcp://127.0.0.1:5557", None, [])
    assert loopback is not None
    assert loopback.keys is None
    refused = {
        ("tcp://0.0.0.0:5557", None, ()): "needs keys",
        ("tcp://0.0.0.0:5557", engine.secret, ()): "--key needs --allow",
        ("tcp://example.org:5557", engine.secret, (alice.public,)): "numeric address",
        (None, engine.secret, ()): "are for --listen",
        (None, None, (alice.public,)): "are for --listen",
        ("tcp://0.0.0.0:5557", None, (alice.public,)): "kvscope keys new",
    }
    for options, words in refused.items():
        with pytest.raises(EndpointError, match=words):
            listening(*options)
    with pytest.raises(EndpointError, match="--key needs --server-key"):
        client_keys(alice.secret, None)
    everywhere = listening("tcp://[::]:5557", engine.secret, [alice.public])
    assert everywhere is not None
    assert everywhere.keys is not None
    assert everywhere.keys.public_file == engine.public
