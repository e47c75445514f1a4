"""Pure drawing, as text: what a monochrome screenshot would show."""

import msgspec
import numpy as np
import pytest
from dashboard_story import StoryEngine, article_batches, candidates_batches, crowded_engine, swapping_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from kvscope.dashboard.candidates import CandidatesDrawing
from kvscope.dashboard.cards import build_captions, draw_card_row, draw_holders_row
from kvscope.dashboard.cells import make_cells
from kvscope.dashboard.colouring import ColourBy
from kvscope.dashboard.copies import RequestFrame, SequenceFrame
from kvscope.dashboard.frames import Frame, FrameBuilder, build_frame
from kvscope.dashboard.glyphs import ASCII, UNICODE
from kvscope.dashboard.grid import block_glyph, draw_row
from kvscope.dashboard.grid_layout import NO_LIGHT, Light, Zoom, lay_out
from kvscope.dashboard.header import draw_banner, draw_bar, draw_gauge, draw_header, format_bytes
from kvscope.dashboard.inspector import draw_block
from kvscope.dashboard.legend import legend
from kvscope.dashboard.owners import SEVERAL
from kvscope.dashboard.pool_frame import PoolFrame, TracesFrame, build_pool
from kvscope.dashboard.requests import draw_request_row, list_rows
from kvscope.dashboard.selection import light_of, shown_sequence, touched_blocks
from kvscope.dashboard.strips import clip, clip_start, fit_whole, wrap_parts
from kvscope.dashboard.table import TableDrawing, copied_blocks, draw_table, draw_text
from kvscope.dashboard.theme import BOLD, CURSOR, FAINT, TEXT, TINTS, lit_style, owner_style
from kvscope.dashboard.ticker import draw_entry
from kvscope.events.audit import Finding
from kvscope.events.types import BlocksReleased, SamplingParams
from kvscope.transport.source import ListSource, Status


def frame_of(batches) -> Frame:
    source = ListSource(batches)
    source.start()
    assert source.view.findings == []
    return build_frame(source.view, FrameBuilder())


def five_states() -> PoolFrame:
    """Free, reserved, partly written, full, shared and full, cached, shared by many and partly written."""
    return build_pool(4, (0, 1, 1, 1, 2, 0, 12), (0, 0, 2, 4, 4, 3, 1), ())


def grid_text(pool: PoolFrame, zoom: Zoom, glyphs=UNICODE, width=80, light=NO_LIGHT, height=20) -> str:
    layout = lay_out(pool, width, height, zoom)
    rows = [draw_row(pool, layout, row, light, glyphs=glyphs, width=width) for row in range(layout.rows)]
    assert all(strip.cell_length == width for strip in rows)
    return "\n".join(strip.text.rstrip() for strip in rows)


def lines(strips) -> list[str]:
    return [strip.text.rstrip() for strip in strips]


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_slots_zoom_shows_every_slot_and_ref_count():
    shown = grid_text(five_states(), Zoom.SLOTS, width=120)
    assert " ".join(shown.split()) == "P0 ···· P1 □□□□ 1 P2 ■■□□ 1 P3 ■■■■ 1 P4 ■■■■ 2 P5 ○○○· P6 ■□□□ 12"


def test_blocks_zoom_tells_the_states_apart_by_shape():
    assert grid_text(five_states(), Zoom.BLOCKS, height=0) == "P0 ·  □  ◧  ■  ■2 ○  ◧+"


def test_blocks_zoom_names_every_block_where_there_is_room():
    assert grid_text(five_states(), Zoom.BLOCKS).split() == [
        "P0",
        "·",
        "P1",
        "□",
        "P2",
        "◧",
        "P3",
        "■",
        "P4",
        "■2",
        "P5",
        "○",
        "P6",
        "◧+",
    ]


def test_dense_zoom_is_one_character_per_block_and_shared_blocks_are_digits():
    assert grid_text(five_states(), Zoom.DENSE) == "P0 ·□◧■2○+"


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("zoom", [Zoom.BLOCKS, Zoom.DENSE])
def test_no_two_states_look_the_same(glyphs, zoom):
    cells = [
        grid_text(build_pool(4, (refs,), (written,), ()), zoom, glyphs)
        for refs, written in [(0, 0), (1, 0), (1, 2), (1, 4), (2, 4), (0, 4)]
    ]
    assert len(set(cells)) == 6


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_glyphs_are_one_cell_wide(glyphs):
    for name, value in vars(glyphs).items():
        if isinstance(value, str) and name != "newline":
            assert all(cell_len(character) == 1 for character in value), name
    assert glyphs is not ASCII or all(str(value).isascii() for value in vars(glyphs).values())


def test_groups_zoom_says_how_much_of_each_group_is_held():
    pool = build_pool(4, (1,) * 8 + (1,) * 4 + (0,) * 12, (4,) * 12 + (0,) * 12, ())
    layout = lay_out(pool, 7, 1, Zoom.GROUPS)
    assert layout.group == 8
    assert draw_row(pool, layout, 0, NO_LIGHT, glyphs=UNICODE, width=8).text.split() == ["P0", "█▄·"]


def test_a_group_that_holds_anything_never_looks_free():
    pool = build_pool(4, (1,) + (0,) * 999, (0,) * 1000, ())
    layout = lay_out(pool, 10, 1, Zoom.GROUPS)
    row = draw_row(pool, layout, 0, NO_LIGHT, glyphs=UNICODE, width=10).text
    assert row.split()[1][0] == UNICODE.levels[1]


@pytest.mark.parametrize(
    ("num_blocks", "zoom"),
    [
        (6, Zoom.CARDS),
        (24, Zoom.SLOTS),
        (300, Zoom.BLOCKS),
        (1000, Zoom.DENSE),
        (2000, Zoom.HALVES),
        (100_000, Zoom.GROUPS),
    ],
)
def test_the_zoom_follows_the_size_of_the_pool(num_blocks, zoom):
    pool = build_pool(4, (0,) * num_blocks, (0,) * num_blocks, ())
    layout = lay_out(pool, 80, 20)
    assert layout.zoom is zoom
    assert layout.height <= 20


def test_long_blocks_are_never_drawn_slot_by_slot():
    pool = build_pool(256, (1,), (200,), ())
    assert lay_out(pool, 80, 20, Zoom.CARDS).zoom is Zoom.BLOCKS


def test_every_position_of_every_zoom_finds_its_block():
    pool = build_pool(4, (0,) * 50, (0,) * 50, ())
    for zoom in Zoom:
        layout = lay_out(pool, 70, 10, zoom)
        for block_id in range(0, 50, layout.group):
            column = layout.label_width + block_id % layout.blocks_per_row // layout.group * layout.cell_width
            assert layout.block_at(column, layout.line_of(block_id)) == block_id


def test_selected_blocks_carry_their_logical_number():
    frame = frame_of(article_batches())
    light = light_of(frame, "r1", None)
    assert light.logical == {3: 0, 0: 1}
    assert "P3 ■■■■ 1 L0" in grid_text(frame.pool, Zoom.SLOTS, light=light)
    assert "P1 ■■■■ 1 L" not in grid_text(frame.pool, Zoom.SLOTS, light=light)


def test_selection_dims_the_others_and_the_cursor_stands_out():
    frame = frame_of(article_batches())
    layout = lay_out(frame.pool, 80, 0, Zoom.BLOCKS)

    def style_of(block_id: int, light: Light):
        strip = draw_row(frame.pool, layout, 0, light, glyphs=UNICODE, width=80)
        column = layout.label_width + block_id * layout.cell_width
        return strip.crop(column, column + 1)._segments[0].style

    plain, lit = NO_LIGHT, light_of(frame, "r1.0", 4)
    assert style_of(1, lit) != style_of(1, plain)  # another request's block fades
    assert style_of(3, lit).bold
    assert style_of(4, lit).bgcolor is not None  # the cursor


def test_nothing_is_dimmed_when_the_selected_request_holds_nothing():
    engine, batches = crowded_engine()
    frame = frame_of(batches + engine.run(2))
    assert frame.request("r3").status == "preempted"
    assert not light_of(frame, "r3", None).dim_others


def test_cards_show_holders_and_texts():
    frame = frame_of(candidates_batches())
    layout = lay_out(frame.pool, 90, 20)
    assert layout.zoom is Zoom.CARDS
    shown = lines(
        draw_card_row(frame.pool, layout, 0, NO_LIGHT, captions=build_captions(frame), glyphs=UNICODE, width=90)
    )
    assert "P0 ■■■■ 2 r1.0 L0 · r1.1 L0" in shown[0]
    assert "P2 ■■■□ 1 r1.0 L1" in shown[0]
    assert " p4│ p5│ a0" in shown[1]
    assert " p4│ p5│ b0" in shown[1]


def test_a_holder_that_fits_its_cell_but_for_one_column_of_air_is_whole():
    holder = SequenceFrame("r1.0", tuple(range(12)), 0, (), 0, "", 0, None)
    request = RequestFrame("r1", "", "running", None, 0, SamplingParams(), (holder,), 1)
    pool = build_pool(4, (1,) * 12, (4,) * 12, (request,))
    frame = frame_of(article_batches())._replace(pool=pool, requests=(request,))
    layout, captions = lay_out(pool, 60, 20, Zoom.BLOCKS), build_captions(frame)
    assert layout.cell_width == len("r1.0 L10") + 1
    drawn = [
        draw_holders_row(pool, layout, row, NO_LIGHT, captions=captions, glyphs=UNICODE, width=60)
        for row in range(layout.rows)
    ]
    assert "".join(lines(drawn)).count("r1.0 L") == 12
    assert "r1.0 L10 r1.0 L11" in "\n".join(lines(drawn))


def test_block_glyph_counts_a_longer_block_than_its_size_as_full():
    assert block_glyph(1, 9, 4, UNICODE) == UNICODE.full


def test_blocks_of_the_latest_step_are_known_from_the_log():
    frame = frame_of(candidates_batches())
    assert touched_blocks(frame) == {1, 2}


# --- gauge, header, banner ------------------------------------------------------------------------------------------


def test_gauge_of_the_article():
    """Figure 2: B and C hold 4 blocks of 6; 12 positions written of 16 reserved."""
    text = "\n".join(lines(draw_gauge(frame_of(article_batches()), UNICODE, 110)))
    assert "4/6 blocks" in text
    assert "waste 4 slots 25%" in text
    assert "shared 0" in text


def test_the_pool_says_when_its_blocks_are_not_paged():
    frame = frame_of(article_batches())
    assert lines(draw_gauge(frame, UNICODE, 80))[0].startswith(" POOL ■")
    info = msgspec.structs.replace(frame.info, allocator="contiguous")
    text = lines(draw_gauge(frame._replace(info=info), UNICODE, 80))
    assert text[0].startswith(" POOL contiguous ■")
    assert all(cell_len(line) <= 80 for line in text)


def test_gauge_counts_what_sharing_saves():
    text = "\n".join(lines(draw_gauge(frame_of(candidates_batches()), UNICODE, 80)))
    assert "3/6 blocks" in text
    assert "shared 1 saves 1" in text
    assert "CoW 1" in text
    assert all(cell_len(line) <= 80 for line in text.splitlines())


def test_what_was_missed_is_never_silent():
    frame = frame_of(article_batches())
    assert "gaps" not in "".join(lines(draw_gauge(frame, UNICODE, 110)))
    missed = frame._replace(num_gaps=2, num_refused_events=3)
    text = "\n".join(lines(draw_gauge(missed, UNICODE, 80)))
    assert "gaps 2" in text
    assert "unreadable events 3" in text


def test_bar_tells_written_reserved_and_free_by_glyph():
    pool = frame_of(article_batches()).pool
    assert "".join(text for text, _ in draw_bar(pool, UNICODE, 24)) == "■" * 12 + "□" * 4 + "·" * 8


def test_bar_does_not_pass_cached_blocks_off_as_free():
    pool = build_pool(4, (1, 0, 0, 0), (2, 4, 4, 0), ())
    assert "".join(text for text, _ in draw_bar(pool, UNICODE, 16)) == "■■□□" + UNICODE.cached * 8 + "·" * 4
    crowded = build_pool(4, (1,) * 98 + (0,) * 2, (4,) * 97 + (2, 4, 0), ())
    assert "".join(text for text, _ in draw_bar(crowded, UNICODE, 8)) == "■" * 6 + "□" + UNICODE.cached


def test_bar_shows_a_little_of_anything_that_is_there():
    pool = build_pool(16, (1,) + (0,) * 9999, (1,) + (0,) * 9999, ())
    assert "".join(text for text, _ in draw_bar(pool, UNICODE, 20)) == "■□" + "·" * 18


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_header_fills_its_line_exactly(width):
    strip = draw_header(frame_of(article_batches()), "story", UNICODE, width, 0.0)
    assert strip.cell_length == width
    assert "● LIVE" in strip.text
    assert "step 1" in strip.text


@pytest.mark.parametrize(("cuda_graphs", "shown"), [(False, " triton  "), (True, " triton graphs  ")])
def test_header_says_how_steps_are_launched(cuda_graphs, shown):
    frame = frame_of(article_batches())
    info = msgspec.structs.replace(frame.info, attention_backend="triton", cuda_graphs=cuda_graphs)
    assert shown in draw_header(frame._replace(info=info), "story", UNICODE, 160, 0.0).text


@pytest.mark.parametrize("recording", ["", "run.mcap"])
def test_of_the_header_facts_are_left_out_whole(recording):
    frame = frame_of(article_batches())._replace(step=123_456, tokens_per_s=27.0, seq=6_543_210)
    facts = ["step 123456", "27 tok/s", "seq 6543210"]
    for width in range(60, 131):
        text = draw_header(frame, "story", UNICODE, width, 0.0, recording=recording).text
        shown = [fact for fact in facts if fact in text]
        rest = text.rpartition(f" {shown[-1]}" if shown else "REC ")[2]
        assert rest.split() in (["?", "help"], ["?", "help", ":", "palette"]), text
        assert rest.startswith(" ")
        assert shown == facts[: len(shown)]
    assert shown == facts


@given(
    st.lists(st.lists(st.sampled_from(["a ", "bb  ", "生 ", "c"]), min_size=1, max_size=3), max_size=6),
    st.integers(0, 30),
)
def test_what_does_not_fit_whole_is_left_out(items, room):
    fitted = fit_whole([[(text, TEXT) for text in item] for item in items], room)
    ways = ["".join(text for item in items[:count] for text in item) for count in range(len(items) + 1)]
    assert "".join(text for text, _ in fitted) == [way for way in ways if cell_len(way.rstrip()) <= room][-1]


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("by", ColourBy)
@pytest.mark.parametrize("zoom", Zoom)
def test_the_legend_leaves_out_what_does_not_fit(zoom, by, glyphs):
    pool = five_states()._replace(traces=TracesFrame(np.zeros(7, np.int64), np.zeros(7, np.int64), 9, 5))
    if zoom is Zoom.HALVES and glyphs is ASCII:
        return  # there it is no zoom

    def words(width):
        layout = lay_out(pool, 80, 9, zoom)
        return "".join(text for text, _ in legend(pool, layout, by, glyphs, key="c", width=width)).rstrip()

    every = words(300)
    assert "free" in every or "most" in every
    for width in range(len(every)):
        shown = words(width)
        assert len(shown) <= width
        assert every.startswith(shown)
        assert not shown or every[len(shown)] == " "
        assert not shown or any(map(str.isalnum, shown.split(" ")[-1])), f"{shown!r}: a sign without its word"


def test_stale_says_for_how_long_and_why():
    frame = frame_of(article_batches())._replace(status=Status.STALE, status_detail="no heartbeat since 12:04:31")
    assert "▲ STALE 12 s" in draw_header(frame, "story", UNICODE, 120, 12.3).text
    assert "no heartbeat since 12:04:31" in lines(draw_banner(frame, UNICODE, 120, 12.3))[0]


@pytest.mark.parametrize("status", [Status.CONNECTING, Status.SYNCING, Status.GAP, Status.STALE, Status.ENDED])
def test_every_state_that_is_not_live_has_a_banner(status):
    frame = frame_of(article_batches())._replace(status=status)
    assert status.value in lines(draw_banner(frame, UNICODE, 120, 1.0))[0]


def test_a_live_picture_has_no_banner():
    assert draw_banner(frame_of(article_batches()), UNICODE, 120, 1.0) == []


def test_a_broken_invariant_is_the_first_thing_one_reads():
    findings = (Finding(3, "r1.0 wrote into shared P1 (ref count 2)", 7), Finding(1, "another", 8))
    frame = frame_of(article_batches())._replace(findings=findings)
    text = lines(draw_banner(frame, UNICODE, 120, 1.0))[0]
    assert "invariant 3 broken at step 7: r1.0 wrote into shared P1" in text
    assert "(+1 more)" in text


def test_a_long_path_in_a_banner_goes_on_in_the_next_line():
    warning = f"recording to /data/{'runs/' * 14}run.mcap has stopped: no space left on device"
    frame = frame_of(article_batches())._replace(engine_warning=warning)
    shown = lines(draw_banner(frame, UNICODE, 80, 1.0))
    assert len(shown) == 3
    assert "".join(line.strip() for line in shown).replace(" ", "").endswith(warning.replace(" ", ""))
    strips = draw_banner(frame._replace(engine_warning=warning * 3), UNICODE, 80, 1.0)
    assert [strip.cell_length for strip in strips] == [80] * 3
    assert strips[-1].text.rstrip().endswith(UNICODE.ellipsis)


def test_bytes_are_short():
    assert [format_bytes(n) for n in (512, 1536, 20 << 20)] == ["512 B", "1.5 KiB", "20 MiB"]


def request_lines(frame: Frame, selected: str | None = None, width: int = 80) -> list[str]:
    strips = [draw_request_row(frame, row, selected, UNICODE, width) for row in list_rows(frame)]
    assert all(strip.cell_length == width for strip in strips)
    return lines(strips)


# --- requests, table, block, events -----------------------------------------------------------------------------------


def test_requests_say_why_they_wait():
    engine, batches = crowded_engine()
    batches += engine.run(6)
    frame = frame_of(batches)
    text = "\n".join(request_lines(frame, "r1"))
    assert "›r1 ▶ running" in text
    assert "r3 ▼ preempted 1×; needs 5 blocks, 1 free" in text
    assert [row.key for row in list_rows(frame)][:3] == ["r1", "r1.0", "r1.1"]


def test_finished_requests_come_last():
    engine, batches = crowded_engine()
    batches += engine.cancel("r1") + engine.step()
    frame = frame_of(batches)
    assert [row.key for row in list_rows(frame) if row.sequence is None][-1] == "r1"
    assert "✓ cancelled" in "\n".join(request_lines(frame))


def test_lines_of_a_table_with_the_same_facts_look_the_same():
    engine, batches = swapping_engine()
    source, drawn = ListSource(), {}
    for batch in [*article_batches(), *candidates_batches(), *batches, *engine.run(12)]:
        source.feed([batch])
        frame = build_frame(source.view, FrameBuilder())
        for request in frame.requests:
            for sequence in request.sequences:
                drawing = TableDrawing(frame, (request, sequence), UNICODE, 90, token=None)
                for y in range(len(drawing)):
                    if (facts := drawing.facts(y)) is not None:
                        assert drawn.setdefault(repr(facts), drawing[y]) == drawing[y]
    assert drawn


def test_table_of_the_candidate_that_copied():
    frame = frame_of(candidates_batches())
    text = lines(draw_table(frame, *shown_sequence(frame, "r1.0"), UNICODE, 90))
    assert text[0].startswith(" L0 → P0 ■■■■ refs 2  = r1.1")
    assert text[0].endswith("p0│ p1│ p2│ p3")
    assert text[1].startswith(" L1 → P2 ■■■□ refs 1  ◆ copied from P1")
    assert text[1].endswith(" p4│ p5│ a0")


def test_table_of_the_candidate_that_wrote_in_place():
    frame = frame_of(candidates_batches())
    text = lines(draw_table(frame, *shown_sequence(frame, "r1.1"), UNICODE, 90))
    assert "copied" not in text[1]
    assert text[1].startswith(" L1 → P1 ■■■□ refs 1")


def test_table_shows_reserved_slots_hollow_and_without_text():
    engine, batches = crowded_engine()
    plan = engine.step()[:1]
    frame = frame_of(batches + plan)
    text = lines(draw_table(frame, *shown_sequence(frame, "r2.0"), UNICODE, 90))
    assert text[0] == " L0 → P2 □□□□ refs 1"


def test_table_of_a_preempted_sequence_says_so():
    engine, batches = crowded_engine()
    frame = frame_of(batches + engine.run(2))
    assert "preempted: no blocks" in lines(draw_table(frame, *shown_sequence(frame, "r3.0"), UNICODE, 90))[0]


def test_a_copy_is_forgotten_once_the_table_was_given_back():
    frame = frame_of(candidates_batches())
    assert copied_blocks(frame, "r1.0") == {1: (1, 2)}
    released = BlocksReleased(sequence_id="r1.0", block_ids=[0, 2], freed_block_ids=[2])
    later = frame.log[-1]._replace(event=released)
    assert copied_blocks(frame._replace(log=(*frame.log, later)), "r1.0") == {}


def test_block_in_words():
    frame = frame_of(candidates_batches())
    text = "\n".join(lines(draw_block(frame, 0, UNICODE, 90)))
    assert "P0  ref count 2  held by r1.0 (L0), r1.1 (L0)  4 of 4 slots written" in text
    assert '■0 "p0" ■1 " p1"' in text
    assert "□3" in "\n".join(lines(draw_block(frame, 2, UNICODE, 90)))
    assert lines(draw_block(frame, 5, UNICODE, 90)) == [" P5 free"]


def test_events_mark_copies_and_preemptions_with_a_glyph():
    frame = frame_of(candidates_batches())
    text = "\n".join(draw_entry(entry, UNICODE).text for entry in frame.log)
    assert "◆ r1.0 needs L1 private: copy-on-write P1 -> P2 (2 slots); P1 left to r1.1" in text
    engine, batches = crowded_engine()
    frame = frame_of(batches + engine.run(2))
    assert "▼ r3 preempted" in "\n".join(draw_entry(entry, UNICODE).text for entry in frame.log)


def test_text_goes_on_where_the_prompt_ends():
    frame = frame_of(candidates_batches())
    assert lines(draw_text(*shown_sequence(frame, "r1.0"), UNICODE, 30)) == [" p0 p1 p2 p3 p4 p5 a0 a1"]
    assert lines(draw_text(*shown_sequence(frame, "r1.0"), UNICODE, 12)) == [" p0 p1 p2", " p3 p4 p5", " a0 a1"]


# --- candidates side by side ------------------------------------------------------------------------------------------


def drawn(batches, width, request_id="r1"):
    frame = frame_of(batches)
    return lines(CandidatesDrawing(frame, frame.request(request_id), UNICODE, width).strips)


def test_candidates_part_where_their_texts_do():
    """Step 1: one block for both, two tokens without KV; step 2: one has copied it, the other has kept it."""
    common = [" L0 → P0 ■■■■ refs 2 p0│ p1│ p2│ p3", " › they part at position 6: L1, slot 2"]
    assert drawn(candidates_batches(1), 60) == [
        *common,
        " r1.0 1 tok                   │ r1.1 1 tok",
        " L1 P1 ■■□□ refs 2            │ L1 P1 ■■□□ refs 2 = r1.0",
        "  p4 p5› a0                   │  p4 p5› b0",
    ]
    assert drawn(candidates_batches(2), 60) == [
        *common,
        " r1.0 2 tok                   │ r1.1 2 tok",
        " L1 P2 ■■■□ ◆ from P1         │ L1 P1 ■■■□",
        "  p4 p5› a0 a1                │  p4 p5› b0 b1",
    ]


def test_text_is_dimmed_where_the_memory_is_shared_and_only_there():
    for num_steps, shared in ((1, True), (2, False)):
        frame = frame_of(candidates_batches(num_steps))
        strips = CandidatesDrawing(frame, frame.request("r1"), UNICODE, 60).strips
        styles = {segment.text: segment.style for segment in strips[-1]}
        assert styles[" p4"] == (FAINT if shared else TEXT)
        assert {segment.text: segment.style for segment in strips[0]}["p0"] == FAINT


def test_of_a_long_common_beginning_the_end_is_shown():
    engine = StoryEngine(40, 4)
    batches = engine.start() + engine.submit("one word after another " * 10, n=2, max_tokens=6) + engine.run(3)
    first, second, *_ = drawn(batches, 60)
    frame = frame_of(batches)
    common = sum(count == 2 for count in frame.pool.refs)
    assert first == f" L0-L{common - 2}  {common - 1} blocks that all 2 share"
    assert second.startswith(f" L{common - 1} → P")


def test_candidates_that_do_not_fit_are_counted_and_swapped_out_ones_name_the_host():
    engine, batches = swapping_engine()
    batches += engine.run(8)
    text = "\n".join(drawn(batches, 70, "r2"))
    for words in (
        "L0 → H0 ■■■■ refs 2",
        "L2 H2 ■■■■",
        "L2 H3 ■■■■",
        "no block yet",
        "they part at position 8: L2, slot 0",
    ):
        assert words in text, words
    engine = StoryEngine(40, 4)
    batches = engine.start() + engine.submit("a b c", n=7, max_tokens=6) + engine.run(4)
    assert "4 more than fit here" in drawn(batches, 60)[0] + drawn(batches, 60)[1]


# --- text helpers -----------------------------------------------------------------------------------------------------


def test_wide_characters_keep_their_columns():
    assert cell_len(clip("漢字漢字", 5, UNICODE)) <= 5
    assert cell_len(clip_start("漢字漢字", 5, UNICODE)) <= 5
    for width in range(1, 12):
        wrapped = wrap_parts([("king 漢字漢字 🌙🌙 word\nnew", TEXT)], max(width, 2))
        assert all(strip.cell_length == max(width, 2) for strip in wrapped)


def test_wrapping_loses_no_character():
    text = "a long sentence with averyveryverylongword in it, and an end"
    shown = "".join(strip.text.strip() for strip in wrap_parts([(text, TEXT)], 9))
    assert shown.replace(" ", "") == text.replace(" ", "")


# --- cells ------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_cells_by_numpy_are_those_found_block_by_block(data):
    """At random pools, sizes, selections and cursors: the character and the style of every cell."""
    size = data.draw(st.integers(1, 120), "blocks")
    column = st.lists(st.integers(0, 12), min_size=size, max_size=size)
    refs, written = data.draw(column, "refs"), data.draw(column, "written")
    owners = [data.draw(st.integers(0, SEVERAL)) if count else 0 for count in refs]
    pool = build_pool(4, refs, written, ())._replace(owners=np.array(owners, np.uint8))
    some = st.sets(st.integers(0, size - 1), max_size=9)
    logical = {block_id: logical for logical, block_id in enumerate(data.draw(some, "lit"))}
    cursor = data.draw(st.none() | st.integers(0, size - 1), "cursor")
    light = Light(logical, data.draw(st.booleans(), "dim"), cursor, frozenset(data.draw(some, "fresh")))
    zoom = data.draw(st.sampled_from([Zoom.DENSE, Zoom.GROUPS]), "zoom")
    layout = lay_out(pool, data.draw(st.integers(8, 40), "width"), 3, zoom)
    cells = make_cells(pool, layout, range(layout.rows), light, UNICODE)
    shown = [(char, style) for row in cells.rows for text, style in cells.parts(row) for char in text]
    groups = [range(start, min(start + layout.group, size)) for start in range(0, size, layout.group)]
    assert shown == [plain_cell(pool, group, light, zoom) for group in groups]


def plain_cell(pool: PoolFrame, block_ids: range, light: Light, zoom: Zoom) -> tuple[str, Style]:
    first, refs = block_ids[0], [int(pool.refs[block_id]) for block_id in block_ids]
    num_held = len(refs) - refs.count(0)
    char, style = UNICODE.levels[-(-num_held * (len(UNICODE.levels) - 1) // len(refs))], FAINT
    if not num_held and any(pool.written[block_id] for block_id in block_ids):
        char = UNICODE.cached
    if zoom is Zoom.DENSE:
        state = block_glyph(refs[0], pool.written[first], pool.block_size, UNICODE)
        char = state if refs[0] < 2 else str(refs[0]) if refs[0] < 10 else UNICODE.many
    if light.cursor in block_ids:
        return char, CURSOR
    if lit := [block_id for block_id in block_ids if block_id in light.logical]:
        return char, lit_style(pool.owners[lit[0]])
    if light.dim_others or (zoom is Zoom.GROUPS and not num_held):
        return char, style
    if zoom is Zoom.GROUPS:
        num_shared = sum(count > 1 for count in refs)
        return char, TINTS[sum(3 * num_shared > third * num_held for third in range(3))]
    style = owner_style(pool.owners[first])
    return char, style + BOLD if first in light.fresh else style


def test_a_number_of_three_digits_pushes_no_slots_out_of_their_column():
    ones = np.ones(40, np.int32)
    pool = build_pool(4, ones, 4 * ones, ())._replace(traces=TracesFrame(ones, ones, 1000, 0))
    layout = lay_out(pool, 80, 40, Zoom.SLOTS)
    light = NO_LIGHT._replace(by=ColourBy.AGE, logical={block_id: block_id for block_id in range(40)})
    text = draw_row(pool, layout, 3, light, glyphs=UNICODE, width=80).text
    blocks = range(3 * layout.columns, 4 * layout.columns)
    starts = [place * layout.cell_width for place in range(layout.columns)]
    assert [text.index(f"P{block_id}") for block_id in blocks] == starts


@pytest.mark.parametrize("hits", [7, 10, 100])
def test_a_logical_number_is_whole_or_left_out(hits):
    """Also in the last column, whose last cell of air is beyond the edge."""
    ones = np.ones(700, np.int32)
    pool = build_pool(2, ones, 2 * ones, ())._replace(traces=TracesFrame(ones, hits * ones, 1000, 0))
    layout = lay_out(pool, 68, 14, Zoom.SLOTS)
    light = NO_LIGHT._replace(by=ColourBy.REUSE, logical=dict.fromkeys(range(700), 23))
    width = layout.columns * layout.cell_width - 1
    for row in range(layout.rows):
        cells = draw_row(pool, layout, row, light, glyphs=UNICODE, width=width).text.split("P")[1:]
        assert {tuple(cell.split()[2:]) for cell in cells} <= {(str(hits), "L23"), (str(hits),)}
