"""Where one token's keys and values lie: from its position through the block table to bytes in memory. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.copies import SequenceFrame
from kvscope.dashboard.frames import Frame
from kvscope.dashboard.glyphs import Glyphs
from kvscope.dashboard.strips import Part, quote_piece, wrap_parts
from kvscope.events.types import EngineInfo

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1}
INDENT = 4
MAX_READERS_NAMED = 6


class HeadBytes(NamedTuple):
    """The bytes of one slot within the K cache of one layer, and the same within its V cache.

    Head h has `size` bytes from `first + h * stride` on; a cache is laid out as
    `[num_blocks, num_kv_heads, block_size, head_size]`.
    """

    first: int
    stride: int
    size: int


def slot_bytes(info: EngineInfo, block_id: int, slot: int) -> HeadBytes | None:
    """None where layers, or K and V, differ in shape: then one formula does not hold for all of them."""
    size = info.head_size * ELEMENT_BYTES.get(info.kv_dtype, 0)
    if not size or info.bytes_per_block != 2 * info.num_layers * info.num_kv_heads * info.block_size * size:
        return None
    return HeadBytes((block_id * info.num_kv_heads * info.block_size + slot) * size, info.block_size * size, size)


def draw_translation(
    frame: Frame, token: tuple[SequenceFrame, int], readers: Sequence[str], glyphs: Glyphs, width: int
) -> list[Strip]:
    """The lines under the row of a token, given as sequence and position; `readers` also hold its block."""
    sequence, position = token
    block_size = frame.pool.block_size
    logical, slot = divmod(position, block_size)
    block_id = sequence.table[logical - sequence.num_released]
    parts: list[Part] = [
        (f"position {position} ", theme.STRONG),
        *_piece(sequence, position, glyphs),
        (f"= block {position} // {block_size} = L{logical}, slot {position} % {block_size} = {slot}", theme.SOFT),
        (f" {glyphs.arrow} ", theme.FAINT),
        (f"P{block_id} slot {slot}\n", theme.STRONG),
        *_bytes(frame.info, block_id, slot),
        *_readers(sequence, position, readers),
    ]
    margin = Strip.blank(INDENT)
    return [
        Strip.join([margin, strip]).adjust_cell_length(width).apply_style(theme.ROW)
        for strip in wrap_parts(parts, max(width - INDENT - 1, 1))
    ]


def _piece(sequence: SequenceFrame, position: int, glyphs: Glyphs) -> list[Part]:
    if position >= len(sequence.pieces):
        return []
    return [(quote_piece(sequence.pieces[position], glyphs) + " ", theme.TEXT)]


def _bytes(info: EngineInfo | None, block_id: int, slot: int) -> list[Part]:
    place = slot_bytes(info, block_id, slot) if info is not None else None
    if info is None or place is None:
        return []
    head = f"{place.first:,}-{place.first + place.size - 1:,}"
    if info.num_kv_heads > 1:
        last = place.first + (info.num_kv_heads - 1) * place.stride
        head = f"head 0: {head}, head {info.num_kv_heads - 1}: {last:,}-{last + place.size - 1:,}"
    return [(f"bytes in K and in V of each of {info.num_layers} layers: {head}\n", theme.SOFT)]


def _readers(sequence: SequenceFrame, position: int, readers: Sequence[str]) -> list[Part]:
    if position >= sequence.num_written:
        return [("reserved: nothing is written here yet", theme.FAINT)]
    if not readers:
        return [(f"read by {sequence.sequence_id} alone", theme.SOFT)]
    more = f" and {len(readers) - MAX_READERS_NAMED} more" if len(readers) > MAX_READERS_NAMED else ""
    return [(f"the same slot is read by {', '.join(readers[:MAX_READERS_NAMED])}{more}", theme.SHARED)]
