"""A table whose beginning fell out of the sliding window: the rest keeps its logical numbers on the screen."""

import msgspec
import numpy as np
from dashboard_story import candidates_batches
from test_drawing import drawn, frame_of, lines

from kvscope.dashboard.cards import build_captions
from kvscope.dashboard.glyphs import UNICODE
from kvscope.dashboard.pool_frame import build_host_pool
from kvscope.dashboard.selection import light_of, shown_sequence, touched_blocks
from kvscope.dashboard.table import TableDrawing, draw_table
from kvscope.dashboard.table_pane import TablePane
from kvscope.dashboard.ticker import draw_entry
from kvscope.events.types import Batch, BlocksOutOfWindow, EngineStarted

GONE = " L0 → out of the window of 4: given back"


def windowed_batches() -> list[Batch]:
    """The two candidates of `candidates_batches`, 7 positions each; then L0, which they share, is given up by both."""
    first, *rest = candidates_batches()
    [started] = first.events
    assert isinstance(started, EngineStarted)
    told = msgspec.structs.replace(started, info=msgspec.structs.replace(started.info, sliding_window=4))
    gone = [
        BlocksOutOfWindow(sequence_id=f"r1.{i}", first_logical_block=0, block_ids=[0], freed_block_ids=[0] * i)
        for i in range(2)
    ]
    return [
        msgspec.structs.replace(first, events=(told,)),
        *rest[:-1],
        msgspec.structs.replace(rest[-1], events=(*rest[-1].events, *gone)),
    ]


def test_one_line_stands_for_all_that_is_gone():
    frame = frame_of(windowed_batches())
    table = lines(draw_table(frame, *shown_sequence(frame, "r1.0"), UNICODE, 90))
    assert table[0] == GONE
    assert table[1].startswith(" L1 → P2 ■■■□ refs 1")
    assert len(table) == 2
    assert drawn(windowed_batches(), 60)[:1] == [" L0 → out of the window p0│ p1│ p2│ p3"]


def test_numbers_elsewhere_are_the_same():
    frame = frame_of(windowed_batches())
    assert frame.pool.num_held == 2
    assert frame.holders(2) == [("r1.0", 1)]
    assert light_of(frame, "r1.1", None).logical == {1: 1}
    assert touched_blocks(frame) >= {1, 2}
    assert build_captions(frame)[2].holders == (("r1.0", 1),)
    text = "\n".join(draw_entry(entry, UNICODE).text for entry in frame.log)
    assert "- r1.1 lets go of P0: L0 out of the sliding window, 1 back to the pool" in text
    assert "r1.1 wrote position 6 (P1 slot 2)" in text


def test_slots_on_the_host_are_counted_from_the_first_block_that_is_left():
    frame = frame_of(windowed_batches())
    request, sequence = shown_sequence(frame, "r1.0")
    moved = request._replace(sequences=(sequence._replace(table=(), host_table=(3, 1), num_released=1, num_written=9),))
    host = build_host_pool(4, np.array([0, 1, 0, 1], np.int32), [moved])
    assert host.written.tolist() == [0, 1, 0, 4]


def test_the_cursor_stays_where_there_are_slots():
    pane = TablePane(UNICODE, id="table")
    frame = frame_of(windowed_batches())
    pane._frame, pane._shown = frame, shown_sequence(frame, "r1.0")
    assert pane._slots == range(4, 8)
    assert [pane._within(token) for token in (0, 5, 9)] == [4, 5, 7]


def test_a_token_is_found_under_its_row():
    frame = frame_of(windowed_batches())
    shown = shown_sequence(frame, "r1.0")
    drawing = TableDrawing(frame, shown, UNICODE, 90, token=6)
    text = lines([drawing[y] for y in range(len(drawing))])
    assert (text[0], drawing.row, drawing.logical_at(0), drawing.logical_at(1)) == (GONE, 1, None, 1)
    assert "position 6" in text[2]
    assert "P2 slot 2" in " ".join(text[2:])
