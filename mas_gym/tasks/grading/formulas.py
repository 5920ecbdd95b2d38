r"""Formulas over given numbers, as in the game of 24: parsed from a message and compared exactly.

A formula is correct if it uses each number of the reference formula exactly once and has the same value. Values are
rational numbers, so ``8 / (3 - 8 / 3)`` is 24. Parsing takes time linear in the text. A formula is evaluated only if
its numbers are those of the reference.

>>> read_formula(r"(7 + 1 - 2) \times 4 = 6 * 4 = 24")
'(7+1-2)*4'
>>> compare_formulas("4*(1+7-2)", "(7+1-2)*4"), compare_formulas("4*(1+7-2)", "4*6")
('equal', 'other numbers')
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

_SIGNS = str.maketrans("\u00d7\u22c5\u00b7\u2217\u00f7\u2212\u2013[]", "****/--()")
_WORDS = re.compile(
    r"\\(?:times|cdot|div|left|right|[dt]?frac)(?![a-zA-Z])|\\[(),;! ]|\\\[|\\\]|[$`]|\*\*|\}\s*\{|[{}]"
)
_MEANING = {r"\times": "*", r"\cdot": "*", r"\div": "/", "{": "(", "}": ")"}
_FORMULA = re.compile(r"[\d\s.()*/+-]+", re.ASCII)
_NODES = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def read_formula(text: str) -> str | None:
    """Read a formula without its spaces, or the first side of an equation with an operator; None if there is none."""
    plain = _WORDS.sub(_plain, text.translate(_SIGNS)).strip().rstrip(".,;:!")
    for side in plain.split("="):
        formula = "".join(side.split())
        if _FORMULA.fullmatch(side) and isinstance(_parsed(formula), ast.BinOp | ast.UnaryOp):
            return formula
    return None


def formula_value(formula: str) -> Fraction | None:
    """Return the value of a formula; None if the text is not one or divides by zero."""
    try:
        return _value(_parsed(formula))
    except (ZeroDivisionError, RecursionError):
        return None


def compare_formulas(reference: str, formula: str) -> str:
    """Return ``"equal"``, ``"different"`` if the values differ, or ``"other numbers"`` if the numbers differ."""
    if _numbers(reference) != _numbers(formula):
        return "other numbers"
    value = formula_value(formula)
    return "equal" if value is not None and value == formula_value(reference) else "different"


def _plain(found: re.Match[str]) -> str:
    if found[0][0] == "}" and found[0][-1] == "{":
        return ")/("
    return _MEANING.get(found[0], "")


def _parsed(formula: str) -> ast.expr | None:
    """Return the syntax tree of a formula, which is never compiled; None if it is not one."""
    try:
        tree = ast.parse(formula, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return tree if all(isinstance(node, _NODES) for node in ast.walk(tree)) else None


def _numbers(formula: str) -> list[Fraction]:
    return sorted(map(Fraction, _NUMBER.findall(formula)))


def _value(tree: ast.expr | None) -> Fraction:
    match tree:
        case ast.Constant(int() | float() as value):
            return Fraction(str(value))
        case ast.UnaryOp(sign, inner):
            return -_value(inner) if isinstance(sign, ast.USub) else _value(inner)
        case ast.BinOp(left, operation, right):
            return _OPERATORS[type(operation)](_value(left), _value(right))
    raise ZeroDivisionError
