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

import re
from fractions import Fraction

_SIGNS = str.maketrans("\u00d7\u22c5\u00b7\u2217\u00f7\u2212\u2013[]", "****/--()")
_WORDS = re.compile(
    r"\\(?:times|cdot|div|left|right|[dt]?frac)(?![a-zA-Z])|\\[(),;! ]|\\\[|\\\]|[$`]|\*\*|\}\s*\{|[{}]"
)
_MEANING = {r"\times": "*", r"\cdot": "*", r"\div": "/", "{": "(", "}": ")"}
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[-+*/()])")
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2, "neg": 3}


def read_formula(text: str) -> str | None:
    """Read a formula and remove its spaces; in an equation, use the first side with an operator.

    Args:
        text: One line or the content of a box.

    Returns:
        The formula; None if neither the text nor a side of its equation is a formula.
    """
    plain = _WORDS.sub(_plain, text.translate(_SIGNS)).strip().rstrip(".,;:!")
    for side in plain.split("="):
        tokens = _tokens(side)
        if tokens is not None and len(tokens) > 2 and _postfix(tokens) is not None:
            return "".join(tokens)
    return None


def compare_formulas(reference: str, formula: str) -> str:
    """Return ``"equal"``, ``"different"`` if the values differ, or ``"other numbers"`` if the numbers differ.

    Args:
        reference: A formula.
        formula: The formula that `read_formula` found in a message.
    """
    expected, found = _parsed(reference), _parsed(formula)
    if _numbers(expected) != _numbers(found):
        return "other numbers"
    value = _value(found)
    return "equal" if value is not None and value == _value(expected) else "different"


def _plain(found: re.Match[str]) -> str:
    if found[0][0] == "}" and found[0][-1] == "{":
        return ")/("
    return _MEANING.get(found[0], "")


def _tokens(text: str) -> list[str] | None:
    """Return the numbers, operators and parentheses of a text; None if it contains anything else."""
    tokens = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            return None
        tokens.append(found[1])
        place = found.end()
    return tokens


def _postfix(tokens: list[str]) -> list[str] | None:
    """Return the tokens in postfix order (Dijkstra's shunting-yard algorithm); None if they are not a formula."""
    out: list[str] = []
    waiting: list[str] = []
    operand_next = True
    for token in tokens:
        if token[0].isdigit() or token == "(":
            if not operand_next:
                return None
            operand_next = token == "("
            (waiting if operand_next else out).append(token)
        elif token == ")":
            while waiting and waiting[-1] != "(":
                out.append(waiting.pop())
            if operand_next or not waiting:
                return None
            waiting.pop()
        elif operand_next:
            if token not in "+-":
                return None
            if token == "-":
                waiting.append("neg")
        else:
            while waiting and waiting[-1] != "(" and _RANK[waiting[-1]] >= _RANK[token]:
                out.append(waiting.pop())
            waiting.append(token)
            operand_next = True
    if operand_next or "(" in waiting:
        return None
    return out + waiting[::-1]


def _parsed(formula: str) -> list[str]:
    return _postfix(_tokens(formula) or []) or []


def _numbers(postfix: list[str]) -> list[Fraction]:
    return sorted(Fraction(token) for token in postfix if token[0].isdigit())


def _value(postfix: list[str]) -> Fraction | None:
    """Return the value; None for a division by zero."""
    stack: list[Fraction] = []
    for token in postfix:
        if token[0].isdigit():
            stack.append(Fraction(token))
        elif token == "neg":
            stack.append(-stack.pop())
        else:
            b, a = stack.pop(), stack.pop()
            if token == "/" and not b:
                return None
            stack.append(a + b if token == "+" else a - b if token == "-" else a * b if token == "*" else a / b)
    return stack.pop()
