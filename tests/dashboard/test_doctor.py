"""The doctor: each finding with its fix, an exit code, and never a check that takes the others down."""

import json
import os
import pty
import stat
import termios
import threading

import pytest

from kvscope.dashboard import doctor, doctor_machine, doctor_terminal
from kvscope.dashboard.doctor import Level, fail, is_healthy, ok, report_json, report_lines, warn


def the(check_function, name):
    return next(check for check in check_function() if check.name == name)


@pytest.mark.parametrize(
    ("env", "level", "fix"),
    [
        ({"TERM": "xterm-256color"}, Level.OK, ""),
        ({"TERM": "dumb"}, Level.FAIL, "export TERM="),
        ({"TERM": ""}, Level.FAIL, "export TERM="),
        ({"TERM": "xterm-256color", "TMUX": "/tmp/t,1,0"}, Level.WARN, "default-terminal"),
        ({"TERM": "tmux-256color", "TMUX": "/tmp/t,1,0"}, Level.OK, ""),
    ],
)
def test_term(monkeypatch, env, level, fix):
    monkeypatch.delenv("TMUX", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    check = the(doctor_terminal.check_term, "TERM")
    assert check.level is level
    assert fix in check.fix
    assert bool(check.fix) == (level is not Level.OK)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({"TERM": "xterm"}, "16, those of the terminal"),
        ({"TERM": "xterm-256color"}, "256"),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "16 million"),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, "none: NO_COLOR is set"),
    ],
)
def test_colours(monkeypatch, env, found):
    for name in ("NO_COLOR", "COLORTERM", "TEXTUAL_COLOR_SYSTEM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert the(doctor_terminal.check_colours, "colours").found.startswith(found)


@pytest.mark.parametrize(("columns", "rows", "level"), [(59, 40, "fail"), (60, 20, "warn"), (80, 24, "ok")])
def test_size(monkeypatch, columns, rows, level):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(rows))
    assert the(doctor_terminal.check_size, "size").level.value == level


def test_the_terminals_answers_are_read():
    text = "\x1b[?2026;2$y\x1b]11;rgb:ffff/ffff/f0f0\x1b\\\x1b[?62;22c"
    answers = doctor_terminal.read_answers(text, 7.0)
    assert answers == (7.0, True, (255, 255, 240))
    assert doctor_terminal.read_answers("\x1b[?2026;0$y\x1b[?62c", 1.0) == (1.0, False, None)


def test_a_terminal_is_asked_and_left_as_it_was(monkeypatch):
    leader, follower = pty.openpty()
    reader = os.fdopen(os.dup(follower), "r")
    writer = os.fdopen(os.dup(follower), "w")
    monkeypatch.setattr("sys.stdin", reader)
    monkeypatch.setattr("sys.stdout", writer)
    before = termios.tcgetattr(follower)

    def answer() -> None:
        asked = b""
        while b"\x1b[c" not in asked:
            asked += os.read(leader, 100)
        os.write(leader, b"\x1b[?2026;2$y\x1b[?62c")

    thread = threading.Thread(target=answer)
    thread.start()
    answers = doctor_terminal.ask_terminal()
    thread.join()
    after = termios.tcgetattr(follower)
    for file in (reader, writer):
        file.close()
    os.close(leader)
    os.close(follower)
    assert answers is not None
    assert answers.synchronised
    assert before == after


def test_a_light_ground_is_told_with_its_theme(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("COLORFGBG", raising=False)
    (light,) = doctor_terminal._check_ground((255, 255, 255))
    assert "kvscope-light" in light.fix
    (dark,) = doctor_terminal._check_ground((13, 17, 23))
    assert dark.level is Level.OK


def test_a_mistake_in_the_settings_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (check,) = doctor_terminal.check_settings()
    assert check.level is Level.OK
    (tmp_path / "kvscope").mkdir()
    (tmp_path / "kvscope" / "settings.toml").write_text("thme = 1")
    (check,) = doctor_terminal.check_settings()
    assert "did you mean theme?" in check.found


def test_a_runtime_directory_that_others_can_read_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert the(doctor_machine.check_directories, "engines").found.startswith("none is running")
    (tmp_path / "kvscope").chmod(0o755)
    check = the(doctor_machine.check_directories, "sockets")
    assert check.level is Level.FAIL
    assert "chmod 700" in check.found
    assert stat.S_IMODE((tmp_path / "kvscope").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("installed", "levels"),
    [
        ({}, {"engine": "ok"}),
        ({"torch": "2.13.0", "transformers": "5.24.0"}, {"torch": "ok", "triton": "fail", "transformers": "ok"}),
    ],
)
def test_packages_of_the_engine(monkeypatch, installed, levels):
    monkeypatch.setattr(doctor_machine, "_version", installed.get)
    monkeypatch.setattr("sys.platform", "linux")
    found = {check.name: check.level.value for check in doctor_machine.check_engine_packages()}
    assert levels.items() <= found.items()


def test_a_gpu_with_a_torch_for_cpus_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor_machine, "find_program", lambda name: "/bin/true")
    monkeypatch.setattr(doctor_machine, "_gpu_names", lambda program: ["NVIDIA H200, 143771 MiB"])
    monkeypatch.setattr(doctor_machine, "_version", lambda name: "2.13.0+cpu")
    assert the(doctor_machine.check_gpu, "gpu").level is Level.WARN
    monkeypatch.setattr(doctor_machine, "_version", lambda name: "2.13.0")
    assert the(doctor_machine.check_gpu, "gpu").level is Level.OK


def test_without_ssh_it_says_what_cannot_work(monkeypatch):
    monkeypatch.setattr(doctor_machine, "find_program", lambda name: None)
    assert "ssh://HOST cannot work" in the(doctor_machine.check_ssh, "ssh").found


def test_a_check_that_breaks_is_a_line_of_its_own(monkeypatch):
    def check_broken():
        yield ok("before", "fine")
        raise RuntimeError("boom \x1b[31m")

    monkeypatch.setattr(doctor_terminal, "SECTIONS", (check_broken,))
    monkeypatch.setattr(doctor_machine, "SECTIONS", ())
    checks = doctor.examine()
    assert [check.level for check in checks] == [Level.OK, Level.WARN]
    assert "\x1b" not in "\n".join(report_lines(checks))


def test_the_report():
    checks = [ok("one", "fine"), warn("second", "so so", "do this"), fail("third", "bad", "do that")]
    assert report_lines(checks) == [
        "ok    one     fine",
        "warn  second  so so",
        "              -> do this",
        "fail  third   bad",
        "              -> do that",
        "",
        "1 ok, 1 warnings, 1 failures",
    ]
    assert json.loads(report_json(checks))[1] == {"name": "second", "level": "warn", "found": "so so", "fix": "do this"}
    assert not is_healthy(checks)
    assert is_healthy(checks[:2])
