"""Breaks pool, tables and scheduler in every small way, one at a time, and asks the tests whether they notice.

    python tests/campaigns/mutants.py [--sample N] [--seed N] [FILE ...]

A mutant swaps one comparison, operator, constant, truth value or branch, or drops one call or assignment. It is killed
when a test fails, or the tests take three times as long as without it. Messages of errors are left alone. Each mutant
is a fork of this process, which has the heavy imports behind it; survivors are printed as they are found, and a table
at the end.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "runtime" / "kvscope" / "engine"
FILES = ("block_pool.py", "free_queue.py", "lru_list.py", "block_tables.py", "prefix_cache.py", "prefixes.py",
         "scheduler.py", "preemption.py", "swapping.py", "host_blocks.py")  # fmt: skip
# From quick to slow: the first failure ends a mutant.
TESTS = ("test_scheduler.py", "test_block_pool.py", "test_prefix_cache.py", "test_preemption.py",
         "test_parallel_sampling.py", "test_memory_world.py", "test_random_operations.py")  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change of one file. `line` is the original's."""

    file: str
    line: int
    change: str
    source: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    tree = ast.parse(path.read_text())
    for node in list(_places(tree)):
        for change, undo in _mutate(node):
            yield Mutant(path.name, node.lineno, change, ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree))))
            undo()


def _places(node: ast.AST) -> Iterator[ast.AST]:
    """What may be changed: everything but annotations, docstrings, imports, class bodies' fields and error messages."""
    for field, value in ast.iter_fields(node):
        if field in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom
            ):
                continue
            if isinstance(child, ast.If) and _is_for_types_only(child):
                continue
            yield child
            yield from _places(child)


def _is_for_types_only(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _mutate(node: ast.AST) -> Iterator[tuple[str, "Undo"]]:
    """Changes the node in place; each change is undone by its caller before the next."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            new = COMPARISONS[type(op)]()
            yield f"{_text(node)} with {type(new).__name__}", _set(node, "ops", [new])
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield f"{_text(node)} with {OPERATORS[type(op)].__name__}", _set(node, "op", OPERATORS[type(op)]())
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield f"{_text(node)} with {OPERATORS[type(op)].__name__}", _set(node, "op", OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield (
                f"{_text(node)} with and/or swapped",
                _set(node, "op", ast.Or() if isinstance(op, ast.And) else ast.And()),
            )
        case ast.UnaryOp(op=ast.Not()):
            yield f"{_text(node)} without not", _set(node, "op", ast.UAdd())
        case ast.Constant(value=bool(value)):
            yield f"{value} is {not value}", _set(node, "value", not value)
        case ast.Constant(value=int(value)):
            yield f"{value} is {value + 1}", _set(node, "value", value + 1)
        case ast.If() | ast.While() | ast.IfExp():
            yield f"if {_text(node.test)} always false", _set(node, "test", ast.Constant(value=False))
        case ast.Expr(value=ast.Call()):
            yield f"{_text(node)} dropped", _set(node, "value", ast.Constant(value=None))
        case ast.Return(value=ast.AST()):
            yield f"{_text(node)} returns None", _set(node, "value", ast.Constant(value=None))


class Undo:
    """Puts back what was there."""

    def __init__(self, node: ast.AST, field: str, value: object) -> None:
        self._node, self._field, self._value = node, field, value

    def __call__(self) -> None:
        setattr(self._node, self._field, self._value)


def _set(node: ast.AST, field: str, value: object) -> Undo:
    undo = Undo(node, field, getattr(node, field))
    setattr(node, field, value)
    return undo


def _text(node: ast.AST) -> str:
    return ast.unparse(node).replace("\n", " ")[:70]


def survives(mutant: Mutant | None, runtime: Path, limit_s: float = 600.0) -> bool:
    """Run the tests on a copy of the runtime in which one file is the mutant's; None runs them on the copy as it is."""
    original = (ENGINE / mutant.file).read_text() if mutant is not None else ""
    if mutant is not None:
        (runtime / "kvscope" / "engine" / mutant.file).write_text(mutant.source)
    child = os.fork()
    if child == 0:
        os.setsid()
        _run_tests(runtime)
    deadline = time.monotonic() + limit_s
    status = None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0.02)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if mutant is not None:
        (runtime / "kvscope" / "engine" / mutant.file).write_text(original)
    return status == 0


def _run_tests(runtime: Path) -> None:
    """In the child; never returns."""
    import pytest

    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(runtime), str(ROOT / "kernels")]
    tests = [str(ROOT / "tests" / "engine" / name) for name in TESTS]
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"--rootdir={ROOT}", *tests])
    os._exit(int(code))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--sample", type=int, help="only this many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    mutants = [mutant for name in arguments.files for mutant in mutants_of(ENGINE / name)]
    if arguments.sample and arguments.sample < len(mutants):
        mutants = sorted(random.Random(arguments.seed).sample(mutants, arguments.sample))
    with tempfile.TemporaryDirectory() as directory:
        runtime = Path(directory) / "runtime"
        shutil.copytree(ROOT / "runtime", runtime, ignore=shutil.ignore_patterns("__pycache__"))
        started = time.monotonic()
        if not survives(None, runtime):
            print("the tests fail without any change")
            return 2
        limit_s = 3 * (time.monotonic() - started)
        alive: dict[str, list[Mutant]] = {name: [] for name in arguments.files}
        total = dict.fromkeys(arguments.files, 0)
        for number, mutant in enumerate(mutants, 1):
            total[mutant.file] += 1
            if survives(mutant, runtime, limit_s):
                alive[mutant.file].append(mutant)
                print(f"survives  {mutant.file}:{mutant.line}  {mutant.change}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{number} of {len(mutants)}", end="", file=sys.stderr, flush=True)
    print(f"{'file':18} {'mutants':>8} {'killed':>7}")
    for name in arguments.files:
        print(f"{name:18} {total[name]:>8} {total[name] - len(alive[name]):>7}")
    num_alive = sum(map(len, alive.values()))
    share = 1 - num_alive / len(mutants)
    print(f"{'all':18} {len(mutants):>8} {len(mutants) - num_alive:>7}  {share:.1%}")
    return 0 if share >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
