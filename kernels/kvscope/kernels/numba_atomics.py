"""What compiled threads need to agree on something without Python: atomic words of an int64 array, waiting, calls."""

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

_ORDER = "seq_cst"  # of each: there are few, and nothing here is worth a proof that less would do
_WORD = ir.IntType(64)
_NOTHING = ir.FunctionType(ir.VoidType(), [])
_PAUSES = {"x86_64": "pause", "aarch64": "yield", "arm64": "yield"}  # what tells a core that it is waiting


def _place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    words = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(words, [arguments[1]])


@intrinsic
def load(_: Any, words: Any, index: Any) -> Any:
    """`words[index]`"""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, arguments), _ORDER, 8)

    return types.int64(words, types.int64), generate


@intrinsic
def store(_: Any, words: Any, index: Any, value: Any) -> Any:
    """`words[index] = value`"""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[2], _place(context, builder, signature, arguments), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


def _change(operation: str) -> Any:
    def typed(_: Any, words: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = _place(context, builder, signature, arguments)
            return builder.atomic_rmw(operation, place, arguments[2], _ORDER)

        return types.int64(words, types.int64, types.int64), generate

    return intrinsic(typed)


exchange, add = _change("xchg"), _change("add")
"""(words, index, value): what was there before."""


@intrinsic
def compare_and_set(_: Any, words: Any, index: Any, expected: Any, value: Any) -> Any:
    """What was there before; it has been replaced by `value` if that was `expected`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature, arguments)
        return builder.extract_value(builder.cmpxchg(place, arguments[2], arguments[3], _ORDER, _ORDER), 0)

    return types.int64(words, types.int64, types.int64, types.int64), generate


@intrinsic
def pause(_: Any) -> Any:
    """Wait for some tens of cycles, where the processor has an instruction for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        instruction = _PAUSES.get(binding.get_process_triple().split("-")[0])
        if instruction is not None:
            binding.initialize_native_asmparser()  # numba itself never needs one
            builder.asm(_NOTHING, instruction, "", [], True)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(_: Any) -> Any:
    """Let another thread or process have the core, if one waits for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        name = "sched_yield"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call(_: Any, address: Any, worker: Any, first: Any, last: Any, arguments: Any) -> Any:
    """Call the function at this address, compiled of `(worker, first, last, address of arguments)`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    n = types.int64
    return types.void(n, n, n, n, n), generate


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """An address as `numba.carray` takes it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate
