"""Exit codes and messages of the real command: bad input is one line, exit code 2, and no traceback."""

import getpass
import http.server
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from .conftest import COMMAND, Finished, Kvscope, TerminalSession, children_of, is_gone, wait_until

COMMANDS = (
    *("demo", "run", "serve", "attach", "replay", "list"),
    *("keys", "record", "check", "stats", "diff", "export", "status"),
)
PROMPT = ("--prompt", "O Romeo, Romeo, wherefore art thou")
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


def assert_refused(done: Finished, *words: str) -> None:
    """One line on stderr that carries the words, exit code 2, nothing on stdout."""
    assert done.code == 2, done
    assert done.output == ""
    assert done.errors.startswith("kvscope: ")
    assert done.errors.count("\n") == 1, done.errors
    assert "Traceback" not in done.errors
    for word in words:
        assert word in done.errors


def assert_refused_in_terminal(session: TerminalSession, word: str) -> None:
    """The same for a command that asks for a terminal first."""
    assert session.wait() == 2
    session.wait_for(word)
    assert session.text.startswith("kvscope: ")
    assert session.text.count("\n") == 1, session.text


# --- without an engine -------------------------------------------------------------------------------------------


def test_version(kvscope: Kvscope) -> None:
    assert kvscope("--version") == (0, f"kvscope {importlib.metadata.version('kvscope')}\n", "")


@pytest.mark.parametrize("arguments", [(), ("-h",), ("--help",)])
def test_help_names_the_commands(kvscope: Kvscope, arguments: tuple[str, ...]) -> None:
    done = kvscope(*arguments)
    assert done.code == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command}\b", done.output, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(kvscope: Kvscope, command: str) -> None:
    done = kvscope(command, "-h")
    assert (done.code, done.errors) == (0, "")
    assert f"kvscope {command}" in done.output


def test_engine_flags_carry_vllms_names(kvscope: Kvscope) -> None:
    flags = (
        "block-size num-gpu-blocks-override gpu-memory-utilization max-num-seqs max-num-batched-tokens max-model-len"
    )
    for command in ("run", "serve"):
        text = kvscope(command, "--help").output
        for flag in [*flags.split(), "dtype", "seed", "device", "attention-backend"]:
            assert f"--{flag} " in text


def test_keys_alone_names_its_command(kvscope: Kvscope) -> None:
    done = kvscope("keys")
    assert (done.code, done.errors) == (0, "")
    assert re.search(r"^  new\b", done.output, re.MULTILINE)


def test_unknown_command(kvscope: Kvscope) -> None:
    assert_refused(kvscope("watch"), "watch")


def test_unknown_flag(kvscope: Kvscope) -> None:
    assert_refused(kvscope("run", "--blocksize", "4"), "--blocksize")


def test_value_that_is_no_choice(kvscope: Kvscope) -> None:
    assert_refused(kvscope("run", *PROMPT, "--dtype", "int3"), "--dtype", "float16")


def test_unknown_option_word(kvscope: Kvscope) -> None:
    assert_refused(kvscope("run", "tiny-shakespeare", *PROMPT, "max_token=5"), "max_token", "max_tokens")


def test_option_out_of_range(kvscope: Kvscope) -> None:
    assert_refused(kvscope("run", *PROMPT, "n=0"), "n=0", "1 to 64")


def test_run_without_a_prompt(kvscope: Kvscope) -> None:
    assert_refused(kvscope("run", "tiny-shakespeare"), "--prompt")


@pytest.mark.parametrize("flag", ["--block-size", "--num-gpu-blocks-override", "--max-num-seqs", "--max-model-len"])
def test_sizes_of_nothing(kvscope: Kvscope, flag: str) -> None:
    assert_refused(kvscope("run", *PROMPT, flag, "0"), flag, "at least 1")


def test_attach_where_nothing_runs(kvscope: Kvscope) -> None:
    assert_refused(kvscope("attach"), "no engine", "kvscope serve")


def test_attach_to_a_name_nobody_has(kvscope: Kvscope) -> None:
    assert_refused(kvscope("attach", "nobody"), "nobody")


def test_list_where_nothing_runs(kvscope: Kvscope) -> None:
    done = kvscope("list")
    assert (done.code, done.errors) == (0, "")
    assert "no engine" in done.output


def test_attach_and_replay_without_a_terminal(kvscope: Kvscope, recording: Path) -> None:
    assert_refused(kvscope("attach", "tcp://127.0.0.1:9"), "terminal", "kvscope run")
    assert_refused(kvscope("replay", str(recording)), "terminal")


def test_recording_that_is_not_there(kvscope: Kvscope, tmp_path: Path) -> None:
    assert_refused_in_terminal(kvscope.in_terminal("replay", str(tmp_path / "no.mcap")), "no.mcap")


def test_recording_that_is_something_else(kvscope: Kvscope, tmp_path: Path) -> None:
    other = tmp_path / "other.mcap"
    other.write_bytes(b"\x89MCAP0\r\n" + b"nonsense" * 100)
    assert_refused_in_terminal(kvscope.in_terminal("replay", str(other)), "other.mcap")


def test_hostile_words_reach_the_terminal_printable(kvscope: Kvscope) -> None:
    done = kvscope("attach", "\x1b[31mred\x07\u202e")
    assert_refused(done)
    assert done.errors.rstrip("\n").isprintable()


def test_dead_endpoint_in_a_terminal_takes_three_seconds_at_most(kvscope: Kvscope) -> None:
    kvscope("--version")  # the modules are on the disk's cache from here on
    started = time.monotonic()
    session = kvscope.in_terminal("attach", "tcp://127.0.0.1:9")
    assert session.wait() == 2
    assert time.monotonic() - started < 6.0  # 2 s of waiting; the rest is a busy machine starting Python
    session.wait_for("kvscope: no engine answers at tcp://127.0.0.1:9")


@pytest.mark.parametrize("command", ["attach", "replay", "demo"])
def test_terminal_too_small(kvscope: Kvscope, recording: Path, command: str) -> None:
    arguments = {"attach": ["tcp://127.0.0.1:9"], "replay": [str(recording)], "demo": []}[command]
    session = kvscope.in_terminal(command, *arguments, columns=50, rows=10)
    assert session.wait() == 2
    session.wait_for("60x20")
    session.wait_for("50x10")


def test_dumb_terminal(kvscope: Kvscope, recording: Path) -> None:
    session = kvscope.in_terminal("replay", str(recording), TERM="dumb")
    assert session.wait() == 2
    session.wait_for("TERM=dumb")


def test_without_the_engines_packages(tmp_path: Path, kvscope: Kvscope) -> None:
    """A base install: what needs torch says how to get it, the rest works."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules.update(torch=None, transformers=None)")
    env = {"PYTHONPATH": import_first(tmp_path)}
    for arguments in (("run", *PROMPT), ("serve",), ("demo",)):
        assert_refused(kvscope(*arguments, **env), "pip install '.[engine]'")
    assert kvscope("--help", **env).code == 0
    assert_refused(kvscope("attach", **env), "no engine")


def test_torch_is_not_taken_down_at_the_end(kvscope: Kvscope, tmp_path: Path) -> None:
    """Its modules take seconds to collect; what registered for the end is called all the same."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys, types\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "atexit.register(os.write, 2, b'the end')\n"
        "class Heavy:\n"
        "    def __del__(self, write=os.write): write(2, b'collected')\n"
        "heavy = Heavy()\n"
    )
    done = kvscope("--help", PYTHONPATH=import_first(tmp_path))
    assert (done.code, done.errors) == (0, "the end")
    assert "attach" in done.output


def test_closed_pipe_is_quiet(kvscope: Kvscope) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run([*COMMAND, "--help"], stdout=closed, stderr=subprocess.PIPE, env=kvscope.env, check=False)
    assert done.returncode == 1
    assert done.stderr == b""


def test_closed_output_is_quiet(kvscope: Kvscope) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{' '.join(COMMAND)} --help >&-"], stderr=subprocess.PIPE, env=kvscope.env, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_interrupted_while_it_is_imported(kvscope: Kvscope, tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = kvscope("demo", PYTHONPATH=import_first(tmp_path))
    assert done in ((-signal.SIGINT, "", ""), (130, "", ""))


# --- before torch is imported ------------------------------------------------------------------------------------


def import_first(folder: Path) -> str:
    """A PYTHONPATH on which this folder comes before everything."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing torch ends the process: what can be refused cheaply never gets there."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os._exit(99)")
    return {"PYTHONPATH": import_first(tmp_path)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("serve --num-gpu-blocks-override 100000000", ["100000000", "16777216"]),
        ("run no-such-model --prompt x", ["no-such-model", "HF_HUB_OFFLINE"]),
        ("run tiny-shakespear --prompt x", ["did you mean tiny-shakespeare?"]),
        ("run --prompt x --record no/where/run.mcap", ["there is no directory no/where"]),
        ("serve --record .", ["that is a directory"]),
        ("serve --name .", ["engine name"]),
        ("serve --name -x", ["no leading dot or dash"]),
        ("run --prompt x max_tokens", ["'max_tokens' is not key=value"]),
        ("serve --max-steps-per-second nan", ["--max-steps-per-second", "'nan' is not a number from 0.1 to 1,000,000"]),
        ("demo --max-steps-per-second fast", ["'fast' is not a number from 0.1"]),
        ("record -o x.mcap --for nan", ["--for", "'nan' is not a number from 0.1 to 1,000,000,000"]),
        ("demo --record no/where/run.mcap --record-max-size 1M", ["there is no directory no/where"]),
    ],
)
def test_refused_before_torch_is_imported(
    kvscope: Kvscope, no_torch: dict[str, str], arguments: str, words: list[str]
) -> None:
    assert_refused(kvscope(*arguments.split(), **no_torch), *words)


def test_a_model_that_the_hub_does_not_have(kvscope: Kvscope, no_torch: dict[str, str], tmp_path: Path) -> None:
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        do_GET = do_HEAD  # noqa: N815 - the base class's names

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        there = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        assert_refused(kvscope("run", "who/what", *PROMPT, **no_torch, **there), "cannot get 'who/what'", "HF_TOKEN")
        hub.shutdown()


# --- with an engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run of four tokens."""
    folder = tmp_path_factory.mktemp("recording")
    done = Kvscope(folder)("run", *PROMPT, "max_tokens=4", "temperature=0", "--record", str(folder / "run.mcap"))
    assert done.code == 0, done.errors
    return folder / "run.mcap"


def test_run_prints_the_json_contract(kvscope: Kvscope) -> None:
    words = ("n=2", "max_tokens=6", "temperature=0", "ignore_eos=true", "--json", "--block-size", "4")
    done = kvscope("run", *PROMPT, "--prompt", "To be", *words)
    assert (done.code, done.errors) == (0, "")
    report = json.loads(done.output)
    assert set(report) == {"requests", "memory", "audit"}
    assert [set(request) for request in report["requests"]] == [{"id", "prompt", "prompt_token_ids", "sequences"}] * 2
    assert report["requests"][1]["prompt"] == "To be"
    for request in report["requests"]:
        assert [sequence["index"] for sequence in request["sequences"]] == [0, 1]
        for sequence in request["sequences"]:
            assert set(sequence) == {"index", "token_ids", "text", "finish_reason"}
            assert (len(sequence["token_ids"]), sequence["finish_reason"]) == (6, "length")
    memory = report["memory"]
    assert set(memory) == {"num_blocks", "block_size", "free", "held", "cached", "copies", "preemptions"}
    assert (memory["block_size"], memory["held"]) == (4, 0)
    assert memory["free"] + memory["cached"] == memory["num_blocks"]
    assert memory["copies"] >= 1
    assert report["audit"] == {"ok": True, "findings": []}


def test_a_run_that_the_model_cuts_short_says_so(kvscope: Kvscope) -> None:
    done = kvscope("run", *PROMPT, "max_tokens=40", "ignore_eos=true", "--max-model-len", "16")
    assert done.code == 0, done
    assert ", length (--max-model-len 16)\n" in done.output


def test_model_without_a_tokenizer(kvscope: Kvscope, tmp_path: Path) -> None:
    from kvscope import engine

    source = Path(str(engine.__file__)).parent / "models" / "tiny-shakespeare"
    model = tmp_path / "model"
    shutil.copytree(source, model)
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert_refused(kvscope("run", str(model), *PROMPT), "tokenizer")


def test_directory_that_is_no_model(kvscope: Kvscope, no_torch: dict[str, str], tmp_path: Path) -> None:
    assert_refused(kvscope("run", str(tmp_path), *PROMPT, **no_torch), "config.json")


def test_block_size_the_triton_kernels_cannot_have(kvscope: Kvscope) -> None:
    done = kvscope("run", *PROMPT, "--block-size", "3", "--attention-backend", "triton")
    assert_refused(done, "power of two", "3")


def test_cuda_graphs_on_a_cpu(kvscope: Kvscope) -> None:
    assert_refused(kvscope("serve", "--device", "cpu", "--cuda-graphs"), "--cuda-graphs needs a CUDA device")


def test_prompt_that_is_too_long(kvscope: Kvscope) -> None:
    assert_refused(kvscope("run", "--prompt", "thou " * 2000), "512")


def test_prompt_that_never_fits_the_pool(kvscope: Kvscope) -> None:
    done = kvscope("run", *PROMPT, "--block-size", "4", "--num-gpu-blocks-override", "2")
    assert_refused(done, "2")


@pytest.mark.parametrize("command", [("run", *PROMPT), ("serve",), ("demo",)])
def test_recording_is_not_overwritten(
    kvscope: Kvscope, recording: Path, no_torch: dict[str, str], command: tuple[str, ...]
) -> None:
    before = recording.read_bytes()
    assert_refused(kvscope(*command, "--record", str(recording), **no_torch), "run.mcap", "--force")
    assert recording.read_bytes() == before


@pytest.mark.parametrize("behind", [0, 1])
def test_port_in_use(kvscope: Kvscope, no_torch: dict[str, str], behind: int) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        listen = ("--listen", f"tcp://127.0.0.1:{port - behind}")
        assert_refused(kvscope("serve", *listen, **no_torch), str(port), "in use")


def test_address_others_can_reach(kvscope: Kvscope) -> None:
    assert_refused(kvscope("serve", "--listen", "tcp://0.0.0.0:5555"), "0.0.0.0", "keys")


def test_serve_attach_and_leave(kvscope: Kvscope, no_torch: dict[str, str]) -> None:
    server = kvscope.start("serve", "--name", "test-engine", "--block-size", "4")
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        assert server.stdout.readline() == "kvscope: engine test-engine ready\n"
        assert "test-engine" in kvscope("list").output
        assert_refused(kvscope("serve", "--name", "test-engine", **no_torch), "test-engine", "already running")
        session = kvscope.in_terminal("attach", "--read-only")
        session.wait_for("LIVE")
        session.process.send_signal(signal.SIGTERM)
        assert session.wait() == 128 + signal.SIGTERM
        assert "\x1b[?1049l" in session.text  # the alternate screen was left
        assert session.settings() == session.settings_before
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        _, errors = server.communicate()
        assert errors.endswith("kvscope: engine test-engine stopped: interrupted\n")  # numba may have had a word first
    finally:
        server.kill()
        server.communicate()


def test_interrupted_run_is_130(kvscope: Kvscope) -> None:
    process = kvscope.start("run", *PROMPT, "n=8", "max_tokens=400", "ignore_eos=true")
    time.sleep(1.0)  # anywhere: while loading, or in a step
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "")


def test_a_terminated_run_prints_what_it_has(kvscope: Kvscope, tmp_path: Path) -> None:
    recording = tmp_path / "run.mcap"
    process = kvscope.start("run", *PROMPT, "n=8", "max_tokens=900", "ignore_eos=true", "--record", str(recording))
    wait_until(lambda: recording.exists() and recording.stat().st_size > 4_000, 60)  # some steps were made
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "O Romeo" in output
    assert errors == "kvscope: terminated; this is what was done until then\n"
    assert kvscope("check", str(recording)).code == 0


@pytest.mark.parametrize("flags", [(), ("--no-mouse",)])
def test_replay_in_a_terminal(kvscope: Kvscope, recording: Path, flags: tuple[str, ...]) -> None:
    session = kvscope.in_terminal("replay", str(recording), *flags)
    session.wait_for("REPLAY")
    session.type("q")
    assert session.wait() == 0
    assert session.settings() == session.settings_before
    asks_for_mouse = re.search(r"\x1b\[\?100[0-3]h", session.text) is not None
    assert asks_for_mouse is not bool(flags)


def test_suspended_by_its_key_and_back(kvscope: Kvscope, recording: Path) -> None:
    """The shell finds its screen and modes, the process really stops, and what comes back is a whole picture."""
    session = kvscope.in_terminal("replay", str(recording))
    session.wait_for("REPLAY")
    session.type("\x1a")
    state_file = Path(f"/proc/{session.process.pid}/stat")
    wait_until(lambda: state_file.read_text().rpartition(")")[2].split()[0] == "T")
    wait_until(lambda: session.text.rpartition(ENTER_SCREEN)[2].count(LEAVE_SCREEN) == 1)
    assert session.settings() == session.settings_before
    session.process.send_signal(signal.SIGCONT)
    wait_until(
        lambda: all(word in session.text.rpartition(LEAVE_SCREEN)[2] for word in (ENTER_SCREEN, "REPLAY", "palette"))
    )
    assert session.settings() != session.settings_before
    session.type("q")
    assert session.wait() == 0
    assert session.settings() == session.settings_before


# --- the demonstration -------------------------------------------------------------------------------------------


def test_demo_without_a_terminal(kvscope: Kvscope, tmp_path: Path) -> None:
    done = kvscope("demo", "--record", str(tmp_path / "demo.mcap"))
    assert done.code == 0, done.errors
    assert re.search(r"^requests +2 finished, 3 sequences$", done.output, re.MULTILINE)
    assert re.search(r"^blocks +48 of 4 slots: \d+ free, 0 held, \d+ cached$", done.output, re.MULTILINE)
    assert re.search(r"^copies +[1-9]\d* on write", done.output, re.MULTILINE)
    assert re.search(r"^audit +ok$", done.output, re.MULTILINE)
    assert (tmp_path / "demo.mcap").stat().st_size > 1000


def test_demo_shows_why_its_engine_failed(kvscope: Kvscope) -> None:
    done = kvscope("demo", "--name", "two words")
    assert done.code == 2
    assert done.errors.splitlines()[-1].startswith("kvscope: ")
    assert "engine name 'two words'" in done.errors
    assert "Traceback" not in done.errors


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_demo_leaves_nothing_behind(kvscope: Kvscope, end: signal.Signals, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    session = kvscope.in_terminal("demo", TMPDIR=str(scratch))
    session.wait_for("LIVE")
    (engine,) = children_of(session.process.pid)
    session.process.send_signal(end)
    code = session.wait()
    wait_until(lambda: is_gone(engine), 30)
    assert {file.name for file in scratch.iterdir()} <= {f"torchinductor_{getpass.getuser()}"}  # torch's own cache
    if end is signal.SIGKILL:
        return  # nobody could restore the terminal
    assert code == 128 + end
    assert "\x1b[?1049l" in session.text
    assert session.settings() == session.settings_before


def test_demo_interrupted_while_loading(kvscope: Kvscope) -> None:
    session = kvscope.in_terminal("demo")
    session.wait_for("loading")
    wait_until(lambda: len(children_of(session.process.pid)) == 1)
    (engine,) = children_of(session.process.pid)
    session.process.send_signal(signal.SIGINT)
    assert session.wait() == 130
    wait_until(lambda: is_gone(engine), 30)
    assert "Traceback" not in session.text
