"""`check`, `stats`, `diff`, `export`, `record`, `status`: the real commands on a real recording."""

import csv
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.dashboard.errors import CommandError
from kvscope.dashboard.still import parse_moment, parse_size
from kvscope.events import types as ev
from kvscope.events.codec import encode_batch, encode_state
from kvscope.events.fold import apply_batch
from kvscope.events.state import EngineState
from kvscope.events.types import Batch
from kvscope.transport.recording import Recorder, SeriesRecorder, read_recording

from .conftest import COMMAND, Finished, Kvscope, wait_until

RUN = (
    "run",
    *("--prompt", "O Romeo, Romeo, wherefore art thou", "--prompt", "To be, or not to be"),
    *("n=2", "max_tokens=12", "temperature=0.8", "seed=1", "--block-size", "4"),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


def record_run(folder: Path, name: str, num_blocks: int) -> Path:
    path = folder / name
    done = Kvscope(folder)(*RUN, "--num-gpu-blocks-override", str(num_blocks), "--record", str(path))
    assert done.code == 0, done.errors
    return path


@pytest.fixture(scope="session")
def roomy(folder: Path) -> Path:
    """Two prompts of two candidates each, in a pool with room for all."""
    return record_run(folder, "roomy.mcap", 64)


@pytest.fixture(scope="session")
def tight(folder: Path) -> Path:
    """The same where it does not fit."""
    return record_run(folder, "tight.mcap", 13)


@pytest.fixture(scope="session")
def leaking(folder: Path, roomy: Path) -> Path:
    """The first one without its first release."""
    recorder, is_planted = Recorder(folder / "leaking.mcap"), False
    for seq, batch in read_recording(roomy).batches:
        kept = []
        for event in batch.events:
            if isinstance(event, ev.BlocksReleased) and not is_planted:
                is_planted = True
            else:
                kept.append(event)
        recorder.record(seq, 1, encode_batch(with_events(batch, kept)))
    recorder.close()
    return folder / "leaking.mcap"


def with_events(batch: Batch, events: list[ev.Event]) -> Batch:
    return Batch(epoch=batch.epoch, step=batch.step, phase=batch.phase, time_ns=batch.time_ns, events=tuple(events))


def assert_refused(done: Finished, *words: str) -> None:
    assert done.code == 2, done
    assert done.output == ""
    assert done.errors.startswith("kvscope: ")
    assert done.errors.count("\n") == 1, done.errors
    for word in words:
        assert word in done.errors


# --- check -------------------------------------------------------------------------------------------------------


def test_check_of_a_sound_run(kvscope: Kvscope, roomy: Path) -> None:
    done = kvscope("check", str(roomy), "max_held_blocks<=64", "preemptions == 0", "no_leak_at_end", "complete")
    assert (done.code, done.errors) == (0, "")
    lines = done.output.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", "audit"],
        ["ok", "max_held_blocks<=64"],
        ["ok", "preemptions==0"],
        ["ok", "no_leak_at_end"],
        ["ok", "complete"],
    ]


def test_check_fails_with_exit_code_1(kvscope: Kvscope, tight: Path, leaking: Path) -> None:
    done = kvscope("check", str(tight), "preemptions==0")
    assert done.code == 1
    assert re.search(r"^FAIL +preemptions==0 +[1-9]\d*$", done.output, re.MULTILINE)
    done = kvscope("check", str(leaking), "--json", "no_leak_at_end", "copies>=0")
    assert (done.code, done.errors) == (1, "")
    report = json.loads(done.output)
    assert report["ok"] is False
    assert 7 in [finding["rule"] for finding in report["findings"] if "still holds" in finding["message"]]
    assert [result["ok"] for result in report["assertions"]] == [False, True]


def test_rules_from_a_file(kvscope: Kvscope, roomy: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('assert = ["requests == 2", "no_leak_at_end"]')
    assert kvscope("check", str(roomy), "--rules", str(rules)).code == 0
    assert kvscope("check", str(roomy), "copies==0", "--rules", str(rules)).code == 1
    rules.write_text('assert = ["request\x1b == 2"]'.replace("\x1b", "\\u001b"))
    done = kvscope("check", str(roomy), "--rules", str(rules))
    assert_refused(done, "rules.toml")
    assert done.errors.rstrip("\n").isprintable()
    assert_refused(kvscope("check", str(roomy), "--rules", str(tmp_path / "no.toml")), "no.toml")


def test_bad_input_is_exit_code_2(kvscope: Kvscope, roomy: Path, tmp_path: Path) -> None:
    assert_refused(kvscope("check", str(roomy), "copy==3"), "did you mean copies")
    assert_refused(kvscope("check", str(roomy), "copies=3"), "copies=3")
    for command in ("check", "stats", "export"):
        arguments = ["--pool"] if command == "export" else []
        assert_refused(kvscope(command, str(tmp_path / "no.mcap"), *arguments), "no.mcap")
        assert_refused(kvscope(command, str(tmp_path), *arguments), "is not a file")
    (tmp_path / "other.mcap").write_bytes(b"nonsense" * 100)
    assert_refused(kvscope("diff", str(roomy), str(tmp_path / "other.mcap")), "other.mcap")


def test_torn_recordings(kvscope: Kvscope, roomy: Path, tmp_path: Path) -> None:
    content = roomy.read_bytes()
    torn = tmp_path / "torn.mcap"
    told = 0
    for share in (0.3, 0.5, 0.7, 0.9):
        torn.write_bytes(content[: int(len(content) * share)])
        done = kvscope("check", str(torn), "no_leak_at_end")
        if done.code == 2:
            assert "holds no whole batch" in done.errors
            continue
        told += 1
        assert done.code == 0, done
        assert re.search(r"^note  (ends abruptly after batch \d+|every batch is there)", done.output, re.MULTILINE)
        assert kvscope("check", str(torn), "complete").code == 1
        assert "incomplete" in kvscope("stats", str(torn)).output
    assert told


# --- stats, diff, export -----------------------------------------------------------------------------------------


def test_stats_agree_with_the_runs_own_report(kvscope: Kvscope, roomy: Path) -> None:
    stats = json.loads(kvscope("stats", str(roomy), "--json").output)
    again = kvscope(*RUN, "--num-gpu-blocks-override", "64", "--json")
    memory = json.loads(again.output)["memory"]
    assert (stats["copies"], stats["preemptions"]) == (memory["copies"], memory["preemptions"])
    assert stats["pool"]["num_blocks"] == 64
    assert stats["requests"]["finished"] == 2
    generated = [len(s["token_ids"]) for r in json.loads(again.output)["requests"] for s in r["sequences"]]
    assert stats["generated_tokens"] == sum(generated)
    text = kvscope("stats", str(roomy))
    assert (text.code, text.errors) == (0, "")
    assert text.output.startswith(f"recording     {roomy}: ")
    assert f"copies        {memory['copies']} on write" in text.output


def test_diff(kvscope: Kvscope, roomy: Path, tight: Path) -> None:
    same = kvscope("diff", str(roomy), str(roomy))
    assert (same.code, same.errors) == (0, "")
    assert "2 requests in both, 2 with equal tokens" in same.output
    done = kvscope("diff", str(roomy), str(tight), "--json")
    report = json.loads(done.output)
    assert report["same"] is True, "preemption changes no token"
    assert done.code == 0
    totals = {total["name"]: total for total in report["totals"]}
    assert (totals["num_blocks"]["a"], totals["num_blocks"]["b"]) == (64, 13)
    assert totals["preemptions"]["b"] > totals["preemptions"]["a"] == 0
    text = kvscope("diff", str(roomy), str(tight)).output
    assert " -> " in text
    assert " > " not in text


def test_diff_of_other_prompts_is_exit_code_1(kvscope: Kvscope, roomy: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.mcap"
    assert kvscope("run", "--prompt", "What", "max_tokens=2", "--record", str(other)).code == 0
    done = kvscope("diff", str(roomy), str(other))
    assert done.code == 1
    assert "0 requests in both" in done.output


def test_export(kvscope: Kvscope, roomy: Path, tmp_path: Path) -> None:
    recording = read_recording(roomy)
    done = kvscope("export", str(roomy), "--events")
    assert (done.code, done.errors) == (0, "")
    lines = [json.loads(line) for line in done.output.splitlines()]
    assert [line["seq"] for line in lines] == [seq for seq, batch in recording.batches for _ in batch.events]
    assert lines[0]["type"] == "engine_started"
    target = tmp_path / "pool.csv"
    assert kvscope("export", str(roomy), "--pool", "-o", str(target)) == (0, "", "")
    with target.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(recording.batches)
    assert {int(row["free"]) + int(row["held"]) + int(row["cached"]) for row in rows[1:]} == {64}
    assert (
        max(int(row["held"]) for row in rows)
        == json.loads(kvscope("stats", str(roomy), "--json").output)["pool"]["peak_held"]
    )


@pytest.fixture
def rotated(roomy: Path, tmp_path: Path) -> list[Path]:
    """The roomy run in several files."""
    recorder, state = SeriesRecorder(tmp_path / "part.mcap", 1), EngineState()
    for seq, batch in read_recording(roomy).batches:
        state = apply_batch(state, batch)
        current = recorder._recorders[-1]
        recorder.record(seq, batch.time_ns, encode_batch(batch), batch, state)
        wait_until(lambda current=current: current.num_queued_bytes == 0, 10)
    recorder.close()
    return sorted(tmp_path.glob("part.*.mcap"))


@pytest.mark.parametrize("command", ["run --prompt x", "demo", "simulate --synthetic requests=1"])
def test_a_size_needs_a_recording(kvscope: Kvscope, command: str) -> None:
    assert_refused(kvscope(*command.split(), "--record-max-size", "64K"), "add --record FILE")


def test_the_files_of_a_rotated_recording_are_one(kvscope: Kvscope, roomy: Path, rotated: list[Path]) -> None:
    assert len(rotated) > 1
    names = [str(path) for path in rotated]
    for command in (["stats", "--json"], ["export", "--events"], ["export", "--pool"]):
        assert kvscope(*command, *names).output == kvscope(*command, str(roomy)).output
    done = kvscope("diff", str(roomy), names[0], "--json")
    assert (done.code, done.errors) == (0, "")
    assert_refused(kvscope("stats", *reversed(names)), "order")


def test_moments_before_a_later_file_of_a_rotated_recording(kvscope: Kvscope, rotated: list[Path]) -> None:
    """Its first picture is the state that it begins with, under that state's numbers; what was before is elsewhere."""
    recording = read_recording(rotated[-1])
    part, state = str(recording.path), recording.initial_state
    assert state is not None
    assert state.step > 1
    done = kvscope("export", part, "--at", "start", "--size", "160x45")
    assert f"step {state.step} of " in done.output
    assert f"{state.time_ns / 1e9:.2f} of " in done.output
    bounds = {"step:1": state.step, "seq:2": recording.initial_seq}
    for moment, bound in {**bounds, "time:0s": f"{state.time_ns / 1e9:.9f}s"}.items():
        assert_refused(kvscope("export", part, "--at", moment), f"begins at {moment.partition(':')[0]}:{bound}")


def test_the_screen_of_a_state_alone(kvscope: Kvscope, rotated: list[Path], tmp_path: Path) -> None:
    """As of an engine that was idle while somebody recorded it."""
    state, alone = read_recording(rotated[-1]).initial_state, tmp_path / "alone.mcap"
    assert state is not None
    recorder = Recorder(alone)
    recorder.record_keyframe(7, 1, encode_state(state))
    recorder.close()
    for moment in ("start", "end", "seq:7", f"step:{state.step}"):
        done = kvscope("export", str(alone), "--at", moment, "--size", "160x45")
        seconds = f"{state.time_ns / 1e9:.2f}"
        assert f"the end  batch 0/0  step {state.step} of {state.step}  {seconds} of {seconds} s  " in done.output
    assert_refused(kvscope("export", str(alone), "--at", "seq:8"), "ends at seq:7")


def test_the_screen_at_a_moment(kvscope: Kvscope, roomy: Path, tmp_path: Path) -> None:
    """What the dashboard draws there, the same each time; beyond the end there is nothing to draw."""
    arguments = ("export", str(roomy), "--at", "step:3", "--size", "80x24")
    done = kvscope(*arguments)
    assert (done.code, done.errors) == (0, "")
    lines = done.output.splitlines()
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    for word in ("REPLAY", "step 3 ", "Block pool", "r1"):
        assert word in done.output
    assert "audited" not in done.output
    assert kvscope(*arguments).output == done.output
    target = tmp_path / "screen.svg"
    assert kvscope(*arguments, "--ascii", "-o", str(target)) == (0, "", "")
    assert target.read_text().startswith("<svg")
    assert_refused(kvscope("export", str(roomy), "--at", "step:9999"), "ends at step:")
    assert_refused(kvscope("export", str(roomy), "--at", "3"), "--at is")


@pytest.mark.parametrize("wrong", ["", "step:", "3", "time:3", "step:x", "seq:-1", "seq:\u0663", "end:"])
def test_moments_that_are_none(wrong: str) -> None:
    with pytest.raises(CommandError, match="--at is"):
        parse_moment(wrong)


@pytest.mark.parametrize("wrong", ["", "80", "80x", "10x10", "501x40", "80x24x1", "99999x99999"])
def test_sizes_that_are_none(wrong: str) -> None:
    with pytest.raises(CommandError, match="--size is"):
        parse_size(wrong)


def test_export_overwrites_nothing_unasked(kvscope: Kvscope, roomy: Path, tmp_path: Path) -> None:
    target = tmp_path / "pool.csv"
    target.write_text("mine")
    assert_refused(kvscope("export", str(roomy), "--pool", "-o", str(target)), "--force")
    assert target.read_text() == "mine"
    assert kvscope("export", str(roomy), "--pool", "-o", str(target), "--force").code == 0
    before = roomy.read_bytes()
    assert_refused(kvscope("export", str(roomy), "--pool", "-o", str(roomy), "--force"), "the recording itself")
    assert roomy.read_bytes() == before
    assert_refused(kvscope("export", str(roomy)), "--events", "--pool")
    assert_refused(kvscope("export", str(roomy), "--pool", "-o", str(tmp_path / "no" / "where.csv")), "where.csv")


@pytest.mark.parametrize("arguments", [["export", "--events"], ["stats"], ["check"]])
def test_closed_pipe_is_quiet(kvscope: Kvscope, roomy: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, arguments[0], str(roomy), *arguments[1:]]
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, env=kvscope.env, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_full_disk_is_one_line(kvscope: Kvscope, roomy: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [*COMMAND, "export", str(roomy), "--events"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=kvscope.env, check=False)
    assert done.returncode == 1
    assert re.fullmatch(rb"kvscope: cannot write the output: No space left on device\n", done.stderr)


def test_hostile_text_is_printable(kvscope: Kvscope, tmp_path: Path) -> None:
    hostile = tmp_path / "\x1b]0;title\x07.mcap"
    prompt = "\x1b[31mred\u202e\x9b"
    assert kvscope("run", "--prompt", prompt, "max_tokens=2", "--record", str(hostile)).code == 0
    for arguments in (["check"], ["stats"], ["stats", "--json"], ["export", "--events"], ["diff", str(hostile)]):
        done = kvscope(arguments[0], str(hostile), *arguments[1:])
        assert done.code == 0, done
        assert all(line.isprintable() for line in done.output.split("\n"))
    assert_refused(kvscope("export", str(hostile), "--pool", "-o", str(hostile)))


def test_without_the_engines_packages(kvscope: Kvscope, roomy: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules.update(torch=None, transformers=None)")
    env = {"PYTHONPATH": str(tmp_path)}
    for arguments in (["check"], ["stats"], ["diff", str(roomy)], ["export", "--pool"]):
        assert kvscope(arguments[0], str(roomy), *arguments[1:], **env).code == 0


# --- with a running engine ---------------------------------------------------------------------------------------


class Server:
    """An engine to attach to, and its output drained."""

    def __init__(self, kvscope: Kvscope, name: str) -> None:
        self.name = name
        self.process = kvscope.start("serve", "--name", name, "--block-size", "4", "--num-gpu-blocks-override", "48")
        assert self.process.stdout is not None
        assert "ready" in self.process.stdout.readline()
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=stream.read, daemon=True).start()

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


@pytest.fixture
def server(kvscope: Kvscope) -> Iterator[Server]:
    engine = Server(kvscope, "watched")
    yield engine
    engine.close()


def submit(kvscope: Kvscope, prompt: str, max_tokens: int) -> int:
    """Run a prompt of two candidates to its end; the number of the batch in which it ended, or of a later one."""
    from kvscope.transport.client import EngineClient
    from kvscope.transport.endpoints import directory_endpoints

    client = EngineClient(directory_endpoints(Path(kvscope.env["XDG_RUNTIME_DIR"]) / "kvscope" / "watched"))
    client.connect(20)
    try:
        reply = client.submit(prompt, {"max_tokens": max_tokens, "ignore_eos": True, "n": 2}).result(20)
        assert reply.ok, reply
        wait_until(lambda: reply.request_id in client.view.state.requests)
        wait_until(lambda: client.view.state.requests[reply.request_id].status == "finished")
        return client.view.last_seq or 0
    finally:
        client.close()


def test_record_from_outside(kvscope: Kvscope, server: Server, tmp_path: Path) -> None:
    submit(kvscope, "To be", 4)
    path = tmp_path / "outside.mcap"
    recorder = kvscope.start("record", "watched", "-o", str(path))
    assert recorder.stderr is not None
    assert recorder.stderr.readline() == "kvscope: recording watched; Ctrl-C ends it\n"
    last_seq = submit(kvscope, "or not to be", 8)
    wait_until(lambda: (read_recording(path).last_seq or 0) >= last_seq)
    recorder.send_signal(signal.SIGINT)
    output, errors = recorder.communicate(timeout=30)
    assert (recorder.returncode, errors) == (0, "")
    recording = read_recording(path)
    assert recording.missing is None
    assert recording.initial_state is not None
    assert recording.initial_state.counters.generated_tokens == 8
    events = sum(len(batch.events) for _, batch in recording.batches)
    assert re.fullmatch(
        rf"kept {len(recording.batches)} batches, {events} events in \d+\.\d s, no gaps: .*outside.mcap\n", output
    )
    assert kvscope("check", str(path), "generated_tokens==16", "no_leak_at_end", "requests==1").code == 0
    assert kvscope("check", str(path), "complete").code == 1, "what was before is not in it"
    assert_refused(kvscope("record", "watched", "-o", str(path)), "--force")
    assert recording.batches == read_recording(path).batches
    done = kvscope("record", "-o", str(path), "--force", "--for", "0.3")
    assert (done.code, done.output) == (0, f"kept the state alone, as the engine was idle, no gaps: {path}\n"), done
    assert read_recording(path).batches == []


def test_record_ends_with_the_engine(kvscope: Kvscope, server: Server, tmp_path: Path) -> None:
    recorder = kvscope.start("record", "-o", str(tmp_path / "run.mcap"))
    assert recorder.stderr is not None
    recorder.stderr.readline()
    server.process.send_signal(signal.SIGINT)
    output, _ = recorder.communicate(timeout=30)
    assert recorder.returncode == 0
    assert output.splitlines()[1] == "ended by itself: the engine has stopped"
    assert kvscope("check", str(tmp_path / "run.mcap"), "no_leak_at_end").code == 0


def test_status(kvscope: Kvscope, server: Server) -> None:
    submit(kvscope, "To be", 4)
    done = kvscope("status", "--once")
    assert (done.code, done.errors) == (0, "")
    assert re.fullmatch(
        r"watched  tiny-shakespeare  running  step \d+  blocks \d+ free 0 held \d+ cached of 48  "
        r"requests 0 running 0 waiting\n",
        done.output,
    )
    status = json.loads(kvscope("status", "watched", "--once", "--json").output)
    assert (status["name"], status["connection"], status["num_blocks"]) == ("watched", "LIVE", 48)
    assert status["free"] + status["held"] + status["cached"] == 48
    assert status["tokens_per_s"] is None
    watching = kvscope.start("status", "--json")
    assert watching.stdout is not None
    lines = [json.loads(watching.stdout.readline()) for _ in range(2)]
    assert lines[1]["tokens_per_s"] == 0
    watching.send_signal(signal.SIGINT)
    _, errors = watching.communicate(timeout=30)
    assert (watching.returncode, errors) == (0, "")


def test_nobody_to_record_or_to_look_at(kvscope: Kvscope, tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    assert_refused(kvscope("record", "-o", str(path)), "no engine is running", "kvscope serve")
    assert_refused(kvscope("record", "tcp://127.0.0.1:9", "-o", str(path)), "no engine answers")
    assert not path.exists()
    assert_refused(kvscope("status"), "no engine is running")
    assert_refused(kvscope("status", "nobody"), "nobody")
    assert_refused(kvscope("record"), "--output")


def test_record_where_nothing_can_be_written(kvscope: Kvscope, server: Server, tmp_path: Path) -> None:
    assert_refused(kvscope("record", "-o", str(tmp_path / "no" / "run.mcap")), "run.mcap")
