"""From a token to its bytes: the table's cursor, against the caches of a real engine."""

import msgspec
import pytest
from dashboard_story import candidates_batches
from hypothesis import given
from hypothesis import strategies as st
from test_app import live, running, screen_text, until
from test_drawing import frame_of

from kvscope.dashboard.glyphs import ASCII, UNICODE
from kvscope.dashboard.selection import find_selected
from kvscope.dashboard.table import TableDrawing
from kvscope.dashboard.table_pane import TablePane
from kvscope.dashboard.translation import slot_bytes
from kvscope.engine.build import prepare
from kvscope.engine.config import EMBEDDED_MODEL, EngineConfig
from kvscope.engine.model_runner import ModelRunner


@pytest.fixture(scope="module")
def prepared():
    made = prepare(EngineConfig(model=EMBEDDED_MODEL, device="cpu", block_size=4, num_gpu_blocks_override=8))
    loaded = made.model
    return made.info, ModelRunner(loaded.model, loaded.layers, made.backend, num_blocks=8, block_size=4).caches


@given(block_id=st.integers(0, 7), slot=st.integers(0, 3), data=st.data())
def test_the_bytes_are_where_the_engine_has_them(prepared, block_id, slot, data):
    info, caches = prepared
    place = slot_bytes(info, block_id, slot)
    assert place is not None
    assert len(caches) == info.num_layers
    head = data.draw(st.integers(0, info.num_kv_heads - 1))
    for cache in (tensor for layer in caches.values() for tensor in layer):
        found = cache[block_id, head, slot].data_ptr() - cache.data_ptr()
        assert found == place.first + head * place.stride
        assert cache[block_id, head, slot].nbytes == place.size


def test_no_bytes_are_claimed_where_layers_differ():
    info = frame_of(candidates_batches()).info
    assert slot_bytes(info, 1, 2) == (640, 256, 64)
    assert slot_bytes(msgspec.structs.replace(info, bytes_per_block=info.bytes_per_block + 4), 1, 2) is None
    assert slot_bytes(msgspec.structs.replace(info, dtype="int4"), 1, 2) is None


def drawing_of(sequence_id: str, token: int | None, width: int = 100, glyphs=UNICODE) -> TableDrawing:
    frame = frame_of(candidates_batches())
    return TableDrawing(frame, find_selected(frame, sequence_id), glyphs, width, token=token)


def test_a_token_of_a_shared_block_names_every_reader():
    drawing = drawing_of("r1.0", 2)
    text = [drawing[y].text.rstrip() for y in range(len(drawing))]
    assert text[0].startswith(" L0 → P0")
    assert text[1:4] == [
        '    position 2 " p2" = block 2 // 4 = L0, slot 2 % 4 = 2 → P0 slot 2',
        "    bytes in K and in V of each of 4 layers: head 0: 128-191, head 1: 384-447",
        "    the same slot is read by r1.1",
    ]
    assert text[4].startswith(" L1 → P2")
    assert [drawing.logical_at(y) for y in range(6)] == [0, 0, 0, 0, 1, None]


def test_a_token_of_a_private_block_and_a_slot_without_one():
    assert "read by r1.0 alone" in drawing_of("r1.0", 5)[4].text
    assert "reserved: nothing is written here yet" in drawing_of("r1.0", 7)[4].text


@pytest.mark.parametrize("width", [1, 5, 20, 31, 100])
@pytest.mark.parametrize("token", [None, 0, 7])
def test_every_line_has_the_width_of_the_pane(width, token):
    drawing = drawing_of("r1.1", token, width, ASCII)
    assert {drawing[y].cell_length for y in range(len(drawing))} == {width}


async def test_the_cursor_walks_over_tokens_and_blocks_and_goes_with_escape():
    async with running(live(num_steps=3)) as (app, pilot):
        table = app.query_one(TablePane)
        await pilot.press("3", "right", "right")
        await until(pilot, lambda: "position 1 " in table.text(), "the second token")
        await pilot.press("down")
        await until(pilot, lambda: "position 5 " in table.text(), "the same slot of the next block")
        block_id = app._frame.sequence("r1.0").table[1]
        await until(pilot, lambda: f"Block P{block_id}" in screen_text(app), "its block")
        await pilot.press("h", "h")
        await until(pilot, lambda: "position 3 " in table.text(), "two tokens back")
        await pilot.press("2", "down", "down", "down")
        await until(pilot, lambda: "table of r1.1" in screen_text(app), "the other candidate")
        assert "position 3 " in table.text()
        await pilot.press("escape")
        await until(pilot, lambda: "position" not in table.text(), "no cursor")
        assert app.chosen.key == "r1.1"


async def test_the_cursor_stays_within_the_table():
    async with running(live(num_steps=3)) as (app, pilot):
        table = app.query_one(TablePane)
        await pilot.press("3", "left", "left", "up")
        await until(pilot, lambda: "position 0 " in table.text(), "the first token")
        await pilot.press(*["down"] * 9)
        num_slots = 4 * len(app._frame.sequence("r1.0").table)
        await until(pilot, lambda: f"position {num_slots - 1} " in table.text(), "the last slot")
        await pilot.click(TablePane, offset=(4, 1))
        await until(pilot, lambda: table.token is not None and table.token % 4 == 0, "a click on a row")
