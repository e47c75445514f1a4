"""Property: whatever an engine or a recording says, every widget shows printable characters and obeys none of it."""

from __future__ import annotations

import asyncio
import unicodedata
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgpack
from dashboard_story import StoryEngine, StorySource
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from test_app import screen_text, strips_of, until

from kvscope.dashboard.app import DashboardApp
from kvscope.events import types as ev
from kvscope.events.codec import decode_batch, encode_batch
from kvscope.transport.recording import Recorder, ReplaySource, open_recording
from kvscope.transport.requests import one_line
from kvscope.transport.source import Reply, Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvscope.events.types import Batch

OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, bidi and zero-width, surrogates, line and paragraph separators
FRAGMENTS = (
    *("\x1b]52;c;ZXZpbA==\x07", "\x1b]2;evil\x1b\\", "\x1b[2J", "\x1bPq", "\x9b31m", "\x9d0;evil\x9c", "\x00", "\x7f"),
    *("[/nope]", "[@click=app.quit]x[/]", "[bold", "]", "\\[", "\u202e", "\u2066", "\u200b", "\ufeff", "\U000e0041"),
    *("\r\n", "\t", "\u2028", "\u0085", "漢字", "🌙", "e\u0301", "👩\u200d👧", "%s", "{0}"),
)
hostile = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), min_size=4, max_size=12).map("".join)
FOREIGN = {"name", "model", "device", "dtype", "attention_backend", "kvscope_version", "prompt", "message", "reason"}
FOREIGN |= {"kind", "mode", "miss"}
TOUR = ("1", "right", "2", "3", "4", "5", "6", "7", "slash", "escape")

# Few examples of many fragments: each opens the whole dashboard. Nothing is shrunk, which would open it for minutes.
examples = settings(
    max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate)
)


def say(batch: Batch, words: str) -> bytes:
    """The batch as a hostile engine would send it: every foreign word replaced."""
    return msgpack.packb(_replace(msgpack.unpackb(encode_batch(batch)), words))


def _replace(value: Any, words: str) -> Any:
    if isinstance(value, list):
        return [_replace(item, words) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: f"say:{words}" if name in FOREIGN and isinstance(item, str) else _replace(item, words)
        for name, item in value.items()
    }


def story(words: str, reply: str, cut: int) -> list[bytes]:
    """Ids, prompt, options, reasons, findings and two replies; one sequence of characters is cut in two by a step."""
    engine = StoryEngine(12, 4)
    engine.name_prefix = words
    first = f"{words}1.0"
    batches = engine.start() + engine.submit(words, n=2, max_tokens=6) + engine.submit("more", max_tokens=6)
    batches += engine.step({first: f"say:{reply[:cut]}"}) + engine.step({first: reply[cut:] or " "})
    batches += engine.submit("so long a prompt that it waits for blocks: " * 2, max_tokens=2) + engine.run(2)
    batches += [
        engine.batch("control", ev.RequestRefused(request_id=words, reason="")),
        engine.batch("commit", ev.AuditFinding(rule=1, message="")),
        engine.batch("control", ev.EnginePaused(reason="")),
    ]
    return [say(batch, words) for batch in batches]


def assert_harmless(app: Any) -> str:
    """The screen's text, of characters that a terminal only shows, on lines of one width."""
    strips = strips_of(app)
    text = "\n".join(strip.text for strip in strips)
    assert not {unicodedata.category(character) for character in text if character != "\n"} & OBEYED, ascii(text)
    assert {cell_len(strip.text) for strip in strips} == {app.size.width}
    metas = [segment.style.meta for strip in strips for segment in strip if segment.style and segment.style.meta]
    assert not [meta for meta in metas if "app.quit" in str(meta.get("@click", ""))]
    return text


@asynccontextmanager
async def opened(source: Any, size: tuple[int, int], title: str) -> AsyncIterator[tuple[Any, Any]]:
    app = DashboardApp(source, title=title, fps=200)
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: app._frame.revision == source.view.revision, "the latest frame")
        yield app, pilot


async def tour(app: Any, pilot: Any) -> None:
    """Every pane and the screens above them."""
    seen = ""
    for key in TOUR:
        await pilot.press(key)
        seen += assert_harmless(app)
    assert seen.count("say:") > 1


@examples
@given(size=st.sampled_from([(80, 24), (160, 45)]), words=hostile, reply=hostile, error=hostile, cut=st.integers(0, 12))
def test_a_live_engine(size: tuple[int, int], words: str, reply: str, error: str, cut: int) -> None:
    async def check() -> None:
        batches = [decode_batch(payload, printable=True).batch for payload in story(words, reply, cut)]
        source = StorySource(StoryEngine(12, 4), batches)
        source.control.answer = Reply(ok=False, error=error)
        async with opened(source, size, error) as (app, pilot):
            source.set_status(Status.GAP, one_line(RuntimeError(error)))
            await tour(app, pilot)
            await pilot.press("i", "x", "enter")
            await until(pilot, lambda: "prompt refused" in screen_text(app))
            await pilot.press("escape", "2", "down", "x")
            await until(pilot, lambda: "cancel " in screen_text(app), "the notification")
            assert_harmless(app)

    asyncio.run(check())


file_names = hostile.map(lambda text: text.replace("/", "").replace("\0", "").encode()[:200].decode(errors="ignore"))


@examples
@given(words=hostile, reply=hostile, name=file_names, cut=st.integers(0, 12))
def test_a_recording(tmp_path: Path, words: str, reply: str, name: str, cut: int) -> None:
    path = tmp_path / f"_{name}.mcap"
    recorder = Recorder(path, force=True)
    for seq, payload in enumerate(story(words, reply, cut)):
        recorder.record(seq, seq, payload)
    recorder.close()

    async def check() -> None:
        async with opened(ReplaySource(open_recording(path)), (160, 45), path.name) as (app, pilot):
            await pilot.press("end")
            await tour(app, pilot)

    asyncio.run(check())
