"""The insight screen: every number on it against the state it was drawn from."""

import re
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from dashboard_story import StoryEngine, StorySource, crowded_engine
from hypothesis import given
from hypothesis import strategies as st

from kvscope.analysis.ledger import Bookkeeper, Ledger, Maximum, Saved
from kvscope.dashboard import frames as frames_module
from kvscope.dashboard.accounts import TABLE_WIDTH, draw_comparison, draw_ledger
from kvscope.dashboard.charts import AXIS_WIDTH, draw_bars, draw_stack, share_out
from kvscope.dashboard.frames import FrameBuilder, build_frame
from kvscope.dashboard.glyphs import ASCII, UNICODE
from kvscope.dashboard.header import format_bytes
from kvscope.dashboard.insight import chart_scale, draw_history, draw_insight
from kvscope.dashboard.insight_pane import InsightPane
from kvscope.dashboard.series import Sample, Series, fold_samples, take_sample
from kvscope.dashboard.theme import GOOD
from kvscope.events import types as ev
from kvscope.events.audit import Finding
from kvscope.transport.source import ListSource

from .test_app import running, screen_text, until


def text_of(strips) -> str:
    return "\n".join(strip.text.rstrip() for strip in strips)


def watched(steps: int = 40):
    """Frames of a crowded pool, one after each batch."""
    engine, batches = crowded_engine()
    source, builder = ListSource([]), FrameBuilder()
    builder.wants_ledger = True
    for batch in batches + engine.run(steps):
        source.feed([batch])
        yield source, build_frame(source.view, builder)


def test_a_sample_holds_every_slot_of_the_pool_once():
    for source, frame in watched():
        state, sample = source.view.state, take_sample(frame)
        size = state.info.block_size
        counted = dict.fromkeys(("shared", "written", "unwritten", "cached", "free"), 0)
        for refs, written in zip(state.ref_counts, state.written_slots, strict=True):
            for slot in range(size):
                held = ("shared" if refs > 1 else "written") if slot < written else "unwritten"
                counted[held if refs else "cached" if written else "free"] += 1
        assert sample.layers == tuple(counted.values())


def test_going_back_ends_earlier_and_loses_nothing():
    series, frames = Series(), [frame for _, frame in watched(10)]
    for frame in frames:
        series.observe(frame)
    everything = series.until(frames[-1].time_ns)
    series.observe(frames[6])
    assert [sample.time_ns for sample in series.until(frames[6].time_ns)] == sorted(
        {frame.time_ns for frame in frames[:7]}
    )
    assert series.until(frames[-1].time_ns) == everything
    series.observe(frames[-1]._replace(info=None))
    assert not series.until(frames[-1].time_ns)


def sample_at(seconds: float, step: int, tokens: int = 0, free: int = 1) -> Sample:
    return Sample(int(seconds * 1e9), step, 0, 0, 0, 0, free, tokens, 5)


def test_columns_show_the_end_of_their_time_and_leave_open_what_nobody_saw():
    samples = [sample_at(0, 0), sample_at(1, 1, 10), sample_at(2, 2, 30), sample_at(8, 99, 900)]
    columns = fold_samples(samples, 8)
    assert [c.step_ns for c in columns] == [5, 5, None, None, None, None, None, 5]
    assert [c.sample and c.sample.step for c in columns] == [1, 2, None, None, None, None, None, 99]
    assert columns[0].tokens_per_s == pytest.approx(10)
    assert columns[1].tokens_per_s == pytest.approx(20)
    assert columns[7].tokens_per_s is None  # from a moment that nobody saw
    slow = [sample_at(0, 0), sample_at(0.5, 1), sample_at(8, 2)]  # one step took long: nothing was missed
    assert [c.sample.step for c in fold_samples(slow, 4)] == [1, 1, 1, 2]
    idle = [sample_at(0, 0), sample_at(1, 1, 10), sample_at(8, 1, 10)]
    assert [(c.tokens_per_s, c.step_ns) for c in fold_samples(idle, 8)] == [(10, 5)] + [(0, None)] * 7
    assert fold_samples(samples[:1], 3) == [(None, None, None)] * 3


def test_a_rate_is_not_that_of_the_moment_in_which_tokens_come():
    """Ten steps a second with three tokens each are 30 tokens/s, whichever looks a column has in it."""
    samples = []
    for step in range(40):
        samples += [sample_at(step / 10, step, 3 * step), sample_at(step / 10 + 0.095, step, 3 * step + 3)]
    for width in (10, 79, 160):
        rates = [column.tokens_per_s for column in fold_samples(samples, width)[width // 4 :]]
        assert all(22 < rate < 38 for rate in rates), rates


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5), st.integers(1, 60))
def test_cells_are_shared_out_true_to_scale(parts, cells):
    counts = share_out(parts, cells)
    assert sum(counts) == (cells if any(parts) else 0)
    for part, count in zip(parts, counts, strict=True):
        assert abs(count * sum(parts) - part * cells) < sum(parts) or not any(parts)  # never a whole cell wrong


def test_the_chart_is_as_high_as_what_is_used():
    """Ten blocks of a large pool are to be seen, and the axis says what they are ten of."""

    def used(slots: int) -> Sample:
        return Sample(0, 0, 0, slots, 0, 0, 32_768 - slots, 0, 0)

    assert [chart_scale([used(1), used(most)]) for most in (1, 64, 65, 160, 16_384, 16_385, 32_768)] == [
        64, 64, 128, 256, 16_384, 32_768, 32_768,
    ]  # fmt: skip
    samples = [used(160)._replace(time_ns=time_ns) for time_ns in (0, 10**9)]
    lines = [strip.text for strip in draw_history(samples, UNICODE, 140, 8)]
    assert "in slots, the lowest 256 of 32,768" in lines[0]
    assert lines[1].split()[0] == "256"
    assert [line[AXIS_WIDTH] for line in lines[8:0:-1]] == [UNICODE.written] * 5 + [UNICODE.free] * 3


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_the_chart_reads_back_in_monochrome(glyphs):
    columns = [(4, 4, 2, 2, 4), None, (0, 16, 0, 0, 0)]
    rows = [strip.text[AXIS_WIDTH:] for strip in draw_stack(columns, [""] * 8, glyphs, 8)]
    signs = (glyphs.shared, glyphs.written, glyphs.reserved, glyphs.cached, glyphs.free)
    heights = [[sum(row[x] == sign for row in rows) for sign in signs] for x in range(3)]
    assert heights == [[2, 2, 1, 1, 2], [0] * 5, [0, 8, 0, 0, 0]]
    assert [row[0] for row in reversed(rows)] == sorted((row[0] for row in rows), key=signs.index)
    bars = draw_bars([0.0, None, 5.0, 10.0], 10.0, GOOD, glyphs)
    assert "".join(text for text, _ in bars) == glyphs.levels[0] + " " + glyphs.levels[4] + glyphs.levels[8]


def rows_of(text: str) -> dict[str, list[str]]:
    return {
        line[:32].strip(): re.findall(r"[\d,.]+(?: [KMG]?i?B)?", line[32:])
        for line in text.splitlines()
        if len(line) > 40
    }


def test_the_ledger_on_the_screen_is_the_ledger_of_the_state(monkeypatch):
    monkeypatch.setattr(frames_module, "CHEAP_S", 1e9)  # on a busy machine none would come with every frame
    for source, frame in watched():
        ledger = Bookkeeper().draw_up(source.view.state)
        assert frame.ledger == ledger
        if not ledger.held:
            continue
        rows, size = rows_of(text_of(draw_ledger(frame.ledger, UNICODE, TABLE_WIDTH))), ledger.block_size
        slots = {
            f"held for {ledger.num_requests} request" + ("s" if ledger.num_requests != 1 else ""): ledger.held * size,
            "written": ledger.written_slots,
            "reserved, not written": ledger.unwritten_slots,
            "in the last blocks: slack": ledger.slack_slots,
            "duplicates: the same twice": ledger.duplicates * size,
            "saved now": ledger.saved.total * size,
            "full blocks, candidates'": ledger.saved.sharing * size,
            "put off by copy-on-write": ledger.saved.copy_on_write * size,
            "the prefix cache's": ledger.saved.prefix_cache * size,
            "maxima reserved would hold": ledger.maximum.slots,
        }
        for name, count in slots.items():
            num_bytes = count * source.view.state.info.bytes_per_block / size
            requests = count * ledger.num_requests / (ledger.held * size)
            blocks = f"{count / size:,.1f}".removesuffix(".0")
            assert rows[name] == [f"{count:,}", blocks, format_bytes(round(num_bytes)), f"{requests:,.1f}"], name


def test_the_comparison_shows_where_the_pool_ends():
    ledger = Ledger(
        num_blocks=6, block_size=4, num_requests=2, held=4, written_slots=13, maximum=Maximum(48, 1), saved=Saved()
    )
    blocks, maxima, *verdict = (strip.text for strip in draw_comparison(ledger, UNICODE, 75))
    inside = blocks.count("■") + blocks.count("□") + blocks.count("·")
    assert abs(inside * 2 - maxima.count("■") - maxima.count("□")) <= 1  # the maxima are twice the pool
    assert blocks.count("■") == maxima.count("■")
    told = "with maxima reserved 1 of the 2 requests would fit; in blocks all do, and 1.0 more like them"
    assert " ".join(verdict).split() == told.split()
    assert "no request runs" in text_of(draw_comparison(Ledger(num_blocks=6), UNICODE, 75))


def test_losses_and_findings_are_told():
    engine = StoryEngine(6, 4)
    lookups = {
        "num_tokens": 300,
        "num_hit_tokens": 0,
    }
    events = [
        ev.BlocksEvicted(block_ids=[], for_sequence_id="r1.0"),
        ev.PrefixLookup(request_id="r7", miss="shorter_than_block", num_common_tokens=213, **lookups),
        ev.PrefixLookup(
            request_id="r8", miss="evicted", num_common_tokens=0, evicted_at_step=0, evicted_for="r1.0", **lookups
        ),
    ]
    source = ListSource([*engine.start(), engine.batch("plan", *events)])
    source.start()
    frame = build_frame(source.view, FrameBuilder())
    frame = frame._replace(info=msgspec.structs.replace(frame.info, prefix_caching=True))
    text = text_of(draw_insight(frame, [], UNICODE, 100, 40))
    assert "r7 213 tokens in common, 0 hit: block is 4" in text
    assert "r8 wanted it 0.0 s after step 0 evicted it for r1.0" in text
    assert "AUDIT" not in text
    wrong = frame._replace(findings=(Finding(3, "written while shared", 7),))
    for width in (78, 160):
        text = text_of(draw_insight(wrong, [], UNICODE, width, 40))
        assert "AUDIT: 1 finding" in text
        assert "step 7, invariant 3: written while shared" in text


def test_what_was_not_looked_at_is_blank_and_said_to_be():
    samples = [take_sample(frame) for _, frame in watched()]
    later = [sample._replace(time_ns=sample.time_ns + 10**11, step=sample.step + 99) for sample in samples[20:]]
    seen, with_gap = (text_of(draw_history(these, UNICODE, 120, 6)) for these in (samples, [*samples[:20], *later]))
    assert "blank" not in seen
    assert "blank: not looked at" in with_gap


@pytest.mark.parametrize("width", [57, 77, 197])
def test_the_ledger_fits_and_the_chart_takes_the_rest(width):
    frames = [frame for _, frame in watched()]
    series = Series()
    for frame in frames:
        series.observe(frame)
    samples = series.until(1 << 62)
    low, high = (draw_insight(frames[-1], samples, UNICODE, width, height) for height in (10, 60))
    assert len(high) in (58, 59, 60)
    assert text_of(low).splitlines()[-5:] == text_of(high).splitlines()[-5:]
    head, *rows = text_of(high).split("Waste ledger, ")[1].splitlines()[:11]
    assert head.split()[-3:] == ["blocks", "bytes", "requests"] or "Prefix cache" in head
    for row in rows:
        assert re.search(r"\d (B|KiB) +[\d.]+( |$)", row), row


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (160, 45)])
@pytest.mark.parametrize("ascii_only", [False, True])
async def test_the_insight_screen_opens_and_closes(size, ascii_only):
    engine, batches = crowded_engine()
    source = StorySource(engine, batches + engine.run(6))
    async with running(source, size, ascii_only=ascii_only) as (app, pilot):
        await pilot.press("7")
        pane = app.query_one(InsightPane)
        await until(pilot, lambda: "Waste ledger" in pane.text() and pane.has_focus, "the ledger")
        source.feed(engine.run(2))
        await until(pilot, lambda: "Pool over time" in screen_text(app), "the chart")
        assert not app.query_one("#grid").size.height
        assert screen_text(app).isascii() == ascii_only
        await pilot.press("escape")
        await until(pilot, lambda: app.query_one("#grid").size.height > 2 and not pane.size.height, "the pool again")
        assert app._pump._builder.wants_ledger is False


def test_samples_grow_in_time():
    series = Series()
    for _, frame in watched():
        series.observe(frame)
    samples = series.until(10**18)
    assert all(a.time_ns < b.time_ns for a, b in pairwise(samples))
    assert len(samples) > 10


def test_a_costly_ledger_is_owed_and_comes_later(monkeypatch):
    monkeypatch.setattr(frames_module, "CHEAP_S", -1.0)
    times = iter([0.0, 1.0, 5.0, 30.0, 31.0])  # drawn up in a second: the next one in twenty
    monkeypatch.setattr(frames_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    engine, batches = crowded_engine()
    builder, state = FrameBuilder(), ListSource([]).view.state
    builder.wants_ledger = True
    first = builder.account(state)
    assert (first, builder.owes_ledger) == (Ledger(), False)
    source = ListSource(batches + engine.run(2))
    source.feed(source._batches)
    assert builder.account(source.view.state) is first
    assert builder.owes_ledger
    assert builder.account(source.view.state).held
    assert not builder.owes_ledger


def test_another_life_of_the_same_engine_begins_anew():
    series, frames = Series(), [frame for _, frame in watched(10)]
    for frame in frames:
        series.observe(frame)
    series.observe(frames[0]._replace(epoch=b"another-life-of"))
    assert len(series.until(1 << 62)) == 1
