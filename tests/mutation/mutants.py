"""Every small change of a module that its tests must notice, made on the syntax tree.

What is left alone decides nothing: annotations, decorators, docstrings, the words of a message (what a message
computes is changed like everything else).
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Final

_BOUNDARY: Final = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE: Final = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ONE_SIDE: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Eq: (ast.LtE, ast.GtE),
    ast.NotEq: (ast.Lt, ast.Gt),
}
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_CALLED: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_METHODS: Final = {"partition": "rpartition", "rpartition": "partition"}
_SAYS: Final = {"InvalidEntryError": 0, "Finding": 1}  # call -> the argument that is a sentence for people
_UNREAD: Final = frozenset({"annotation", "returns", "decorator_list", "ctx"})
_WHOLE: Final = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Return, ast.If, ast.For)

Change = tuple[ast.AST, ast.AST]  # a node, and what takes its place


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    module: str  # "policies.ledger.state"
    place: str  # the function or class
    line: int
    before: str
    after: str
    nth: int  # of those with the same text in the same place
    node: int  # its number in ``ast.walk`` of the module
    put: ast.AST

    @property
    def name(self) -> str:
        """The same as long as the code is, wherever it moves in the file."""
        again = f" #{self.nth + 1}" if self.nth else ""
        return f"{self.module.rpartition('.')[2]} {self.place}: {self.before} -> {self.after}{again}"

    @property
    def short(self) -> str:
        """The name for a narrow table: of a long expression only what differs."""
        before, after, near = self.before, self.after, 30
        if max(len(before), len(after)) > 3 * near:
            same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
            start = max(0, same - near)
            before, after = (f"{'...' if start else ''}{t[start : same + near]}" for t in (before, after))
        return f"{self.module.rpartition('.')[2]}:{self.line} {self.place}: {before} -> {after}"

    def code(self, source: str, path: Path) -> CodeType:
        """The changed module, compiled."""
        tree = ast.parse(source)
        target = list(ast.walk(tree))[self.node]
        for parent in ast.walk(tree):
            for key, value in ast.iter_fields(parent):
                if value is target:
                    setattr(parent, key, self.put)
                elif isinstance(value, list):
                    value[:] = [self.put if item is target else item for item in value]
        return compile(ast.fix_missing_locations(tree), str(path), "exec")


def _with(node: ast.AST, **changed: object) -> ast.AST:
    made = copy.copy(node)
    for key, value in changed.items():
        setattr(made, key, value)
    return made


def _less(items: Sequence[ast.AST]) -> Iterator[list[ast.AST]]:
    """The items without one of them."""
    for i in range(len(items)):
        yield [*items[:i], *items[i + 1 :]]


def _compared(node: ast.Compare) -> Iterator[ast.AST]:
    for i, op in enumerate(node.ops):
        kinds: list[type[ast.cmpop]] = [_OPPOSITE[type(op)], *_ONE_SIDE.get(type(op), ())]
        if type(op) in _BOUNDARY:
            kinds.append(_BOUNDARY[type(op)])
        for kind in kinds:
            yield _with(node, ops=[*node.ops[:i], kind(), *node.ops[i + 1 :]])
    if len(node.ops) > 1:  # a <= b <= c without an end
        yield _with(node, ops=node.ops[:-1], comparators=node.comparators[:-1])
        yield _with(node, left=node.comparators[0], ops=node.ops[1:], comparators=node.comparators[1:])
    left, right = node.left, node.comparators[0]
    if isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple) and len(left.elts) == len(right.elts):
        for these, those in zip(_less(left.elts), _less(right.elts), strict=True):
            yield _with(node, left=_with(left, elts=these), comparators=[_with(right, elts=those)])


def _constant(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if value is True or value is False:
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value + 1)
        yield ast.Constant(value - 1)
    elif isinstance(value, str):
        yield ast.Constant(f"{value}~")
        if value:
            yield ast.Constant("")


def _computed(node: ast.AST) -> Iterator[ast.AST]:
    """Other values of an expression that computes."""
    match node:
        case ast.BoolOp():
            yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
            for rest in _less(node.values):
                yield rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BinOp():
            if type(node.op) in _ARITHMETIC:
                yield _with(node, op=_ARITHMETIC[type(node.op)]())
            yield node.left
            yield node.right
        case ast.IfExp():
            yield node.body
            yield node.orelse
        case ast.Call(func=ast.Name(id=called)) if called in _CALLED:
            yield from _called(node, called)
        case ast.Attribute(attr=attr) if attr in _METHODS:
            yield _with(node, attr=_METHODS[attr])


def _called(node: ast.Call, called: str) -> Iterator[ast.AST]:
    """The other of two functions, and one argument less of many."""
    yield _with(node, func=ast.Name(_CALLED[called], ast.Load()))
    if len(node.args) > 1:
        for rest in _less(node.args):
            yield _with(node, args=rest) if len(rest) > 1 else rest[0]


def _collected(node: ast.AST) -> Iterator[ast.AST]:
    """Collections without one element, loops without their condition."""
    match node:
        case ast.List() | ast.Set() if len(node.elts) > 1:
            for rest in _less(node.elts):
                yield _with(node, elts=rest)
        case ast.Tuple(ctx=ast.Load()) if all(isinstance(e, ast.Constant) for e in node.elts):
            for rest in _less(node.elts):
                yield _with(node, elts=rest)
        case ast.Dict():
            for keys, values in zip(_less(node.keys), _less(node.values), strict=True):  # type: ignore[arg-type]
                yield _with(node, keys=keys, values=values)
        case ast.comprehension(ifs=[_, *_]):
            for rest in _less(node.ifs):
                yield _with(node, ifs=rest)


def _stated(node: ast.AST) -> Iterator[ast.AST]:
    """Statements left out, conditions decided beforehand, values not returned."""
    match node:
        case ast.If():
            for always in (True, False):
                yield _with(node, test=ast.Constant(always))
        case ast.AugAssign() if type(node.op) in _ARITHMETIC:
            yield _with(node, op=_ARITHMETIC[type(node.op)]())
            yield ast.Assign([node.target], node.value)
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, _WHOLE) and not docstring and not (isinstance(node, ast.If) and not node.orelse):
        yield ast.Pass()


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        yield from _compared(node)
    elif isinstance(node, ast.Constant):
        yield from _constant(node)
    else:
        yield from _computed(node)
        yield from _collected(node)
        yield from _stated(node)


def _read(node: ast.AST) -> Iterator[ast.AST]:
    """The children whose change could change a decision."""
    for key, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        if key in _UNREAD:
            continue
        for i, child in enumerate(children):
            text = isinstance(child, ast.Constant) and isinstance(child.value, str)
            words = isinstance(node, ast.JoinedStr | ast.Expr) or (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and key == "args"
                and _SAYS.get(node.func.id) == i
            )
            if isinstance(child, ast.AST) and not (text and words) and key != "format_spec":
                yield child


def _sites(node: ast.AST, place: tuple[str, ...], inside: bool) -> Iterator[tuple[ast.AST, tuple[str, ...], bool]]:
    yield node, place, inside
    for child in _read(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _sites(child, (*place, child.name), inside or isinstance(child, ast.FunctionDef))
        else:
            yield from _sites(child, place, inside)


def _said(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))
    if isinstance(node, ast.If | ast.For):
        text = text.splitlines()[0]
    return " ".join(text.split())


def mutants(module: str, source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    numbers = {id(node): i for i, node in enumerate(ast.walk(tree))}
    made: list[Mutant] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for node, names, inside in _sites(tree, (), False):
        if isinstance(node, ast.stmt) and not inside:
            continue  # a definition left out is an error at import
        for put in _changed(node):
            place, before, after = ".".join(names) or "module", _said(node), _said(put)
            if before == after:
                continue
            nth = seen[place, before, after]
            line = (node.target if isinstance(node, ast.comprehension) else node).lineno  # type: ignore[attr-defined]
            seen[place, before, after] += 1
            made.append(Mutant(module, place, line, before, after, nth, numbers[id(node)], put))
    return sorted(made, key=lambda m: m.line)
