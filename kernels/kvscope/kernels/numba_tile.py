"""The innermost loop of a multiplication: up to six rows times 64 outputs of a weight, all sums kept in registers.

Written in LLVM's vectors, since a compiler that is given loops keeps such sums in memory. Where the processor has
AVX512_BF16, bfloat16 is multiplied in pairs by its own instruction; else it is widened first.
"""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from kvscope.kernels.numba_elements import target_has
from kvscope.kernels.numba_prefetch import CACHE_LINE_BYTES, prefetch

BLOCK = 64  # outputs that lie side by side
MAX_ROWS = 6  # 24 vectors of sums, of the 32 that AVX-512 has
LINES_AHEAD = 2  # asked for at each step: of the four that a step reads, for weights read at least twice

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


@intrinsic(prefer_literal=True)
def multiply_tile(
    _: Any, num_rows: Any, weight: Any, start: Any, rows: Any, first: Any, count: Any, ahead: Any, sums: Any
) -> Any:
    """`sums [num_rows, BLOCK]` of `rows[first:]`, `count` elements each, times the block of weights from `start` on.

    `num_rows` is a number known when compiling. Elements are float32, or uint32 that hold pairs of bfloat16. From
    `ahead` on, `LINES_AHEAD` cache lines of weights per element are asked for meanwhile.
    """
    is_bfloat16 = weight.dtype == types.uint32
    element = _WORD if is_bfloat16 else _REAL
    vector = ir.VectorType(element, _WIDTH)
    vectors = range(0, BLOCK, _WIDTH)
    tile = [(row, column) for row in range(num_rows.literal_value) for column in vectors]

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        def memory(index: int) -> Any:
            return context.make_array(signature.args[index])(context, builder, arguments[index]).data

        add = _choose_add(is_bfloat16)
        weights, inputs, output = memory(1), memory(3), memory(7)
        _, _, start, _, first, count, ahead, _ = arguments
        before, loop = builder.block, builder.append_basic_block("loop")
        after = builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_INDEX)
        totals = [builder.phi(_REALS) for _ in tile]
        step = builder.mul(k, _INDEX(BLOCK))
        here = builder.add(start, step)
        loaded = {c: _load(builder, builder.gep(weights, [builder.add(here, _INDEX(c))]), vector, 4) for c in vectors}
        later = builder.add(ahead, builder.mul(k, _INDEX(LINES_AHEAD * CACHE_LINE_BYTES // 4)))
        for line in range(LINES_AHEAD):
            prefetch(builder, builder.gep(weights, [builder.add(later, _INDEX(line * CACHE_LINE_BYTES // 4))]))
        added, x = [], None
        for (row, column), total in zip(tile, totals, strict=True):
            if column == 0:
                place = builder.add(builder.add(first, k), builder.mul(count, _INDEX(row)))
                x = _everywhere(builder, _load(builder, builder.gep(inputs, [place]), element, 2), vector)
            added.append(add(builder, total, loaded[column], x))
        following = builder.add(k, _INDEX(1))
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        k.add_incoming(_INDEX(0), before)
        k.add_incoming(following, loop)
        builder.position_at_end(after)
        for (row, column), total, new in zip(tile, totals, added, strict=True):
            total.add_incoming(ir.Constant(_REALS, [0.0] * _WIDTH), before)
            total.add_incoming(new, loop)
            target = builder.gep(output, [_INDEX(row * BLOCK + column)])
            builder.store(new, builder.bitcast(target, _REALS.as_pointer())).align = 4
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
