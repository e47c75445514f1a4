"""Asking for memory before it is needed, where the processor cannot guess what comes next: blocks lie anywhere."""

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

CACHE_LINE_BYTES = 64
_READ, _SECOND_LEVEL, _DATA = 0, 2, 1  # arguments of LLVM's instruction; the first level is too small to wait in


def prefetch(builder: ir.IRBuilder, pointer: Any) -> None:
    """Emit the instruction that asks for the cache line at `pointer`."""
    address = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
    instruction = builder.module.declare_intrinsic("llvm.prefetch", (address.type,), kind)
    builder.call(instruction, [address, number(_READ), number(_SECOND_LEVEL), number(_DATA)])


@intrinsic
def _prefetch(_: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        prefetch(builder, builder.gep(memory, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@numba.njit(inline="always")
def ask_for(row, first, last):
    """Let `row[first:last]` come into the cache. Asks for nothing twice, waits for nothing, and may be wrong."""
    for i in range(first, last, CACHE_LINE_BYTES // row.itemsize):
        _prefetch(row, i)
