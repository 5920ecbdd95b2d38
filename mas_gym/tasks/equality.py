r"""Whether two answers are equal.

Numbers compare by value, option labels by letter, words as words, lists and
sets without order, tuples, intervals and matrices cell by cell. Anything else
goes to a symbolic engine in a separate process (`mas_gym.tasks.symbolic`).

The tolerance is the paper's ``1e-3`` (App. "Answer extraction and
normalization"), read as an absolute difference. In strict mode it is also
relative for answers below one, since otherwise any small number would equal
``0.0000672``. It allows for rounding only: two answers without a decimal point,
such as ``2/1005`` and ``2/1006``, must agree exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal

from mas_gym.tasks.base import GradingMode, Kind
from mas_gym.tasks.expressions import normalise
from mas_gym.tasks.numerals import parse_number

Verdict = Literal["equal", "different", "timed out", "too complex"]

TOLERANCE = Fraction(1, 1000)
_DEEPEST = 4
_MOST_PARTS = 24


def answers_equal(reference: str, answer: str, kind: Kind = "number", mode: GradingMode = "strict") -> bool:
    r"""Whether two answers are equal.

    Args:
        reference: The right answer, as a problem gives it.
        answer: The answer to judge, as `extract_answer` gives it or as a person would write it.
        kind: How to compare: by value, by mathematical meaning or by label.
        mode: ``"strict"``, or ``"paper"`` for the literal rule of the appendix.

    Raises:
        MissingDependencyError: The comparison needs the symbolic engine and it is not installed.

    >>> answers_equal("1000", "$1,000.0"), answers_equal("0.5", r"\frac12"), answers_equal("A", "b", "choice")
    (True, True, False)
    """
    return compare(reference, answer, kind, mode) == "equal"


def compare(reference: str, answer: str, kind: Kind, mode: GradingMode = "strict") -> Verdict:
    """Compare two answers and return the reason if they are not equal; see `answers_equal`."""
    if mode == "paper":
        from mas_gym.tasks.paper import same

        return "equal" if same(reference, answer, kind) else "different"
    if reference == answer:
        return "equal"
    if kind == "choice":
        return "equal" if reference.strip().casefold() == answer.strip().casefold() else "different"
    if kind == "number":
        right, given = parse_number(reference), parse_number(answer)
        near = right is not None and given is not None and close(right, given, _is_rounded(reference, answer))
        return "equal" if near else "different"
    given_form = normalise(answer)
    return _compare(normalise(reference), given_form, 0, _is_rounded(reference, given_form), [])


def _is_rounded(right: str, given: str) -> bool:
    return "." in right or "." in given


def close(reference: Fraction, answer: Fraction, rounded: bool = True) -> bool:
    """Whether two numbers agree: exactly, or within ``1e-3`` (below one, also relative) if one may be rounded."""
    if reference == answer or not rounded:
        return reference == answer
    scale = min(Fraction(1), max(abs(reference), abs(answer)))
    return abs(reference - answer) <= TOLERANCE * scale


_BASED = re.compile(r"\d+_(?:\{?\d+\}?)")
_WORD = re.compile(r"[^\W\d_]{2,}")
_NAMED = re.compile(r"(?P<name>[A-Za-z](?:_(?:\{\w+\}|\w))?'?|[A-Za-z]\([A-Za-z]\))(?P<link>=|\\in)(?P<value>[^=]+)")
_MATRIX = re.compile(r"\\begin\{([pbBv]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_RELATION = re.compile(r"\\(?:leq|geq|lt|gt|neq)|[<>]")
_PLUS_MINUS = re.compile(r"\\pm|\\mp")


def _compare(right: str, given: str, depth: int, rounded: bool, spent: list[float]) -> Verdict:
    """Compare two normalised expressions, of which one may be a rounded decimal.

    ``spent`` collects the CPU seconds of every symbolic question of this comparison.
    """
    if right == given:
        return "equal"
    if not right or not given:
        return "different"
    if depth > _DEEPEST:
        return "too complex"
    right_number, given_number = parse_number(right), parse_number(given)
    if right_number is not None and given_number is not None:
        return "equal" if close(right_number, given_number, rounded) else "different"
    if _is_word(right) or _is_word(given) or _is_letter(right, given):
        return "equal" if right.casefold() == given.casefold() else "different"
    if _BASED.fullmatch(right) or _BASED.fullmatch(given):
        return "different"
    if _RELATION.search(right) or _RELATION.search(given):
        return _ask(right, given, spent)
    named = _without_name(right, given)
    if named is not None:
        return _compare(*named, depth + 1, rounded, spent)
    parts = _parts(right), _parts(given)
    if parts == (None, None):
        return _ask(right, given, spent)
    if parts[0] is None or parts[1] is None or parts[0][0] != parts[1][0] or len(parts[0][1]) != len(parts[1][1]):
        return "different"
    shape, cells = parts[0]
    match = _same_set if shape in ("set", "union") else _same_row
    return match(cells, parts[1][1], depth + 1, spent) if len(cells) <= _MOST_PARTS else "too complex"


def _is_word(text: str) -> bool:
    return (len(text) > 3 and _WORD.fullmatch(text) is not None) or ":" in text


def _is_letter(right: str, given: str) -> bool:
    return len(right) == len(given) == 1 and right.isalpha() and given.isalpha()


def _without_name(right: str, given: str) -> tuple[str, str] | None:
    """Drop ``x =`` and ``x in`` if one side has it or both have the same; None if there is nothing to drop."""
    a, b = _NAMED.fullmatch(right), _NAMED.fullmatch(given)
    if a is not None and b is not None:
        return (a["value"], b["value"]) if a["name"] == b["name"] else None
    if a is not None and "=" not in given:
        return a["value"], given
    if b is not None and "=" not in right:
        return right, b["value"]
    return None


def _parts(text: str) -> tuple[str, list[str]] | None:
    """Split an expression into its shape and cells; None if it is a single expression."""
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        rows = [_split(row, "&") for row in _split(matrix[2], "\\\\") if row]
        return f"matrix {[len(row) for row in rows]}", [cell for row in rows for cell in row]
    union = _split(text, "\\cup")
    if len(union) > 1:
        return "union", union
    if text.startswith("\\{") and text.endswith("\\}"):
        return "set", _spread(_split(text[2:-2], ","))
    if text[0] == "{" and text[-1] == "}" and _closes_at_end(text):
        return "set", _spread(_split(text[1:-1], ","))
    if text[0] in "([" and text[-1] in ")]" and _closes_at_end(text):
        cells = _split(text[1:-1], ",")
        if len(cells) > 1:
            return f"{text[0]}{text[-1]}", cells
        return None
    cells = _spread(_split(text, ","))
    return ("set", cells) if len(cells) > 1 else None


def _spread(cells: Sequence[str]) -> list[str]:
    r"""Expand ``a \pm b`` to its two values."""
    spread = []
    for cell in cells:
        if len(_PLUS_MINUS.findall(cell)) == 1:
            spread += [_PLUS_MINUS.sub("+", cell).removeprefix("+"), _PLUS_MINUS.sub("-", cell)]
        else:
            spread.append(cell)
    return spread


def _closes_at_end(text: str) -> bool:
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator outside all brackets."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        sign = text[place]
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and text.startswith(separator, place):
            parts.append(text[start:place])
            place += len(separator)
            start = place
            continue
        place += 1
    return [*parts, text[start:]]


def _same_row(right: Sequence[str], given: Sequence[str], depth: int, spent: list[float]) -> Verdict:
    return _all(_compare(a, b, depth, _is_rounded(a, b), spent) for a, b in zip(right, given, strict=True))


def _same_set(right: Sequence[str], given: Sequence[str], depth: int, spent: list[float]) -> Verdict:
    left = list(given)
    for cell in right:
        verdicts = [_compare(cell, other, depth, _is_rounded(cell, other), spent) for other in left]
        if "equal" not in verdicts:
            return next((verdict for verdict in verdicts if verdict != "different"), "different")
        del left[verdicts.index("equal")]
    return "equal"


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    worst: Verdict = "equal"
    for verdict in verdicts:
        if verdict == "different":
            return "different"
        worst = verdict if verdict != "equal" else worst
    return worst


def _ask(right: str, given: str, spent: list[float]) -> Verdict:
    from mas_gym.tasks.symbolic import CPU_SECONDS, judge

    if sum(spent) >= CPU_SECONDS:
        return "timed out"
    judgement = judge(right, given)
    spent.append(judgement.seconds)
    return judgement.verdict
