"""ssh:// addresses: what is refused before ssh sees it, and which engine is meant."""

from pathlib import Path

import pytest

from kvscope.dashboard.errors import CommandError
from kvscope.dashboard.ssh_tunnel import SshTarget, by_hand, choose, forwards, parse_engine, parse_ssh, ssh_command


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("ssh://gpu", SshTarget("gpu", None, None)),
        ("ssh://me@gpu.example.org:2222/demo-4711", SshTarget("me@gpu.example.org", 2222, "demo-4711")),
        ("ssh://[2001:db8::1]:22/x", SshTarget("2001:db8::1", 22, "x")),
        ("ssh://me@10.0.0.7/", SshTarget("me@10.0.0.7", None, None)),
    ],
)
def test_an_address_is_taken_apart(text, target):
    assert parse_ssh(text) == target


def test_what_to_try_by_hand_has_the_port():
    assert by_hand(parse_ssh("ssh://root@127.0.0.1:47499")) == "ssh -p 47499 root@127.0.0.1 true"
    assert by_hand(parse_ssh("ssh://gpu")) == "ssh gpu true"


@pytest.mark.parametrize(
    "text",
    [
        "ssh://",
        "ssh://-oProxyCommand=touch owned",
        "ssh://-oProxyCommand=x",
        "ssh://-l@gpu",
        "ssh://me@-gpu",
        "ssh://gpu;reboot",
        "ssh://gpu$(reboot)",
        "ssh://gpu`id`",
        "ssh://gpu|cat",
        "ssh://a b",
        "ssh://gpu\nx",
        "ssh://gpu:0",
        "ssh://gpu:99999",
        "ssh://gpu:22;x",
        "ssh://gpu/../../etc",
        "ssh://gpu/..",
        "ssh://gpu/a/b",
        "ssh://gpu/na me",
        "ssh://me@you@gpu",
        "ssh://%h",
        "ssh://gpu\x1b[31m",
        "SSH://gpu",
    ],
)
def test_options_and_shell_characters_are_refused(text):
    with pytest.raises(CommandError, match=r"is not ssh://\[user@\]host\[:port\]\[/engine\]") as refusal:
        parse_ssh(text)
    assert "\x1b" not in str(refusal.value)


def engine(name="far", folder="/run/user/1/kvscope/", **more):
    fields = "".join(f', "{key}": "{value}"' for key, value in more.items())
    found = parse_engine(f'kvscope-engine {folder}{name} {{"pid": 1, "name": "other"{fields}}}')
    assert found is not None
    return found


def test_what_the_far_end_prints_is_read_with_care():
    assert engine().entry.name == "far"  # the directory's name, as for engines here
    for line in (
        "Welcome to gpu",
        "kvscope-engine relative {}",
        'kvscope-engine /run/$HOME/far {"pid": 1, "name": "x"}',
        'kvscope-engine /run/a:b/far {"pid": 1, "name": "x"}',
        'kvscope-engine /run/%h/far {"pid": 1, "name": "x"}',
        "kvscope-engine /run/far not json",
        'kvscope-engine /run/far {"pid": "one", "name": "x"}',
    ):
        assert parse_engine(line) is None, line


def test_one_engine_is_meant_or_the_choice_is_named():
    one, two = engine("one"), engine("two")
    assert choose([one], SshTarget("gpu", None, None)) is one
    assert choose([one, two], SshTarget("gpu", None, "two")) is two
    assert choose(None, SshTarget("gpu", None, None)) is None
    with pytest.raises(CommandError, match="no engine is running on gpu; start one with: kvscope serve there"):
        choose([], SshTarget("gpu", None, None))
    with pytest.raises(CommandError, match="several engines are running on gpu: one, two; name one"):
        choose([one, two], SshTarget("gpu", None, None))
    with pytest.raises(CommandError, match="no engine named three on gpu; running there: one, two"):
        choose([one, two], SshTarget("gpu", None, "three"))


def test_sockets_and_loopback_ports_are_forwarded_to_sockets():
    assert forwards(Path("/t"), engine()) == [
        "/t/events.sock:/run/user/1/kvscope/far/events.sock",
        "/t/control.sock:/run/user/1/kvscope/far/control.sock",
    ]
    assert forwards(Path("/t"), engine(listen="tcp://127.0.0.1:5557")) == [
        "/t/events.sock:127.0.0.1:5557",
        "/t/control.sock:127.0.0.1:5558",
    ]


def test_another_ssh_may_be_named_and_none_is_one_line(monkeypatch):
    monkeypatch.setenv("KVSCOPE_SSH", "sh -x 'a b'")
    assert ssh_command() == ["sh", "-x", "a b"]
    monkeypatch.setenv("KVSCOPE_SSH", "no-such-program")
    with pytest.raises(CommandError, match="there is no no-such-program here"):
        ssh_command()
