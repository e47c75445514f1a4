"""What `/` lets through, the orders of the request list, its facts, and the way from an event to its moment."""

import pytest
from dashboard_story import StorySource, candidates_batches, crowded_engine
from textual.events import Key
from textual.widgets import Input

from kvscope.dashboard.events_pane import EventsPane
from kvscope.dashboard.filter_screen import FilterScreen
from kvscope.dashboard.filters import (
    EVERYTHING,
    SORTS,
    FilterError,
    Query,
    blocks_of,
    filter_log,
    kind_of,
    parse_query,
    passes_request,
    request_of,
)
from kvscope.dashboard.frames import FrameBuilder, build_frame
from kvscope.dashboard.glyphs import UNICODE
from kvscope.dashboard.requests import draw_request_row, last_preemptions, list_rows
from kvscope.dashboard.requests_pane import RequestsPane
from kvscope.events.fold import apply_event, begin_batch
from kvscope.events.state import EngineState
from kvscope.transport.recording import Recording, ReplaySource
from kvscope.transport.source import ListSource

from .test_app import live, running, screen_text, until


def crowded_view(steps: int = 30):
    engine, batches = crowded_engine()
    source = ListSource(batches + engine.run(steps))
    source.start()
    return source


def test_a_query_has_words_and_fields():
    assert parse_query("") == EVERYTHING
    assert parse_query("Needs kind:waiting block:P3 block:4 request:R1 state:run") == Query(
        ("needs",), ("waiting",), (3, 4), ("r1",), ("run",)
    )
    assert parse_query("kind:") == EVERYTHING  # while it is being typed
    assert parse_query("12:30").words == ("12:30",)


@pytest.mark.parametrize("text", ["knd:copy", "block:x", "block:-1", "block:9999999999", "block:²"])
def test_what_cannot_be_meant_is_refused_with_the_fields(text):
    with pytest.raises(FilterError, match="kind:copy block:3"):
        parse_query(text)


@pytest.mark.parametrize("kind", ["copy", "cow", "copied", "copy-on-write"])
def test_a_copy_is_found_by_what_people_call_it(kind):
    source = ListSource(candidates_batches(4))
    source.start()
    found = filter_log(tuple(source.view.log), parse_query(f"kind:{kind}"))
    assert [kind_of(entry.event) for entry in found] == ["block_copied"]


def test_a_kind_that_there_is_not_is_refused_with_some_that_there_are():
    with pytest.raises(FilterError, match="no event is called quux; some are: copy"):
        parse_query("kind:quux")


def test_events_by_kind_request_and_text_are_those_that_a_plain_look_finds():
    log = tuple(crowded_view().view.log)
    assert filter_log(log, EVERYTHING) is log
    for text, holds in {
        "kind:written": lambda e: kind_of(e.event) == "slots_written",
        "request:r2": lambda e: request_of(e.event) == "r2",
        "r1.0 wrote": lambda e: "r1.0" in e.sentence and "wrote" in e.sentence,
        "kind:preempt request:r1": lambda e: kind_of(e.event) == "request_preempted" and e.event.request_id == "r1",
    }.items():
        found = filter_log(log, parse_query(text))
        assert list(found) == [entry for entry in log if holds(entry)]
        assert 0 < len(found) < len(log), text


def test_the_blocks_of_an_event_are_those_whose_state_it_changes():
    engine, batches = crowded_engine()
    state = EngineState()
    source = ListSource()
    for seq, batch in enumerate(batches + engine.run(30)):
        source.view.apply(seq, batch)
        told = {id(entry.event): entry for entry in source.view.log}
        begin_batch(state, batch)
        for event in batch.events:
            before = list(zip(state.ref_counts, state.written_slots, strict=True))
            state = apply_event(state, event)
            after = list(zip(state.ref_counts, state.written_slots, strict=True))
            changed = {b for b, (old, new) in enumerate(zip(before, after, strict=False)) if old != new}
            if id(event) in told and before:
                assert changed <= set(blocks_of(told[id(event)])), told[id(event)].sentence


def test_requests_by_state_block_and_text():
    frame = build_frame(crowded_view(6).view, FrameBuilder())
    for text, holds in {
        "state:run": lambda r: r.status == "running",
        "third": lambda r: "third" in r.prompt,
        "request:r2": lambda r: r.request_id == "r2",
        "block:3": lambda r: any(3 in s.table for s in r.sequences),
        "kind:copy": lambda r: False,
    }.items():
        query = parse_query(text)
        assert [r.request_id for r in frame.requests if passes_request(r, query)] == [
            r.request_id for r in frame.requests if holds(r)
        ]


@pytest.mark.parametrize("order", SORTS)
def test_every_order_shows_every_request_once(order):
    frame = build_frame(crowded_view(6).view, FrameBuilder())
    requests = [row.request for row in list_rows(frame, order=order) if row.sequence is None]
    assert sorted(r.request_id for r in requests) == ["r1", "r2", "r3"]
    measures = {
        "newest": [r.submitted_ns for r in requests],
        "blocks": [len({b for s in r.sequences for b in s.table}) for r in requests],
        "tokens": [sum(s.num_generated for s in r.sequences) for r in requests],
        "first token": [r.first_token_wait_ns or 0 for r in requests],
    }
    values = measures.get(order, [])
    assert values == sorted(values, reverse=True)


def test_a_preempted_request_says_by_whom_when_and_what_it_lost():
    source = crowded_view(0)
    engine, batches = crowded_engine()
    source = ListSource(batches)
    source.start()
    seen = 0
    for _ in range(40):
        source.feed(engine.step())
        frame = build_frame(source.view, FrameBuilder())
        known = last_preemptions(frame)
        for request in frame.requests:
            if request.status != "preempted":
                assert request.request_id not in known
                continue
            preemptions = [entry for entry in frame.log if kind_of(entry.event) == "request_preempted"]
            last = [e for e in preemptions if e.event.request_id == request.request_id][-1]
            row = next(r for r in list_rows(frame) if r.key == request.request_id)
            text = draw_request_row(frame, row, None, UNICODE, 200, preempted=known).text
            culprit, lost = last.event.for_request_id, last.event.tokens_lost
            by = "its own growth" if culprit == request.request_id else culprit
            assert f"by {by} at step {last.step}, lost {lost} tokens" in text
            seen += 1
    assert seen


def test_a_running_request_tells_progress_speed_and_first_token():
    source = ListSource(candidates_batches(4))
    source.start()
    frame = build_frame(source.view, FrameBuilder())
    (request,) = source.view.state.requests.values()
    text = draw_request_row(frame, list_rows(frame)[0], None, UNICODE, 200).text
    generated = sum(len(s.token_ids) for s in request.sequences)
    rate = (generated - 2) * 1e9 / (source.view.state.time_ns - request.first_token_ns)
    wait_ms = (request.first_token_ns - request.submitted_ns) / 1e6
    assert f"5 blk 1 shared 1 CoW  {generated}/16 tok  {rate:.1f}/s  first {wait_ms:.0f} ms" in text


# --- on the screen --------------------------------------------------------------------------------------------------


async def type_filter(app, pilot, *keys: str) -> None:
    """Open the filter's line, and type once it is there."""
    await pilot.press("slash")
    await until(pilot, lambda: isinstance(app.screen, FilterScreen) and isinstance(app.focused, Input), "the line")
    await pilot.press(*keys)


@pytest.mark.parametrize("size", [(60, 20), (120, 36)])
async def test_slash_filters_while_it_is_typed_and_esc_clears(size):
    engine, batches = crowded_engine()
    async with running(StorySource(engine, batches + engine.run(6)), size) as (app, pilot):
        await type_filter(app, pilot, *"third")
        pane = app.query_one(RequestsPane)
        await until(pilot, lambda: "r3" in pane.text() and "r2" not in pane.text(), "only the third")
        await until(pilot, lambda: "/third: 1" in screen_text(app), "the filter in the title")
        await pilot.press("space", *"block:x", "enter")
        assert "r3" in pane.text()  # what cannot be meant changes nothing
        await type_filter(app, pilot, "escape")
        await until(pilot, lambda: "r2" in pane.text() and "/third" not in screen_text(app), "all of them")


async def test_events_are_filtered_where_they_have_the_focus():
    engine, batches = crowded_engine()
    async with running(StorySource(engine, batches + engine.run(6))) as (app, pilot):
        await pilot.press("5")
        await until(pilot, lambda: app.query_one(EventsPane).has_focus, "the events")
        await type_filter(app, pilot, *"kind:preempt", "enter")
        pane = app.query_one(EventsPane)
        await until(pilot, lambda: " preempted" in pane.text() and "wrote" not in pane.text(), "only preemptions")


async def test_keys_that_come_in_one_go_all_go_into_the_filter():
    """As from a slow line: the second key opens the filter, and every later one is for it."""
    async with running(crowded_view(), (120, 36)) as (app, pilot):
        for word in ("copy", "wrote"):
            for key in ("5", "slash", "ctrl+u", *word, "enter"):
                app.post_message(Key(key, key if len(key) == 1 else None))
            events = app.query_one(EventsPane)
            await until(pilot, lambda: events.filter_text == word and len(app.screen_stack) == 1, word)  # noqa: B023


async def test_enter_on_an_event_goes_to_its_moment_block_and_request():
    source = ReplaySource(Recording("x", list(enumerate(candidates_batches(4)))))
    async with running(source) as (app, pilot):
        await pilot.press("end", "5")
        await until(pilot, lambda: app.query_one(EventsPane).has_focus, "the events")
        await type_filter(app, pilot, *"kind:copied", "enter")
        await until(pilot, lambda: "copy-on-write" in app.query_one(EventsPane).text(), "the copy")
        await pilot.press("up", "enter")
        await until(pilot, lambda: app.chosen.key == "r1.0" and app.chosen.cursor == 2, "its block and sequence")
        await until(pilot, lambda: app._frame.step == 2 and app._frame.phase == "plan", "its moment")


async def test_orders_and_following_are_told_in_the_title():
    engine, batches = crowded_engine()
    async with running(StorySource(engine, batches + engine.run(2))) as (app, pilot):
        await pilot.press("2", "o")
        await until(pilot, lambda: "by newest" in screen_text(app), "the order")
        await pilot.press("f")
        newest = [r.request_id for r in app._frame.requests if r.status == "running"][-1]
        await until(pilot, lambda: "following" in screen_text(app) and app.chosen.key == newest, "the newest")
        await pilot.press("down")
        await until(pilot, lambda: "following" not in screen_text(app), "a choice of one's own ends it")


async def test_holders_of_the_block_under_the_cursor_are_marked_in_the_list():
    async with running(ListSource(candidates_batches(2))) as (app, pilot):
        await pilot.press("1", "right")  # P0, held by both
        pane = app.query_one(RequestsPane)
        await until(pilot, lambda: pane.text().count("●") == 2, "two holders")


async def test_what_is_typed_into_the_filter_is_never_markup():
    async with running(live(num_steps=3), (120, 36)) as (app, pilot):
        await type_filter(app, pilot, *"block:[/]")
        await until(pilot, lambda: "block" in str(app.screen.query_one("#filter").border_subtitle), "what is wrong")


async def test_following_ends_with_esc_and_with_another_choice():
    async with running(live(num_steps=3), (120, 36)) as (app, pilot):
        await pilot.press("2", "f")
        await until(pilot, lambda: app.chosen.key is not None, "the newest")
        await pilot.press("escape")
        await until(pilot, lambda: app.chosen.key is None, "nothing is selected")
        assert "following" not in screen_text(app)
