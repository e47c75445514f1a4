"""Every small change of a Python file: a comparison, operator, constant, truth value or branch swapped, a call dropped.

Messages of errors, annotations and decorators are left alone.
"""

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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

    def describe(self) -> str:
        return f"{self.file}:{self.line}  {self.change}"


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
        case ast.Return(value=ast.AST() as value) if not (isinstance(value, ast.Constant) and value.value is None):
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
