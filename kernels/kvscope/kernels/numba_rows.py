"""The innermost loops of attention: a key times the queries of its group, values times their weights.

Written in LLVM's vectors, so that sums stay in registers and each element of K and V is loaded, and widened, once for
several query heads. K and V are float32, or bfloat16 as uint16; all else is float32.
"""

from math import gcd
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvscope.kernels.numba_elements import target_has
from kvscope.kernels.numba_tile import add_pairs

_REAL, _HALF, _WORD, _INDEX = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
KEYS = 16  # that are multiplied at once
_NO_BITS_BELOW = 16  # what bfloat16 lacks of float32
# Vectors of 16 sums that the processor's registers hold, with some left for what is multiplied.
_MAX_SUMS = 28 if target_has("avx512f") else 6


def rows_at_once(size: int, num_rows: int) -> int:
    """How many rows of `size` elements to give to the functions below: a divisor of the number of rows."""
    fitting = max(_MAX_SUMS * 16 // size, 1)
    return max(count for count in range(1, min(fitting, num_rows) + 1) if num_rows % count == 0)


def _load(builder: ir.IRBuilder, pointer: Any, width: int) -> Any:
    """`width` elements as float32."""
    element = pointer.type.pointee
    value = builder.load(builder.bitcast(pointer, ir.VectorType(element, width).as_pointer()))
    value.align = 2 if element == _HALF else 4
    if element != _HALF:
        return value
    words = ir.VectorType(_WORD, width)
    shift = ir.Constant(words, [_NO_BITS_BELOW] * width)
    return builder.bitcast(builder.shl(builder.zext(value, words), shift), ir.VectorType(_REAL, width))


def _everywhere(builder: ir.IRBuilder, value: Any, width: int) -> Any:
    undefined = ir.Constant(ir.VectorType(_REAL, width), ir.Undefined)
    places = ir.Constant(ir.VectorType(_WORD, width), [0] * width)
    return builder.shuffle_vector(builder.insert_element(undefined, value, _WORD(0)), undefined, places)


def _sum(builder: ir.IRBuilder, vector: Any, width: int) -> Any:
    """Of all elements, halves upon halves."""
    while width > 1:
        width //= 2
        words = ir.VectorType(_WORD, width)
        low, high = (
            builder.shuffle_vector(vector, vector, ir.Constant(words, list(range(start, start + width))))
            for start in (0, width)
        )
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, _WORD(0))


def _add_product(builder: ir.IRBuilder, total: Any, x: Any, y: Any) -> Any:
    return builder.fadd(total, builder.fmul(x, y, flags=("contract",)), flags=("contract",))


@intrinsic(prefer_literal=True)
def score_key(
    _: Any, size: Any, count: Any, key: Any, at: Any, rows: Any, first: Any, stride: Any, scale: Any, scores: Any,
    to: Any, score_stride: Any,
) -> Any:  # fmt: skip
    """`scores[to + i * score_stride]` = `scale` times the product of `key[at:]` and `rows[first + i * stride:]`.

    Of `size` elements each, for i < `count`; both are numbers known when compiling. Offsets are of the arrays' memory.
    """
    length, num_rows = size.literal_value, count.literal_value
    width = gcd(length, 16)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        def memory(index: int) -> Any:
            return context.make_array(signature.args[index])(context, builder, arguments[index]).data

        keys, queries, output = memory(2), memory(4), memory(8)
        _, _, _, at, _, first, stride, scale, _, to, score_stride = arguments
        places = [_INDEX(start) for start in range(0, length, width)]
        loaded = [_load(builder, builder.gep(keys, [builder.add(at, place)]), width) for place in places]
        for i in range(num_rows):
            row = builder.add(first, builder.mul(stride, _INDEX(i)))
            total = ir.Constant(ir.VectorType(_REAL, width), [0.0] * width)
            for place, part in zip(places, loaded, strict=True):
                x = _load(builder, builder.gep(queries, [builder.add(row, place)]), width)
                total = _add_product(builder, total, part, x)
            score = builder.fmul(_sum(builder, total, width), scale)
            builder.store(score, builder.gep(output, [builder.add(to, builder.mul(score_stride, _INDEX(i)))]))
        return context.get_dummy_value()

    n = types.int64
    return types.void(size, count, key, n, rows, n, n, types.float32, scores, n, n), generate


@intrinsic(prefer_literal=True)
def score_keys(
    _: Any, size: Any, keys: Any, at: Any, rows: Any, first: Any, query: Any, query_at: Any, scale: Any, scores: Any,
    to: Any,
) -> Any:  # fmt: skip
    """`scores[to + i]` = `scale` times the product of `keys[at + i * size:]` and `rows[first:]`, for i < `KEYS`.

    Of `size` elements, a number known when compiling, a multiple of 16. `query[query_at:]` holds what `rows` does: of
    two bfloat16, pairs are multiplied by the processor's own instruction, if it has it.
    """
    length = size.literal_value
    both_half = keys.dtype == query.dtype == types.uint16
    in_pairs = both_half and length % 32 == 0 and target_has("avx512bf16")
    step = 32 if in_pairs else 16

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def memory(index: int) -> Any:
            return context.make_array(signature.args[index])(context, builder, arguments[index]).data

        _, _, at, _, first, _, query_at, scale, _, to = arguments
        load = _load_pairs if in_pairs else _load_reals
        multiplied, start = (memory(5), query_at) if in_pairs else (memory(3), first)
        places = [_INDEX(place) for place in range(0, length - length % 16, step)]
        row = [load(builder, builder.gep(multiplied, [builder.add(start, place)])) for place in places]

        def sums(number: int, count: int) -> Any:
            if count > 1:
                low, high = sums(number, count // 2), sums(number + count // 2, count // 2)
                return _add_across(builder, low, high, _ACROSS[count])
            key = builder.add(at, _INDEX(number * length))
            total = ir.Constant(ir.VectorType(_REAL, 16), [0.0] * 16)
            for place, x in zip(places, row, strict=True):
                part = load(builder, builder.gep(memory(1), [builder.add(key, place)]))
                total = (add_pairs if in_pairs else _add_product)(builder, total, part, x)
            return total

        result = builder.fmul(sums(0, KEYS), _everywhere(builder, scale, KEYS))
        target = builder.bitcast(builder.gep(memory(8), [to]), result.type.as_pointer())
        builder.store(result, target).align = 4
        return context.get_dummy_value()

    n = types.int64
    return types.void(size, keys, n, rows, n, query, n, types.float32, scores, n), generate


# How vectors of 16, each with the parts of the sums of half as many keys, become one: the elements that are added.
_QUARTERS = range(0, 16, 4)
_ACROSS = {
    2: [element for q in _QUARTERS for element in (q, q + 16, q + 1, q + 17)],
    4: [element for q in _QUARTERS for element in (q, q + 1, q + 16, q + 17)],
    8: [element for q in (0, 8, 16, 24) for element in range(q, q + 4)],
    16: [element for q in (0, 8, 16, 24) for element in range(q, q + 4)],
}


def _add_across(builder: ir.IRBuilder, low: Any, high: Any, elements: list[int]) -> Any:
    """Those elements of both, and their neighbours: two further in pairs of vectors of 4, else the next four."""
    distance = 4 if elements[1] == 1 and elements[2] == 2 else 2
    words = ir.VectorType(_WORD, 16)
    left, right = (
        builder.shuffle_vector(low, high, ir.Constant(words, [element + more for element in elements]))
        for more in (0, distance)
    )
    return builder.fadd(left, right)


def _load_reals(builder: ir.IRBuilder, pointer: Any) -> Any:
    return _load(builder, pointer, 16)


def _load_pairs(builder: ir.IRBuilder, pointer: Any) -> Any:
    """32 bfloat16 as 16 words."""
    value = builder.load(builder.bitcast(pointer, ir.VectorType(_WORD, 16).as_pointer()))
    value.align = 2
    return value


@intrinsic(prefer_literal=True)
def add_values(
    _: Any, size: Any, count: Any, values: Any, at: Any, number: Any, weights: Any, first: Any, weight_stride: Any,
    rows: Any, to: Any, stride: Any,
) -> Any:  # fmt: skip
    """Add `number` > 0 rows of values from `values[at:]` on, times their weights, to `rows[to + i * stride:]`.

    Of `size` elements each, for i < `count`, with weights from `weights[first + i * weight_stride:]` on.
    """
    length, num_rows = size.literal_value, count.literal_value
    width = gcd(length, 16)
    tile = [(i, start) for i in range(num_rows) for start in range(0, length, width)]

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        def memory(index: int) -> Any:
            return context.make_array(signature.args[index])(context, builder, arguments[index]).data

        inputs, factors, output = memory(2), memory(5), memory(8)
        _, _, _, at, number, _, first, weight_stride, _, to, stride = arguments

        def place(i: int, start: int) -> Any:
            return builder.gep(output, [builder.add(builder.add(to, builder.mul(stride, _INDEX(i))), _INDEX(start))])

        targets = [place(*element) for element in tile]
        initial = [_load(builder, target, width) for target in targets]
        before, loop = builder.block, builder.append_basic_block("loop")
        after = builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        t = builder.phi(_INDEX)
        totals = [builder.phi(ir.VectorType(_REAL, width)) for _ in tile]
        here, added = builder.add(at, builder.mul(t, _INDEX(length))), list(totals)
        factor = [
            builder.gep(factors, [builder.add(builder.add(first, builder.mul(weight_stride, _INDEX(i))), t)])
            for i in range(num_rows)
        ]
        everywhere = [_everywhere(builder, builder.load(pointer), width) for pointer in factor]
        for start in range(0, length, width):
            value = _load(builder, builder.gep(inputs, [builder.add(here, _INDEX(start))]), width)
            for i in range(num_rows):
                which = tile.index((i, start))
                added[which] = _add_product(builder, totals[which], everywhere[i], value)
        following = builder.add(t, _INDEX(1))
        builder.cbranch(builder.icmp_signed("<", following, number), loop, after)
        t.add_incoming(_INDEX(0), before)
        t.add_incoming(following, loop)
        for total, start_value, new in zip(totals, initial, added, strict=True):
            total.add_incoming(start_value, before)
            total.add_incoming(new, loop)
        builder.position_at_end(after)
        for target, new in zip(targets, added, strict=True):
            pointer = builder.bitcast(target, ir.VectorType(_REAL, width).as_pointer())
            builder.store(new, pointer).align = 4
        return context.get_dummy_value()

    n = types.int64
    return types.void(size, count, values, n, n, weights, n, n, rows, n, n), generate
