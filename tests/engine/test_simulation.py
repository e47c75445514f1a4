"""Traces through the engine without a model: what is read, what is refused, and that the figures are right."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvscope.analysis.check import check
from kvscope.analysis.diff import diff
from kvscope.analysis.stats import measure
from kvscope.engine.config import ConfigError
from kvscope.engine.simulation import command
from kvscope.engine.simulation.synthetic import Synthetic, make_trace, parse_synthetic
from kvscope.engine.simulation.trace import Trace, TraceError
from kvscope.engine.simulation.trace_files import read_trace
from kvscope.events import types as ev
from kvscope.transport.recording import Recording, read_recording

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [46, 47, 48]}
{"timestamp": 27482, "input_length": 1030, "output_length": 2, "hash_ids": [46, 47, 2353]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:49.1800000,5,0
"""
OWN = """\
arrival_s,prompt_tokens,output_tokens,hash_ids
0.5,600,7,9 12
0.25,520,8,9
1.5,3,1,
"""


def settings(**changes: Any) -> command.Settings:
    values = {
        "trace": None,
        "synthetic": None,
        "num_blocks": 300,
        "block_size": 16,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "max_model_len": None,
        "prefix_caching": True,
        "max_requests": None,
        "max_waiting": 1_000,
        "speed": 1.0,
        "chunk_size": 512,
        "step_us": 8_000.0,
        "token_us": 40.0,
        "context_us": 0.066,
    }
    return command.Settings(**{**values, **changes})


def read(path: Path, text: str, **options: Any) -> Trace:
    path.write_text(text)
    return read_trace(path, **{"chunk_size": 512, **options})


def simulate(capsys: pytest.CaptureFixture[str], record: Path, **changes: Any) -> tuple[dict[str, Any], Recording]:
    """The JSON summary, and the recording."""
    assert command.simulate(settings(**changes), record=record, force=True, as_json=True) == 0
    return json.loads(capsys.readouterr().out), read_recording(record)


def test_mooncake_lines(tmp_path: Path) -> None:
    trace = read(tmp_path / "t.jsonl", MOONCAKE)
    first, second = trace.prompt_token_ids(0), trace.prompt_token_ids(1)
    assert (len(first), len(second), trace.num_output_tokens(1)) == (1100, 1030, 2)
    assert first[:1024] == second[:1024]
    assert (first[0] != first[512], first[1024] != second[1024]) == (True, True)
    assert trace.arrivals_ns.tolist() == [0, 27_482_000_000]
    assert max(*first, *second) < trace.vocab_size


def test_azure_rows_in_the_order_of_their_times(tmp_path: Path) -> None:
    trace = read(tmp_path / "t.csv", AZURE)
    microseconds = [round(ns / 1000) for ns in trace.arrivals_ns.tolist()]
    assert microseconds == [0, 2_499_410, 4_314_579]  # of seven digits, six count
    assert [len(trace.prompt_token_ids(number)) for number in range(3)] == [374, 5, 396]
    assert [trace.num_output_tokens(number) for number in range(3)] == [44, 1, 109]  # none is one
    assert trace.num_without_output == 1
    assert trace.prompt_token_ids(0)[0] != trace.prompt_token_ids(2)[0]  # nothing is said to be shared


def test_own_rows_with_and_without_hash_ids(tmp_path: Path) -> None:
    trace = read(tmp_path / "t.csv", OWN)
    early, late, short = (trace.prompt_token_ids(number) for number in range(3))
    assert trace.arrivals_ns.tolist() == [0, 250_000_000, 1_250_000_000]
    assert early[:512] == late[:512]
    assert early[512] not in late
    assert set(short).isdisjoint({*early, *late})
    assert len(read(tmp_path / "t.csv", OWN, max_requests=2)) == 2


def test_columns_may_come_in_any_order_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    trace = read(tmp_path / "t.csv", "output_tokens,arrival_s,note,prompt_tokens\n\n7,0.0,x,33\n\n")
    assert (len(trace), len(trace.prompt_token_ids(0)), trace.num_output_tokens(0)) == (1, 33, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: not a trace"),
        ("a,b,c\n1,2,3\n", ":1: not a trace"),
        ("arrival_s,prompt_tokens,output_tokens\n", ": no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2\n", ":2: 2 fields under 3 columns"),
        ("arrival_s,prompt_tokens,output_tokens\n0,9,9\n1,x,3\n", ":3: prompt_tokens is a whole number, not 'x'"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,9,9\n", ":2: the arrival is nan"),
        ("arrival_s,prompt_tokens,output_tokens\n0,0,9\n", ":2: a prompt of 0 tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n0,9,-1\n", ":2: an output of -1 tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n0,99999999999,1\n", ":2: a prompt of 99,999,999,999 tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n0,9,1\n1e300,9,1\n", "more than ten years"),
        ("arrival_s,prompt_tokens,output_tokens,hash_ids\n0,9,1,99999999999999999999\n", ":2: the hash id"),
        ('arrival_s,prompt_tokens,output_tokens\n0,9,"' + "x" * 200_000 + '"\n', ":2: field larger"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,1\n", ":2: TIMESTAMP is a date and time, not 'never'"),
        (MOONCAKE + '{"timestamp": 0, "input_length": -5, "output_length": 1}\n', ":3: a prompt of -5 tokens"),
        (MOONCAKE + '{"timestamp": 0, "input_length": 5}\n', ":3: Object missing required field `output_length`"),
        (MOONCAKE + "{\n", ":3: Input data was truncated"),
        ("{" * 100_000, ":1: "),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError) as error:
        read(tmp_path / "t.txt", text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"arrival_s,prompt_tokens,output_tokens\n0,9,1\n\xff\xfe\x1b[2J\n")
    with pytest.raises(TraceError, match="not UTF-8 text"):
        read_trace(tmp_path / "t.csv", chunk_size=512)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("many=5", "many=5 is not NAME=NUMBER with one of the names requests, rate,"),
        ("requests", "requests is not NAME=NUMBER"),
        ("requests=x", "requests is a whole number, not 'x'"),
        ("seed=1.5", "seed is a whole number, not '1.5'"),
        ("rate=fast", "rate is a number, not 'fast'"),
        ("rate=nan", "rate is from 0 to 1,000,000,000, not nan"),
        ("requests=0", "requests is from 1 to 100,000,000, not 0"),
        ("rate=-1", "rate is from 0 to"),
        ("prompt=99999999", "prompt is from 1 to 65,536"),
        ("rate=1 rate=2", "rate is there twice"),
    ],
)
def test_synthetic_options_that_cannot_work(words: str, message: str) -> None:
    with pytest.raises(TraceError) as error:
        parse_synthetic(words)
    assert str(error.value).startswith(f"--synthetic: {message}")


def test_the_same_seed_is_the_same_trace() -> None:
    def drawn(seed: int) -> list[list[int]]:
        trace = make_trace(Synthetic(requests=50, prefixes=3, seed=seed), 512)
        return [trace.arrivals_ns.tolist(), *(trace.prompt_token_ids(number) for number in range(50))]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len({tuple(tokens[:512]) for tokens in drawn(1)[1:]}) == 3  # the beginnings in common


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="--speed is from"):
        settings(speed=0.0)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_summary_is_what_the_recording_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix_caching: bool
) -> None:
    """Counted on the way, and again from the recording by other code: preemptions, sharing and waiting included."""
    words = "requests=60 rate=40 prompt=300 output=60 prefixes=3"
    summary, recording = simulate(capsys, tmp_path / "a.mcap", synthetic=words, prefix_caching=prefix_caching)
    stats = measure(recording)
    assert check(recording, []).ok
    assert summary["finished"] == stats.requests.finished == 60
    for name in ("duration_s", "steps", "events", "generated_tokens", "computed_tokens", "preemptions", "tokens_lost"):
        assert summary[name] == getattr(stats, name), name
    for name in ("prefix_lookup_tokens", "prefix_hit_tokens", "evictions"):
        assert summary[name] == getattr(stats, name), name
    for name in ("peak_held", "peak_cached", "peak_unwritten_slots", "mean_held", "mean_unwritten_slots"):
        assert summary[name] == getattr(stats.pool, name), name
    assert summary["mean_unwritten_share"] == pytest.approx(stats.pool.mean_unwritten_share)
    assert summary["peak_unwritten_share"] == pytest.approx(stats.pool.peak_unwritten_share)
    assert summary["preemptions"] > 0
    assert (summary["prefix_hit_tokens"] > 0) is prefix_caching
    # `stats` counts from the submission, between two steps; the summary from the arrival.
    assert summary["mean_wait_s"] >= stats.requests.mean_wait_s
    assert summary["mean_wait_s"] == pytest.approx(stats.requests.mean_wait_s, abs=0.05)


def test_a_simulation_repeats_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "requests=40 rate=100 prompt=200 output=30 prefixes=2 seed=3"
    runs = [simulate(capsys, tmp_path / name, synthetic=words)[1] for name in ("a.mcap", "b.mcap")]
    first, second = ([(batch.step, batch.time_ns, batch.events) for _, batch in run.batches] for run in runs)
    assert first[1:] == second[1:]  # the first says when, by the wall clock


def test_who_waits_outside_still_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "requests=80 rate=0 prompt=100 output=20"
    summaries = [
        simulate(capsys, tmp_path / "a.mcap", synthetic=words, max_waiting=max_waiting)[0]
        for max_waiting in (20, 1_000)
    ]
    assert [summary["finished"] for summary in summaries] == [80, 80]
    assert summaries[0]["duration_s"] == summaries[1]["duration_s"]
    assert summaries[0]["mean_wait_s"] == pytest.approx(summaries[1]["mean_wait_s"])


def test_a_request_that_can_never_run_is_refused_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9000,1\n1,20,4\n")
    summary, recording = simulate(capsys, tmp_path / "a.mcap", trace=tmp_path / "t.csv")
    assert (summary["finished"], summary["refused"]) == (1, 1)
    assert "the pool has 300" in summary["first_refusal"]
    assert measure(recording).requests.refused == 1


def test_the_same_trace_with_reserved_maxima(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tokens; later, as fewer requests fit, and nobody is preempted."""
    words = "requests=60 rate=50 prompt=200 output=60"
    changes = {"synthetic": words, "num_blocks": 150, "prefix_caching": False}
    sides = {
        allocator: simulate(capsys, tmp_path / f"{allocator}.mcap", allocator=allocator, **changes)
        for allocator in ("paged", "contiguous")
    }
    assert all(check(recording, []).ok for _, recording in sides.values())
    found = diff(*(recording for _, recording in sides.values()))
    assert found.same
    assert found.notes == ["allocator is paged in A, contiguous in B"]
    totals = {total.name: total for total in found.totals}
    assert totals["preemptions"].a > totals["preemptions"].b == 0
    assert totals["mean_unwritten_slots"].b > 3 * totals["mean_unwritten_slots"].a
    assert totals["steps"].b > totals["steps"].a
    assert totals["waited_reservation_s"].a == 0 < totals["waited_reservation_s"].b
    assert totals["waited_fragmentation_s"].b > 0


def test_outputs_end_as_in_the_trace_whatever_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is asked for is what a contiguous allocator reserves; a paged one does the same steps as without."""
    changes = {"synthetic": "requests=40 rate=50 prompt=100 output=30", "num_blocks": 400, "prefix_caching": False}
    exact, known = simulate(capsys, tmp_path / "known.mcap", **changes)
    longest = max(outputs(known).values())
    paged, asked = simulate(capsys, tmp_path / "asked.mcap", max_tokens=longest, **changes)
    assert outputs(asked) == outputs(known)
    assert (paged["steps"], paged["duration_s"]) == (exact["steps"], exact["duration_s"])
    assert reasons(asked) == {"stop", "length"}
    for reserved, max_tokens in ((1.0, None), (1.5, longest)):
        contiguous, run = simulate(
            capsys, tmp_path / "c.mcap", allocator="contiguous", max_tokens=max_tokens, **changes
        )
        assert outputs(run) == outputs(known)
        assert contiguous["mean_unwritten_slots"] > reserved * 2 * exact["mean_unwritten_slots"]
    _, cut = simulate(capsys, tmp_path / "cut.mcap", max_tokens=20, **changes)
    assert outputs(cut) == {name: min(count, 20) for name, count in outputs(known).items()}
    assert reasons(known) == {"length"}


def outputs(recording: Recording) -> dict[str, int]:
    """How many tokens each sequence got."""
    counts: Counter[str] = Counter()
    for _, batch in recording.batches:
        counts.update(e.sequence_id for e in batch.events if isinstance(e, ev.TokensGenerated))
    return counts


def reasons(recording: Recording) -> set[str]:
    return {e.reason for _, batch in recording.batches for e in batch.events if isinstance(e, ev.SequenceFinished)}


@pytest.mark.parametrize("window", [None, 1, 7, 40, 64, 1_000])
def test_a_sliding_window_holds_what_arithmetic_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], window: int | None
) -> None:
    """Every request in every step: up to its last position, from the first one that is read again."""
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,90,60\n0,100,30\n0,5,80\n")
    changes: dict[str, Any] = {"trace": tmp_path / "t.csv", "prefix_caching": False, "sliding_window": window}
    summary, recording = simulate(capsys, tmp_path / "a.mcap", **changes, max_num_batched_tokens=512)
    assert check(recording, []).ok

    def num_given_up(num_computed: int) -> int:
        return max(num_computed - max(window, 2) + 1, 0) // 16 if window is not None else 0

    planned, committed, context = [0] * 80, [0] * 80, 0
    for num_prompt, num_output in ((90, 60), (100, 30), (5, 80)):
        for step in range(num_output):
            start, stop = num_prompt + step - 1 if step else 0, num_prompt + step
            context += stop - (max(start - window + 1, 0) if window is not None else 0)
            planned[step] += -(-stop // 16) - num_given_up(start)
            if step < num_output - 1:  # it ends with its last step
                committed[step] += -(-stop // 16) - num_given_up(stop)
    assert (summary["steps"], summary["peak_held"]) == (80, max(planned))
    assert summary["mean_held"] == pytest.approx(sum(committed) / 80)
    micros = 80 * 8_000 + (195 + 59 + 29 + 79) * 40 + context * 0.066
    assert summary["duration_s"] == pytest.approx(micros / 1e6)
    given_up = [e for _, batch in recording.batches for e in batch.events if isinstance(e, ev.BlocksOutOfWindow)]
    assert sum(len(event.block_ids) for event in given_up) == sum(map(num_given_up, (149, 129, 84)))


def test_a_request_longer_than_the_pool_runs_in_a_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,2000,100\n")
    changes: dict[str, Any] = {"trace": tmp_path / "t.csv", "num_blocks": 20, "max_num_batched_tokens": 64}
    whole, _ = simulate(capsys, tmp_path / "a.mcap", **changes)
    assert (whole["finished"], whole["refused"]) == (0, 1)
    windowed, recording = simulate(capsys, tmp_path / "a.mcap", **changes, sliding_window=128)
    assert (windowed["finished"], windowed["generated_tokens"]) == (1, 100)
    assert windowed["peak_held"] <= 128 // 16 + 64 // 16 + 1
    assert check(recording, []).ok


def test_a_preempted_request_may_be_swapped_or_never_come_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "requests=60 rate=40 prompt=300 output=60"
    choices: dict[str, dict[str, Any]] = {
        "recompute": {},
        "swap": {"swap_space": 1.0, "preemption": "swap"},
        "promised": {"admission": "worst-case"},
    }
    runs = {
        name: simulate(capsys, tmp_path / f"{name}.mcap", synthetic=words, **changes)
        for name, changes in choices.items()
    }
    assert all(check(recording, []).ok for _, recording in runs.values())
    summaries = {name: summary for name, (summary, _) in runs.items()}
    assert [summary["preemptions"] > 0 for summary in summaries.values()] == [True, True, False]
    assert [summary["tokens_lost"] > 0 for summary in summaries.values()] == [True, False, False]
    assert [summary["blocks_swapped_out"] > 0 for summary in summaries.values()] == [False, True, False]


def test_why_they_waited_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    crowded = settings(synthetic="requests=40 rate=0 prompt=100 output=5", max_num_seqs=2)
    assert command.simulate(crowded, record=None, force=False, as_json=False) == 0
    said = capsys.readouterr().out
    assert "% behind earlier requests" in said
    assert "% for a seat (--max-num-seqs)" in said


def test_idle_time_passes_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,20,2\n3600,20,2\n")
    summary, _ = simulate(capsys, tmp_path / "a.mcap", trace=tmp_path / "t.csv", speed=2.0)
    assert summary["steps"] == 4
    assert summary["duration_s"] == pytest.approx(1800, abs=0.1)
    assert summary["mean_wait_s"] == 0


def test_the_time_of_a_step_is_the_sum_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,3\n")
    summary, _ = simulate(
        capsys, tmp_path / "a.mcap", trace=tmp_path / "t.csv", step_us=1000.0, token_us=10.0, context_us=1.0
    )
    tokens, context = 10 + 1 + 1, 10 + 11 + 12
    assert summary["duration_s"] == pytest.approx((3 * 1000 + tokens * 10 + context) / 1e6)


def test_the_command(kvscope: Any, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(MOONCAKE)
    done = kvscope("simulate", str(tmp_path / "t.jsonl"), "--record", str(tmp_path / "a.mcap"))
    assert (done.code, done.errors) == (0, "")
    assert "2 finished, 0 refused" in done.output
    assert "  simulated" in kvscope("export", str(tmp_path / "a.mcap"), "--at", "end").output
    assert "48.1% of 2,130 tokens hit" in done.output
    assert kvscope("check", str(tmp_path / "a.mcap"), "complete").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "simulate needs a trace"),
        (("t.csv", "--synthetic", ""), "a trace file or --synthetic, not both"),
        (("/nowhere/t.csv",), "/nowhere/t.csv: No such file"),
        (("--synthetic", "x=1"), "--synthetic: x=1 is not"),
        (("--synthetic", "requests=1,rate=2"), "--synthetic: requests is a whole number, not '1,rate=2'"),
        (("--synthetic", "requests=1", "--max-requests", "2"), "say --synthetic 'requests=N'"),
        (("--synthetic", "requests=1", "--record-max-size", "1M"), "add --record FILE"),
        (("--synthetic", "requests=1", "--num-blocks", "0"), "--num-blocks (--num-gpu-blocks-override) is from 1 to"),
        (("--synthetic", "requests=1", "--speed", "0"), "--speed is from 0.000001 to 1,000,000, not 0"),
        (("--synthetic", "requests=1", "--sliding-window", "0"), "--sliding-window is from 1 to"),
        (("--synthetic", "requests=1", "--preemption", "swap"), "--preemption swap needs room on the host"),
        (("--synthetic", "requests=1", "--swap-space", "1e-9"), "holds no block of 2097152 bytes"),
    ],
)
def test_wrong_arguments_are_one_line(kvscope: Any, arguments: tuple[str, ...], message: str) -> None:
    done = kvscope("simulate", *arguments)
    assert (done.code, done.errors.count("\n"), done.output) == (2, 1, "")
    assert done.errors.startswith("kvscope: ")
    assert message in done.errors
