"""Tests that compare returned values, split so that the values are computed beside the code and compared elsewhere.

``assert f(2) == 4`` becomes the expression ``f(2)``, which the sandboxed process evaluates, and a comparison with 4,
which this process makes. The code never has the expected value, so it passes only if it computes it.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

Value = Callable[[list[Any]], Any]
"""Computes something from the values of the cases."""

_COMPARISONS: dict[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_SETUP = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef)


class Step(NamedTuple):
    """One statement of the tests.

    Attributes:
        cases: What the sandboxed process runs: the statement itself, or the expressions that an assertion compares.
        holds: Whether an assertion holds for the values of its expressions; None if the statement itself runs.
    """

    cases: list[str]
    holds: Value | None = None


def steps_of(tests: str) -> list[Step]:
    """Split tests into their statements; empty if none of them tests anything.

    Raises:
        SyntaxError: The tests are not Python; `ValueError`, `MemoryError` or `RecursionError` if they cannot be parsed.
    """
    statements = _without_check(ast.parse(tests).body)
    if all(isinstance(statement, _SETUP) for statement in statements):
        return []
    return [_step(statement) for statement in statements]


def _step(statement: ast.stmt) -> Step:
    if isinstance(statement, ast.Assert):
        cases: list[str] = []
        holds = _truth(statement.test, cases)
        if holds is not None and cases:
            return Step(cases, lambda values: bool(holds(values)))
    return Step([ast.unparse(statement)])


def _without_check(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Replace HumanEval's ``def check(candidate): ...`` and ``check(f)`` by the assertions about ``f``."""
    functions = {s.name: s for s in statements if isinstance(s, ast.FunctionDef) and len(s.args.args) == 1}
    flat: list[ast.stmt] = []
    inlined: list[ast.stmt] = []
    for statement in statements:
        match statement:
            case ast.Expr(ast.Call(ast.Name(name), [ast.Name(code)], [])) if name in functions:
                rename = _Rename(functions[name].args.args[0].arg, code)
                flat += [rename.visit(deepcopy(inner)) for inner in functions[name].body]
                inlined.append(functions[name])
            case ast.Expr(ast.Constant()) | ast.Pass():
                pass
            case _:
                flat.append(statement)
    return [statement for statement in flat if statement not in inlined]


class _Rename(ast.NodeTransformer):
    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name(self.new, node.ctx), node) if node.id == self.old else node


def _truth(node: ast.expr, cases: list[str]) -> Value | None:
    """Return how to compute a condition from the values of the cases that it adds; None if it compares two objects."""
    match node:
        case ast.UnaryOp(ast.Not(), inner):
            negated = _truth(inner, cases)
            return None if negated is None else lambda values: not negated(values)
        case ast.BoolOp(op, parts):
            found = [truth for part in parts if (truth := _truth(part, cases)) is not None]
            combined = all if isinstance(op, ast.And) else any
            return (lambda values: combined(truth(values) for truth in found)) if len(found) == len(parts) else None
        case ast.Compare(left, [op], [right]):
            if isinstance(op, ast.In | ast.NotIn) and _constant(right) is None:
                return _leaf(f"not not ({ast.unparse(node)})", cases)
            if _constant(left) is None and _constant(right) is None:
                return None
            a, b, compare = _value(left, cases), _value(right, cases), _COMPARISONS[type(op)]
            return lambda values: compare(a(values), b(values))
        case ast.Call(args=[first, second]) if _is_close(node) and (_constant(first) or _constant(second)):
            return _value(node, cases)
    return _leaf(f"not not ({ast.unparse(node)})", cases)


def _value(node: ast.expr, cases: list[str]) -> Value:
    constant = _constant(node)
    if constant is not None:
        return lambda values: constant[0]
    match node:
        # an object of the code could take part in these, and decide the comparison without the right value
        case ast.BinOp(left, ast.Sub(), right):
            a, b = _value(left, cases), _value(right, cases)
            return lambda values: a(values) - b(values)
        case ast.Call(ast.Name("abs"), [inner], []):
            size = _value(inner, cases)
            return lambda values: abs(size(values))
        case ast.Call(_, arguments, keywords) if _is_close(node):
            parts = [_value(argument, cases) for argument in arguments]
            named = {keyword.arg or "": _value(keyword.value, cases) for keyword in keywords}
            return lambda values: math.isclose(
                *(part(values) for part in parts), **{name: part(values) for name, part in named.items()}
            )
    return _leaf(ast.unparse(node), cases)


def _is_close(node: ast.Call) -> bool:
    return ast.unparse(node.func) in ("isclose", "math.isclose")


def _leaf(text: str, cases: list[str]) -> Value:
    place = len(cases)
    cases.append(text)
    return lambda values: values[place]


def _constant(node: ast.expr) -> list[Any] | None:
    try:
        return [ast.literal_eval(node)]
    except (ValueError, TypeError, SyntaxError):
        return None
