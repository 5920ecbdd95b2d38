r"""The canonical form of mathematical answers, and tests for equality.

`normalise_expression` removes only parts that do not change the meaning: spacing, ``\left``,
``\dfrac``, ``\mbox``, units, degree signs and delimiters. Thus ``2\sqrt5`` becomes
``2\sqrt{5}``, and ``\text{Evelyn}`` remains a word.

Numbers are compared by value, option labels by letter, words as words, lists and
sets regardless of order, and tuples, intervals and matrices cell by cell. All other answers
are compared by a symbolic engine in a separate process (`mas_gym.tasks.grading.symbolic`).

The tolerance is the paper's ``1e-3`` (App. "Answer extraction and
normalization"), as an absolute difference. In strict mode it is also relative for
answers below one; otherwise any small number would equal ``0.0000672``. The tolerance
applies only to rounding: two answers without a decimal point, such as ``2/1005`` and
``2/1006``, must be exactly equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from mas_gym.tasks.base import GradingMode, Kind
from mas_gym.tasks.grading import paper_rules
from mas_gym.tasks.grading.numbers import (
    DEGREES,
    MAX_CHARS,
    PERCENT,
    close,
    format_number,
    in_digits,
    is_rounded,
    parse_number,
    plain_ascii,
    same_number,
)

# ---------------------------------------------------------- canonical form

# Every pattern here is linear in the text, even when searching: repeats that could backtrack are possessive, and
# a run of spaces is only matched from its beginning.
_LEAD = r"(?:(?<!\s)\s++)?+"
# A formula ends at the next delimiter of its kind, so an unclosed one costs nothing.
_MATH = re.compile(
    r"(?<!\\)\$\$(?P<a>(?:[^$\\]|\\.|\$(?!\$))++)\$\$"
    r"|(?<!\\)\$(?P<b>(?:[^$\\]|\\.)++)\$"
    r"|(?<!\\)\\\((?P<c>(?:[^\\]|\\[^()])++)\\\)"
    r"|(?<!\\)\\\[(?P<d>(?:[^\\]|\\[^\[\]])++)\\\]",
    re.DOTALL,
)
_BETWEEN = re.compile(r"[\s.,;:*_`'\"]*(?:(?:and|or)\b[\s.,;:*_]*)?", re.IGNORECASE)
_STATED = re.compile(r".*\b(?:is|are|equals|be|get|gives|yields|becomes)\b[\s:]+(?=\S)", re.IGNORECASE | re.DOTALL)
_SENTENCE_END = re.compile(r"[.?!](?=\s+[A-Z(])|[.?]\s*$|\n")
_QUOTES = re.compile(
    r"^[\s\"'“”`*_]+|(?<![\s\"“”`_])[\s\"“”`_]++$|(?<![\w)}*])\*{1,2}(?=\S)|(?<=\S)\*{1,2}(?![\w({\\*.-])"
)

_WRAPPER = re.compile(
    r"\\(?:mbox|textbf|textit|textrm|textsf|textnormal|mathrm|mathbf|mathsf|mathit|operatorname)(?=\s?\{)"
)
_SMALL_FRAC = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SIZE = re.compile(r"\\(?:[bB]igg?[lrm]?|limits|nolimits|middle|phantom\{[^{}]*\}|hspace\{[^{}]*\})(?![A-Za-z])")
_CURRENCY = re.compile(r"\\\$|^\s*[$€£¥₹]\s?(?=[-+.\d])|(?<=[-+])[$€£¥₹](?=[.\d])")
_TEXT_TAIL = re.compile(_LEAD + r"\\text\s?\{[^{}]*+\}\s?(?:\^\s?\{?\s?\d\s?\}?)?+[\s.]*+$")
# Words after a number, a bracket or the i of "5i", "2\pi" and "2pi"; allowing the i of any word would be quadratic.
_WORD_TAIL = re.compile(
    r"(?:(?<=[\d})\]])|(?<=(?<![A-Za-z])i)|(?<=\\[px]i)|(?<=\\[pc]hi)|(?<=\\psi)|(?<=\dpi))\s++"
    r"[A-Za-z][A-Za-z.'-]++(?:[\s/]++[A-Za-z][A-Za-z.'-]++)*+[\s/]*+(?:\^\s?\{?\s?\d\s?\}?)?+[\s.]*+$"
)
_ATTACHED_UNIT = re.compile(
    r"(?<=\d)\s?(?:cm|mm|km|kg|mg|ml|mL|mph|km/h|m/s|ft|lbs?|oz|hrs?|mins?|sec)\b(?:\s?\^\s?\{?\d\}?)?\.?$"
)
_JOINED = re.compile(_LEAD + r"\\text\s?\{\s*+(?:,\s*+)?(?:and|or)\s*+\}\s*+|,?\s(?:and|or)\s")
_FRAC_TOP = re.compile(r"\\frac\s*([0-9a-zA-Z])")
_FRAC_BOTTOM = re.compile(r"(\\frac\{(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+\})\s*+([0-9a-zA-Z])")
_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])(?![a-zA-Z])")
_ROOT_CALL = re.compile(r"(?<![\\a-zA-Z])sqrt\s?\(([^()]*)\)|\\sqrt\s?\(([^()]*)\)")
_NAMES = re.compile(r"(?<![\\a-zA-Z])(pi|infinity|inf|infty)(?![a-zA-Z])")
_MEMBER = re.compile(r"^\s*([A-Za-z])\s+in\s+(?=[\[({\\])")
_SYNONYMS = (("\\le ", "\\leq "), ("\\ge ", "\\geq "), ("\\cdotp", "\\cdot"), ("\\ast", "\\cdot"))
_SCRIPT = re.compile(r"([\^_])\{([0-9a-zA-Z])\}")
_PLAIN_SPACE = re.compile(
    r"(?<![A-Za-z\d\s])\s++|(?<!\s)\s++(?![A-Za-z\d])|(?<=[A-Za-z])\s++(?=\d)|(?<=\d)\s++(?=[A-Za-z])"
)
_WORDLIKE = re.compile(r"(?:\\text\s?\{[^{}]*\}|[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*)[.!']{0,3}")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?\s*+(?:\\text\s?\{\s*+)?(?:[ap]\.?\s?m\.?\s*+)?\}?", re.IGNORECASE)
_LETTER = re.compile(r"(?:\\text\s?\{\s*+)?\(?\s*+([A-Za-z])\s*+(?:\)\s*+)?\}?")
_LETTERS = re.compile(r"[^\w:+/-]+|_")
_DELIMITERS = re.compile(r"(?<!\\)\$|\\[()]|\\\[|\\\](?!\])")
_PRICE = re.compile(r"[\d.,]+\s+[a-z]{2,}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[^{}]*+\}")
_PLAIN_WORD = re.compile(
    r"(?<![A-Za-z])(?!(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|exp|max|min|gcd|lcm|mod|inf|base)[A-Za-z]{3,}"
)
# "7.5 cups of flour for 2 cakes": a value and words that describe it; in "3 out of 5" the words are part of the value.
_VALUE_IN_PROSE = re.compile(
    r"(?:(?:approximately|about|exactly|still|also|only|just)\s++)*+"
    r"(?P<value>[-+]?[$€£]?\d[\d,]*+(?:\.\d++)?+(?:/\d++)?+%?),?\s++"
    r"(?!(?:to|out|in|over|plus|minus|times|remainder|through|mod|and|or|by|per|with|base)\b)"
    r"(?:[A-Za-z'-]++\s++){0,3}?(?:for|of|on|as|that|which|such|from|in|if|when|after|before|to)\s.++"
)


def is_words(text: str) -> bool:
    r"""Whether a normalized answer is words rather than mathematics: ``\text{Evelyn}``, ``even``."""
    return _WORDLIKE.fullmatch(text) is not None


def is_prose(text: str) -> bool:
    """Whether a normalized answer has numbers among words, as in ``36sides of the``; such text is never an answer."""
    plain_text = _COMMAND.sub(" ", _ENVIRONMENT.sub(" ", text))
    return any(sign.isdigit() for sign in plain_text) and _PLAIN_WORD.search(plain_text) is not None


def words_key(text: str) -> str:
    r"""Reduce an answer in words to its comparison form: ``East.`` to ``east``, ``3:30 p.m.`` to ``3:30pm``."""
    inner = text.replace("\\text", " ").strip()
    return _LETTERS.sub("", inner.replace("{", " ").replace("}", " ")).casefold()


@lru_cache(maxsize=8192)
def normalise_expression(text: str) -> str:
    r"""Return the canonical form of a mathematical answer; empty if it is longer than `MAX_CHARS`.

    >>> for answer in (r"$\left( \dfrac34 , 2\sqrt5 \right)$.", r"864 \mbox{ inches}^2", "$1,000.50"):
    ...     print(normalise_expression(answer))
    (\frac{3}{4},2\sqrt{5})
    864
    1000.5
    """
    if len(text) > MAX_CHARS:
        return ""
    text = _WRAPPER.sub(r"\\text", _QUOTES.sub("", " ".join(in_digits(plain_ascii(text)).split())).rstrip(" .,;:"))
    text = _SIZE.sub("", _SMALL_FRAC.sub(r"\\frac", _JOINED.sub(",", text)))
    text = _CURRENCY.sub("", PERCENT.sub("", DEGREES.sub("", text)))
    text = _DELIMITERS.sub("", text).strip().rstrip(".,;:")
    if _CLOCK.fullmatch(text) is not None:
        return words_key(text)
    text = _without_frame(text)
    letter = _LETTER.fullmatch(text)
    if letter is not None:
        return letter[1]
    text = _without_units(text)
    number = parse_number(text)
    if number is not None:
        return format_number(number)
    if is_words(text):
        return words_key(text)
    text = _MEMBER.sub(r"\1\\in ", text)
    text = _ROOT_CALL.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
    text = _NAMES.sub(lambda m: r"\pi" if m[1] == "pi" else r"\infty", text)
    text = _ROOT.sub(r"\\sqrt{\1}", _FRAC_BOTTOM.sub(r"\1{\2}", _FRAC_TOP.sub(r"\\frac{\1}", text)))
    for old, new in _SYNONYMS:
        text = text.replace(old, new)
    text = text.replace("**", "^").replace(r"+\infty", r"\infty")
    return _SCRIPT.sub(r"\1\2", _PLAIN_SPACE.sub("", text))


def _without_frame(text: str) -> str:
    """Drop brackets around a whole answer, unless a comma makes it a tuple, an interval or a set."""
    while len(text) > 2 and text[0] in "([" and text[-1] in ")]":
        depth = 0
        for place, sign in enumerate(text):
            depth += (sign in "([{") - (sign in ")]}")
            if (depth == 1 and sign == ",") or (depth == 0 and place < len(text) - 1):
                return text
        text = text[1:-1].strip()
    return text


def _without_units(text: str) -> str:
    for tail in (_TEXT_TAIL, _WORD_TAIL, _ATTACHED_UNIT):
        shorter = tail.sub("", text)
        # a unit follows a value; words without a value, and words after an operator, are the answer itself
        if shorter != text and shorter.strip() and shorter.rstrip()[-1] not in "+-*/=^_<>,&":
            text = shorter.strip()
    return text


def read_expression(span: str) -> str | None:
    r"""Read the mathematical answer that a statement gives, in canonical form.

    Formulas between delimiters take precedence over the words around them. Formulas
    joined only by commas, "and" or "or" form one list. A chain ``a = b = c`` gives
    ``c``, and a computation ``2 + 3 = 5`` gives its result, but an equation such as
    ``y = 2x + 3`` is kept.
    """
    if len(span) > MAX_CHARS:
        return None
    text = in_digits(plain_ascii(span)).strip()
    found = list(_MATH.finditer(text))
    formulas = [next(part for part in m.groups() if part is not None) for m in found]
    if formulas and not (len(formulas) == 1 and _is_price(text, found[0])):
        gaps = [text[a.end() : b.start()] for a, b in pairwise(found)]
        joined = all(_BETWEEN.fullmatch(gap) for gap in gaps)
        text = ",".join(formulas) if joined else formulas[-1]
    else:
        end = _SENTENCE_END.search(text)
        text = text[: end.start()] if end is not None else text
        stated = _STATED.match(text)
        # "the answer is 5!" is an exclamation, a bare "5!" a factorial
        text = text[stated.end() :].rstrip("!") if stated is not None else text
    answer = normalise_expression(_result(text))
    if not formulas and is_prose(answer):
        value = _VALUE_IN_PROSE.fullmatch(text.strip())
        answer = answer if value is None else normalise_expression(value["value"])
    return answer or None


def _is_price(text: str, match: re.Match[str]) -> bool:
    """Whether two dollar signs mark two prices rather than enclose a formula."""
    return match["b"] is not None and _PRICE.match(match["b"]) is not None


_EQUALITY = re.compile(r"(?<![<>!:\\])=(?!=)")
_HAS_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")


def _result(text: str) -> str:
    parts = _EQUALITY.split(text)
    if len(parts) > 2 and "," not in text:
        return parts[-1]
    if len(parts) == 2 and not _HAS_VARIABLE.search(_COMMAND.sub(" ", parts[0])):
        return parts[1]
    return text


# -------------------------------------------------------------- comparison

Verdict = Literal["equal", "different", "timed out", "too complex"]
_DEEPEST = 4
_MOST_PARTS = 24


def answers_equal(reference: str, answer: str, kind: Kind = "number", mode: GradingMode = "strict") -> bool:
    r"""Whether two answers are equal.

    Args:
        reference: The right answer, as a problem gives it.
        answer: The answer to grade, as returned by `extract_answer` or as written by a person.
        kind: How to compare: by value, by mathematical meaning or by label.
        mode: ``"strict"``, or ``"paper"`` for the literal rule of the appendix.

    Raises:
        MissingDependencyError: The comparison needs the symbolic engine, which is not installed.

    >>> answers_equal("1000", "$1,000.0"), answers_equal("0.5", r"\frac12"), answers_equal("A", "b", "choice")
    (True, True, False)
    """
    return compare_expressions(reference, answer, kind, mode) == "equal"


def compare_expressions(reference: str, answer: str, kind: Kind, mode: GradingMode = "strict") -> Verdict:
    """Compare two answers; return ``"equal"`` or the reason why they are not equal. See `answers_equal`."""
    if mode == "paper":
        return "equal" if paper_rules.same(reference, answer, kind) else "different"
    if reference == answer:
        return "equal"
    if kind == "choice":
        return "equal" if reference.strip().casefold() == answer.strip().casefold() else "different"
    if kind == "number":
        return "equal" if same_number(reference, answer) else "different"
    given_form = normalise_expression(answer)
    return _compare(normalise_expression(reference), given_form, 0, is_rounded(reference, given_form), [])


_BASED = re.compile(r"\d+_(?:\{?\d+\}?)")
_WORD = re.compile(r"[^\W\d_]{2,}")
_NAMED = re.compile(r"(?P<name>[A-Za-z](?:_(?:\{\w+\}|\w))?'?|[A-Za-z]\([A-Za-z]\))(?P<link>=|\\in)(?P<value>[^=]+)")
_MATRIX = re.compile(r"\\begin\{([pbBv]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_RELATION = re.compile(r"\\(?:leq|geq|lt|gt|neq)|[<>]")
_PLUS_MINUS = re.compile(r"\\pm|\\mp")


def _compare(right: str, given: str, depth: int, rounded: bool, spent: list[float]) -> Verdict:
    """Compare two normalized expressions.

    Args:
        right: The reference.
        given: The answer.
        depth: Nesting depth of the two expressions.
        rounded: Whether one of them may be a rounded decimal.
        spent: CPU seconds of the symbolic comparisons so far; extended in place.
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
    """Remove a leading ``x =`` or ``x in`` that one expression or both have; None if there is nothing to remove."""
    a, b = _NAMED.fullmatch(right), _NAMED.fullmatch(given)
    if a is not None and b is not None:
        return (a["value"], b["value"]) if a["name"] == b["name"] else None
    if a is not None and "=" not in given:
        return a["value"], given
    if b is not None and "=" not in right:
        return right, b["value"]
    return None


def _parts(text: str) -> tuple[str, list[str]] | None:
    """Split a matrix, a union or another compound expression into its shape and cells; None for any other."""
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
    return _all(_compare(a, b, depth, is_rounded(a, b), spent) for a, b in zip(right, given, strict=True))


def _same_set(right: Sequence[str], given: Sequence[str], depth: int, spent: list[float]) -> Verdict:
    left = list(given)
    for cell in right:
        verdicts = [_compare(cell, other, depth, is_rounded(cell, other), spent) for other in left]
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
    from mas_gym.tasks.grading.symbolic import CPU_SECONDS, equal_by_meaning

    if sum(spent) >= CPU_SECONDS:
        return "timed out"
    judgement = equal_by_meaning(right, given)
    spent.append(judgement.seconds)
    return judgement.verdict
