"""One block in words: who holds it, and what is in each of its slots. Pure."""

from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.copies import SequenceFrame
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.pool_frame import PoolFrame
from kvscope.dashboard.strips import Part, make_strip, quote_piece, wrap_parts

MAX_HOLDERS_NAMED = 8


def draw_block(
    frame: Frame, block_id: int, glyphs: Glyphs, width: int, *, pool: PoolFrame | None = None
) -> list[Strip]:
    """The block's state and holders, then its slots one after the other, wrapped; of the device's pool unless told."""
    pool = pool or frame.pool
    if not 0 <= block_id < pool.num_blocks:
        return [make_strip([(" the pool is not known yet", theme.SOFT)], width)]
    holders = frame.holders(block_id, pool)
    inner, colour = max(width - 2, 1), theme.owner_style(frame.owner_of(holders))
    body = wrap_parts(_summary(pool, block_id, holders, colour), inner)
    if holders:
        sequence = frame.sequence(holders[0][0])
        if sequence is not None:
            body += wrap_parts(_slot_words(pool, block_id, sequence, holders[0][1], glyphs, colour=colour), inner)
    margin = make_strip([(" ", theme.PLAIN)])
    return [Strip.join([margin, strip]).adjust_cell_length(width) for strip in body]


def _summary(pool: PoolFrame, block_id: int, holders: list[tuple[str, int]], colour: Style) -> list[Part]:
    ref_count, num_written = pool.refs[block_id], pool.written[block_id]
    name: Part = (pool.name(block_id), theme.STRONG)
    if not ref_count:
        state = f" cached: {num_written} of {pool.block_size} slots kept" if num_written else " free"
        return [name, (state, theme.SOFT)]
    named = ", ".join(f"{sequence_id} (L{logical})" for sequence_id, logical in holders[:MAX_HOLDERS_NAMED])
    more = f" and {len(holders) - MAX_HOLDERS_NAMED} more" if len(holders) > MAX_HOLDERS_NAMED else ""
    return [
        name,
        ("  ref count ", theme.SOFT),
        (f"{ref_count}", theme.SHARED if ref_count > 1 else theme.STRONG),
        ("  held by ", theme.SOFT),
        (named + more, colour),
        (f"  {num_written} of {pool.block_size} slots written", theme.SOFT),
    ]


def _slot_words(
    pool: PoolFrame, block_id: int, sequence: SequenceFrame, logical: int, glyphs: Glyphs, *, colour: Style
) -> list[Part]:
    """`0 ■ "the"` for each slot. The written part of a shared block is common to its holders: any of them will do."""
    first, num_written = logical * pool.block_size, pool.written[block_id]
    parts: list[Part] = []
    for slot in range(pool.block_size):
        if slot >= num_written:
            parts.append((f"{glyphs.reserved}{slot} ", theme.FAINT))
            continue
        parts.append((f"{glyphs.written}{slot} ", colour))
        if first + slot < len(sequence.pieces):
            parts.append((quote_piece(sequence.pieces[first + slot], glyphs) + " ", theme.TEXT))
    return parts
