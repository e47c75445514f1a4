"""Tile sizes of the attention kernel, by shape: a table, not a search at run time."""

from typing import NamedTuple

MIN_DOT_ROWS = 16  # the smallest M, N and K of `tl.dot`
MAX_INTERPRETED_TILE = 512
PROGRAMS_PER_MULTIPROCESSOR = 2  # enough loads in flight for the memory; one each leaves the last wave half empty
MAX_SPLITS = 64


class Tiles(NamedTuple):
    """Shape of one program's work and how it is compiled."""

    block_m: int
    """Query rows per tile: queries times query heads of the group (padded to a power of two)."""
    tile: int
    """Positions of K and V per iteration."""
    num_warps: int = 4
    num_stages: int = 2


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def compiled_tiles(*, one_query: bool, group_size: int, head_size: int, element_size: int) -> Tiles:
    """Tiles for a GPU. `head_size` is the larger one of K and V, `element_size` in bytes per multiplied element.

    Decode is bound by reading KV: the fewest rows the matrix units take, and a wide tile to have many loads in
    flight. Prefill is bound by arithmetic: as many rows as positions. Rows above 256 bytes make smaller tiles, so that
    two stages of K and V fit the 64 KiB of shared memory of the smallest target (CDNA 3). Where a prefill's tile would
    need more than 255 registers a thread, it has fewer positions (float32, which has no matrix units, fewer rows too).
    """
    group_rows = next_power_of_two(group_size)
    row_bytes = next_power_of_two(head_size) * element_size  # of one K or V row
    tile = max(MIN_DOT_ROWS, min(64, 64 * 256 // row_bytes))
    if one_query:
        return Tiles(block_m=max(MIN_DOT_ROWS, group_rows), tile=tile)
    if element_size == 4:
        return Tiles(block_m=max(32, group_rows), tile=MIN_DOT_ROWS)
    return Tiles(block_m=max(tile, group_rows), tile=max(MIN_DOT_ROWS, min(tile, 32 * 256 // row_bytes)))


def interpreted_tiles(*, group_size: int, max_query_length: int, max_context_length: int) -> Tiles:
    """Tiles for the interpreter, where a program costs milliseconds whatever its size: few and large ones."""
    rows = next_power_of_two(max_query_length * next_power_of_two(group_size))
    return Tiles(
        block_m=max(next_power_of_two(group_size), min(max(rows, MIN_DOT_ROWS), MAX_INTERPRETED_TILE)),
        tile=min(max(next_power_of_two(max_context_length), MIN_DOT_ROWS), MAX_INTERPRETED_TILE),
    )


class Splits(NamedTuple):
    """How decodes are shared out: at most `per_sequence` programs a sequence and KV head, about `programs` in all."""

    per_sequence: int
    programs: int


NO_SPLITS = Splits(per_sequence=1, programs=1)


def compiled_splits(*, num_seqs: int, num_kv_heads: int, num_multiprocessors: int) -> Splits:
    """The upper bound that a launch is made for; the device then splits by the lengths of the batch.

    A batch that fills the multiprocessors by itself is not split: the second pass would cost, and bring nothing.
    """
    programs = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors
    wanted = -(-programs // (num_seqs * num_kv_heads))
    if num_seqs * num_kv_heads * 4 > programs * 3:
        return NO_SPLITS
    return Splits(min(next_power_of_two(wanted), MAX_SPLITS), programs)
