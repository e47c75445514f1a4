"""The innermost loop of a multiplication: up to six rows times 64 outputs of a weight, all sums kept in registers.

Written in LLVM's vectors, since a compiler that is given loops keeps such sums in memory. A processor with fewer
registers than AVX-512 has goes through the weights several times, for a part of the outputs each. Where it has
AVX512_BF16, bfloat16 is multiplied in pairs by its own instruction; else it is widened first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from kvscope.kernels.numba_elements import target_has
from kvscope.kernels.numba_prefetch import CACHE_LINE_BYTES, prefetch

BLOCK = 64  # outputs that lie side by side
MAX_ROWS = 6
# Vectors of 16 sums that the processor's registers hold: 24 of the 32 that AVX-512 has; twice 6 of AVX2's 16.
_MAX_SUMS = 24 if target_has("avx512f") else 6
LINES_AHEAD = 2  # asked for per element: of the four that a block has, for weights read at least twice

_REAL, _WORD, _INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_WIDTH = 16
_REALS, _WORDS = ir.VectorType(_REAL, _WIDTH), ir.VectorType(_WORD, _WIDTH)
_PAIRS_INSTRUCTION = "vdpbf16ps $3, $2, $0"  # sums += both products of each pair; has no name in llvmlite
Add = Callable[[ir.IRBuilder, Any, Any, Any], Any]


def _add_reals(builder: ir.IRBuilder, sums: Any, weights: Any, x: Any) -> Any:
    product = builder.fmul(weights, x, flags=("contract",))
    return builder.fadd(sums, product, flags=("contract",))


def add_pairs(builder: ir.IRBuilder, sums: Any, weights: Any, x: Any) -> Any:
    """16 sums, more by both products of 16 pairs of bfloat16 each; needs AVX512_BF16."""
    binding.initialize_native_asmparser()  # numba itself never needs one
    kind = ir.FunctionType(_REALS, [_REALS, _WORDS, _WORDS])
    return builder.asm(kind, _PAIRS_INSTRUCTION, "=v,0,v,v", [sums, weights, x], side_effect=False)


def _add_widened_pairs(builder: ir.IRBuilder, sums: Any, weights: Any, x: Any) -> Any:
    shift, mask = ir.Constant(_WORDS, [16] * _WIDTH), ir.Constant(_WORDS, [0xFFFF0000] * _WIDTH)
    for half in (lambda pairs: builder.shl(pairs, shift), lambda pairs: builder.and_(pairs, mask)):
        first, second = (builder.bitcast(half(pairs), _REALS) for pairs in (weights, x))
        sums = _add_reals(builder, sums, first, second)
    return sums


def _choose_add(is_bfloat16: bool) -> Add:
    if not is_bfloat16:
        return _add_reals
    if not target_has("avx512bf16"):
        return _add_widened_pairs
    return add_pairs


def _load(builder: ir.IRBuilder, pointer: Any, kind: Any, align: int) -> Any:
    value = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    value.align = align
    return value


def _everywhere(builder: ir.IRBuilder, value: Any, kind: Any) -> Any:
    undefined, zeros = ir.Constant(kind, ir.Undefined), ir.Constant(_WORDS, [0] * _WIDTH)
    return builder.shuffle_vector(builder.insert_element(undefined, value, _WORD(0)), undefined, zeros)


def _columns_at_once(num_rows: int) -> int:
    """Outputs of a block that are summed up in one loop."""
    fitting = _MAX_SUMS // num_rows * _WIDTH
    return max(columns for columns in (BLOCK, BLOCK // 2, _WIDTH) if columns <= max(fitting, _WIDTH))


class _Starts(NamedTuple):
    """Memory and where in it a loop begins: of weights, of inputs, and of the weights that come next."""

    weights: Any
    start: Any
    inputs: Any
    first: Any
    ahead: Any


def _emit_loop(
    builder: ir.IRBuilder, add: Add, starts: _Starts, count: Any, shape: tuple[int, int, int]
) -> dict[tuple[int, int], Any]:
    """The sums of so many rows and columns, by (row, column of each vector), with lines asked for at each step."""
    num_rows, num_columns, num_lines = shape
    element = starts.weights.type.pointee
    vector, columns = ir.VectorType(element, _WIDTH), range(0, num_columns, _WIDTH)
    before, loop, after = builder.block, *(builder.append_basic_block(name) for name in ("loop", "after"))
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(_INDEX)
    totals = {(row, column): builder.phi(_REALS) for row in range(num_rows) for column in columns}
    here = builder.gep(starts.weights, [builder.add(starts.start, builder.mul(k, _INDEX(BLOCK)))])
    loaded = {column: _load(builder, builder.gep(here, [_INDEX(column)]), vector, 4) for column in columns}
    length = CACHE_LINE_BYTES // 4
    for line in range(num_lines):
        place = builder.add(builder.mul(k, _INDEX(num_lines * length)), _INDEX(line * length))
        prefetch(builder, builder.gep(starts.weights, [builder.add(starts.ahead, place)]))
    sums: dict[tuple[int, int], Any] = {}
    for row in range(num_rows):
        place = builder.add(builder.add(starts.first, k), builder.mul(count, _INDEX(row)))
        x = _everywhere(builder, _load(builder, builder.gep(starts.inputs, [place]), element, 2), vector)
        sums |= {(row, column): add(builder, totals[row, column], loaded[column], x) for column in columns}
    following = builder.add(k, _INDEX(1))
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    k.add_incoming(_INDEX(0), before)
    k.add_incoming(following, loop)
    for place, total in totals.items():
        total.add_incoming(ir.Constant(_REALS, [0.0] * _WIDTH), before)
        total.add_incoming(sums[place], loop)
    builder.position_at_end(after)
    return sums


@intrinsic(prefer_literal=True)
def multiply_tile(
    _: Any, num_rows: Any, weight: Any, start: Any, rows: Any, first: Any, count: Any, ahead: Any, sums: Any
) -> Any:
    """`sums [num_rows, BLOCK]` of `rows[first:]`, `count` elements each, times the block of weights from `start` on.

    `num_rows` is a number known when compiling. Elements are float32, or uint32 that hold pairs of bfloat16. From
    `ahead` on, `LINES_AHEAD` cache lines of weights per element are asked for meanwhile.
    """
    is_bfloat16 = weight.dtype == types.uint32
    number_of_rows = num_rows.literal_value
    columns = _columns_at_once(number_of_rows)
    lines = max(LINES_AHEAD * columns // BLOCK, 1)  # as many in all, whatever the number of loops

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        def memory(index: int) -> Any:
            return context.make_array(signature.args[index])(context, builder, arguments[index]).data

        add = _choose_add(is_bfloat16)
        _, _, start, _, first, count, ahead, _ = arguments
        weights, inputs, output, length = memory(1), memory(3), memory(7), CACHE_LINE_BYTES // 4
        for number, column in enumerate(range(0, BLOCK, columns)):
            asked = range(number * lines, min((number + 1) * lines, LINES_AHEAD))
            later = builder.add(ahead, builder.mul(count, _INDEX(number * lines * length)))
            starts = _Starts(weights, builder.add(start, _INDEX(column)), inputs, first, later)
            sums = _emit_loop(builder, add, starts, count, (number_of_rows, columns, len(asked)))
            for (row, place), total in sums.items():
                target = builder.gep(output, [_INDEX(row * BLOCK + column + place)])
                builder.store(total, builder.bitcast(target, _REALS.as_pointer())).align = 4
        return context.get_dummy_value()

    n = types.int64
    return types.void(num_rows, weight, n, rows, n, n, n, sums), generate


@numba.njit
def multiply_rows(num_rows, weight, start, rows, first, count, ahead, sums):
    """`multiply_tile` for 1 to `MAX_ROWS` rows, a number known only now."""
    if num_rows == 6:
        multiply_tile(6, weight, start, rows, first, count, ahead, sums)
    elif num_rows == 5:
        multiply_tile(5, weight, start, rows, first, count, ahead, sums)
    elif num_rows == 4:
        multiply_tile(4, weight, start, rows, first, count, ahead, sums)
    elif num_rows == 3:
        multiply_tile(3, weight, start, rows, first, count, ahead, sums)
    elif num_rows == 2:
        multiply_tile(2, weight, start, rows, first, count, ahead, sums)
    else:
        multiply_tile(1, weight, start, rows, first, count, ahead, sums)
