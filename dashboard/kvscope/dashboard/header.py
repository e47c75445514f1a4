"""The top of the screen as strips: who is watched and how fresh it is, the pool in numbers, and the banner."""

from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.frames import Behind, Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.keys import DEFAULT_NAMES, KeyNames
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part, clip, columns, fit_whole, make_strip, measure, pad, wrap_parts
from kvscope.events.text import counted
from kvscope.transport.source import Status

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "fp8_e4m3": "fp8"}
MAX_BANNER_LINES = 3  # for each thing to know
MIN_NAME_WIDTH = 8
MIN_BAR_WIDTH = 34  # beside the numbers; a shorter bar says too little
_GAP: Part = ("  ", theme.PLAIN)


def draw_header(
    frame: Frame,
    title: str,
    glyphs: Glyphs,
    width: int,
    age_s: float,
    *,
    recording: str = "",
    keys: KeyNames = DEFAULT_NAMES,
) -> Strip:
    """Name, model, connection state, step, rate.

    `age_s` is how long the connection has been in its state, `recording` the file that the watched is recorded to.
    """
    right: list[Part] = [(keys["help"], theme.BRAND), (" help ", theme.SOFT)]
    if width >= 110:
        right += [(f" {keys['palette']}", theme.BRAND), (" palette ", theme.SOFT)]
    chips: list[Part] = [state_chip(frame, glyphs, age_s), _GAP]
    if recording:
        name = f" {recording}" if width >= 120 else ""
        chips += [(f" {glyphs.dot} REC ", theme.CHIP_NOTICE), (name, theme.TEXT), _GAP]
    seq = "-" if frame.seq is None else f"{frame.seq}"
    facts: list[list[Part]] = [
        [("step ", theme.SOFT), (f"{frame.step}", theme.STRONG)],
        [_GAP, *_rate_words(frame)],
        [_GAP, ("seq ", theme.SOFT), (seq, theme.TEXT)],
    ]
    left: list[Part] = [(" kvscope ", theme.BRAND)]
    room = width - measure([*left, *chips, *right]) - 1
    if width >= 80 or not (frame.pause_reason or frame.behind):  # else what happened takes the name's place
        left += [*_engine_words(frame, title, glyphs, width, room - measure([*facts[0], *facts[1], _GAP])), _GAP]
    room = width - measure([*left, *chips, *right]) - 1
    return columns([*left, *chips, *fit_whole(facts, room)], right, width)


def _engine_words(frame: Frame, title: str, glyphs: Glyphs, width: int, room: int) -> list[Part]:
    if frame.info is None:
        return [(clip(title, 30, glyphs), theme.STRONG)]
    info = frame.info
    model = clip(info.model, min(max(width // 5, 14), max(room, MIN_NAME_WIDTH)), glyphs)
    parts: list[Part] = [(model, theme.STRONG)]
    if info.device == "none":  # a scheduler and a pool without a model
        return [*parts, ("  simulated", theme.SOFT)]
    if width >= 100:
        dtypes = [_DTYPES.get(dtype, dtype) for dtype in dict.fromkeys((info.dtype, info.kv_dtype))]
        parts.append((f"  {clip(info.device, 16, glyphs)} {'/'.join(dtypes)}", theme.SOFT))
    if width >= 130:
        graphs = " graphs" if info.cuda_graphs else ""
        parts.append((f" {clip(info.attention_backend, 16, glyphs)}{graphs}", theme.SOFT))
    return parts


def state_chip(frame: Frame, glyphs: Glyphs, age_s: float) -> Part:
    """The connection in one word, told by glyph and word before colour."""
    match frame.status:
        case Status.LIVE if frame.engine_status == "paused" and frame.pause_reason:
            return f" {glyphs.pause} paused: {frame.pause_reason} ", theme.CHIP_NOTICE
        case Status.LIVE if frame.engine_status == "paused":
            return f" {glyphs.pause} PAUSED ", theme.CHIP_NOTICE
        case Status.LIVE:
            return f" {glyphs.dot} LIVE ", theme.CHIP_GOOD
        case Status.REPLAY:
            return f" {glyphs.play} REPLAY ", theme.CHIP_QUIET
        case Status.HISTORY:
            return f" {glyphs.back} HISTORY {_distance(frame.behind)}".rstrip() + " ", theme.CHIP_NOTICE
        case Status.STALE:
            return f" {glyphs.warning} STALE {age_s:.0f} s ", theme.CHIP_NOTICE
        case Status.GAP:
            return f" {glyphs.warning} GAP ", theme.CHIP_NOTICE
        case Status.ENDED:
            return f" {glyphs.tick} ENDED ", theme.CHIP_QUIET
        case _:
            return f" {glyphs.wait} {frame.status.value} ", theme.CHIP_QUIET


def _distance(behind: Behind | None) -> str:
    """`12.4 s behind`."""
    if behind is None or behind.elapsed_ns is None:
        return ""
    elapsed_s = behind.elapsed_ns / 1e9
    return f"{elapsed_s:.1f} s behind" if elapsed_s < 600 else f"{elapsed_s / 60:.0f} min behind"


def _rate_words(frame: Frame) -> list[Part]:
    if frame.tokens_per_s is None:
        running = any(request.status == "running" for request in frame.requests)
        return [("- tok/s" if running else "idle", theme.SOFT)]
    rate = frame.tokens_per_s
    return [(f"{rate:.1f}" if rate < 10 else f"{rate:.0f}", theme.STRONG), (" tok/s", theme.SOFT)]


def draw_gauge(frame: Frame, glyphs: Glyphs, width: int) -> list[Strip]:
    """The pool's bar and its numbers: on one line where both fit well, else the bar above the numbers."""
    pool, facts = frame.pool, _facts(frame)
    held: list[Part] = [
        (f" {pool.num_held}", theme.STRONG),
        (f"/{pool.num_blocks} blocks", theme.TEXT),
        *_bytes_words(frame),
    ]
    label: Part = (f" POOL {_allocator_word(frame, glyphs)}", theme.SOFT)
    numbers = [part for fact in facts for part in fact]
    room = width - measure([label, *held, *numbers]) - 3
    if room >= MIN_BAR_WIDTH:
        bar = draw_bar(pool, glyphs, min(room, 2 * MIN_BAR_WIDTH))
        return [make_strip([label, *bar, *held, ("  ", theme.PLAIN), *numbers], width)]
    bar = draw_bar(pool, glyphs, max(width - measure([label, *held]) - 1, 4))
    return [make_strip([label, *bar, *held], width), *_fact_lines(facts, width)]


def _allocator_word(frame: Frame, glyphs: Glyphs) -> str:
    """Blocks as needed go without saying."""
    if frame.info is None or frame.info.allocator == "paged":
        return ""
    return f"{clip(frame.info.allocator, 16, glyphs)} "


def _fact_lines(facts: list[list[Part]], width: int) -> list[Strip]:
    """The numbers, as many to a line as fit."""
    indent: Part = ("     ", theme.PLAIN)
    lines: list[list[Part]] = [[indent]]
    for fact in facts:
        if measure([*lines[-1], *fact]) > width:
            lines.append([indent])
        lines[-1] += fact
    return [make_strip(line, width) for line in lines]


def draw_bar(pool: PoolFrame, glyphs: Glyphs, width: int) -> list[Part]:
    """Slots of the whole pool: written, reserved but unwritten, cached, free. What is not zero gets a cell at least."""
    total = pool.num_blocks * pool.block_size
    if not total:
        return [(glyphs.bar_free * width, theme.FAINT)]
    slots = pool.num_written_slots, pool.num_wasted_slots, pool.num_cached * pool.block_size
    cells = [max(round(count * width / total), 1) if count else 0 for count in slots]
    while sum(cells) > width and max(cells) > 1:
        cells[cells.index(max(cells))] -= 1
    written, wasted, cached = cells
    return [
        (glyphs.bar_written * written, theme.TEXT),
        (glyphs.bar_reserved * wasted, theme.NOTICE),
        (glyphs.cached * cached, theme.SOFT),
        (glyphs.bar_free * (width - sum(cells)), theme.FAINT),
    ]


def _facts(frame: Frame) -> list[list[Part]]:
    pool, counters = frame.pool, frame.counters
    percent = 100 * pool.num_wasted_slots / pool.num_reserved_slots if pool.num_reserved_slots else 0.0
    facts = [
        _fact("shared", f"{pool.num_shared}", f" saves {pool.num_saved}" if pool.num_saved else ""),
        _fact("cached", f"{pool.num_cached}"),
        _fact("waste", f"{pool.num_wasted_slots}", f" slots {percent:.0f}%"),
        _fact("CoW", f"{counters.copies}"),
        _fact("preempted", f"{counters.preemptions}", style=theme.NOTICE if counters.preemptions else None),
    ]
    if frame.host.num_blocks:
        facts.append(_fact("host", f"{frame.host.num_held}", f"/{frame.host.num_blocks}"))
    rarely = {
        "refused": counters.refusals,
        "gaps": frame.num_gaps,
        "dropped batches": counters.dropped_batches,
        "unreadable events": frame.num_refused_events,
    }
    return facts + [_fact(name, f"{count}", style=theme.NOTICE) for name, count in rarely.items() if count]


def _fact(name: str, value: str, tail: str = "", style: Style | None = None) -> list[Part]:
    shown = style or (theme.SOFT if value == "0" else theme.STRONG)
    return [(f" {name} ", theme.SOFT), (value, shown), (tail, theme.SOFT), (" ", theme.PLAIN)]


def _bytes_words(frame: Frame) -> list[Part]:
    if frame.info is None or not frame.info.bytes_per_block:
        return []
    return [(f" {format_bytes(frame.pool.num_held * frame.info.bytes_per_block)}", theme.SOFT)]


def format_bytes(count: int) -> str:
    """`12 KiB`, `1.5 GiB`."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 10 or units[0] == "B" else f"{size:.1f} {units[0]}"


def draw_banner(
    frame: Frame, glyphs: Glyphs, width: int, age_s: float, *, keys: KeyNames = DEFAULT_NAMES
) -> list[Strip]:
    """What the user must know before believing the picture; nothing when all is well."""
    strips = []
    if frame.findings:
        first = frame.findings[0]
        more = f"  (+{len(frame.findings) - 1} more)" if len(frame.findings) > 1 else ""
        text = f" {glyphs.cross} AUDIT: invariant {first.rule} broken at step {first.step}: {first.message}{more}"
        strips += _banner_lines(text, width, theme.BANNER_BAD, glyphs)
    if frame.engine_warning:
        text = f" {glyphs.warning} ENGINE: {frame.engine_warning}"
        strips += _banner_lines(text, width, theme.BANNER_CALM, glyphs)
    freshness = _freshness(frame, age_s, keys, brief=width < 80)
    if freshness is not None:
        line = pad(clip(f" {glyphs.warning} {freshness}", width, glyphs), width)
        strips.append(make_strip([(line, theme.BANNER_CALM)]))
    return strips


def _banner_lines(text: str, width: int, style: Style, glyphs: Glyphs) -> list[Strip]:
    """What does not fit a line goes on in a second and a third one, and ends there."""
    lines = wrap_parts([(text, style)], width)
    if len(lines) > MAX_BANNER_LINES:
        rest = "".join(strip.text for strip in lines[MAX_BANNER_LINES - 1 :])
        lines[MAX_BANNER_LINES - 1 :] = [make_strip([(clip(rest, width, glyphs), style)])]
    return [make_strip([(pad(strip.text, width), style)]) for strip in lines]


def _freshness(frame: Frame, age_s: float, keys: KeyNames, *, brief: bool) -> str | None:
    detail = f": {frame.status_detail}" if frame.status_detail else ""
    match frame.status:
        case Status.STALE:
            return f"STALE {age_s:.0f} s{detail or ': no heartbeat'}; the last picture stays"
        case Status.GAP:
            return f"GAP in the stream{detail}; the picture is behind until it is healed"
        case Status.SYNCING:
            return f"SYNCING{detail}: asking for the engine's full state"
        case Status.CONNECTING:
            return f"CONNECTING{detail}"
        case Status.ENDED:
            return f"ENDED{detail or ': the engine said goodbye'}; the last picture stays"
        case Status.HISTORY:
            head = "" if brief else f"HISTORY{detail}: "  # the chip says so too
            return f"{head}{_history_words(frame.behind, brief=brief)}; {keys['live']} or {keys['end']} returns"
        case Status.REPLAY if frame.status_detail:
            return f"RECORDING: {frame.status_detail}"
        case _:
            return None


def _history_words(behind: Behind | None, *, brief: bool) -> str:
    if behind is None:
        return "not the live engine"
    if behind.elapsed_ns is None:
        return "an engine that is gone" if brief else "the past of an engine that is gone; another one runs now"
    batches = counted(behind.num_batches, "batch") if behind.num_batches is not None else ""
    distance = f"{batches} behind" if brief and batches else ", ".join(filter(None, (_distance(behind), batches)))
    return f"{distance}; the engine is {behind.live_status.value}"
