r"""The canonical form of mathematical answers, and tests for equality.

`normalize_expression` removes only parts that do not change the meaning: spacing, ``\left``,
``\dfrac``, ``\mbox``, units, degree signs and delimiters. ``\text{Evelyn}`` becomes a word.

Numbers are compared by value, and words as words. All other answers are compared by math-verify in a separate process
(`mas_gym.tasks.grading.symbolic`), which also compares several solutions ("x = 1 or x = 2"), sets and matrices. Each
rule here changes grades of recorded messages.

The tolerance is the paper's ``1e-3`` (App. "Answer extraction and
normalization"), as an absolute difference. In strict mode it is also relative for
answers below one; otherwise any small number would equal ``0.0000672``. The tolerance
applies only to rounding: two answers without a decimal point, such as ``2/1005`` and
``2/1006``, must be exactly equal.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

from mas_gym.tasks.grading.numbers import (
    MAX_CHARS,
    close,
    format_number,
    in_digits,
    is_rounded,
    parse_number,
    plain_ascii,
)
from mas_gym.tasks.grading.symbolic import COMMAND, ENVIRONMENT, SymbolicVerdict, equal_by_meaning

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
_CURRENCY = re.compile(r"\\\$|^\s*[$€£¥₹]\s?(?=[-+.\d])|(?<=[-+])[$€£¥₹](?=[.\d])")
_TEXT_TAIL = re.compile(_LEAD + r"\\text\s?\{[^{}]*+\}\s?(?:\^\s?\{?\s?\d\s?\}?)?+[\s.]*+$")
# Words after a number, a bracket or the i of "5i", "2\pi" and "2pi"; allowing the i of any word would be quadratic.
_WORD_TAIL = re.compile(
    r"(?:(?<=[\d})\]])|(?<=(?<![A-Za-z])i)|(?<=\\[px]i)|(?<=\\[pc]hi)|(?<=\\psi)|(?<=\dpi))\s++"
    r"[A-Za-z][A-Za-z.'-]++(?:[\s/]++[A-Za-z][A-Za-z.'-]++)*+[\s/]*+(?:\^\s?\{?\s?\d\s?\}?)?+[\s.]*+$"
)
_JOINED = re.compile(_LEAD + r"\\text\s?\{\s*+(?:,\s*+)?(?:and|or)\s*+\}\s*+|,?\s(?:and|or)\s")
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?")
_SCRIPT = re.compile(r"([\^_])\{([0-9a-zA-Z])\}")
_PLAIN_SPACE = re.compile(
    r"(?<![A-Za-z\d\s])\s++|(?<!\s)\s++(?![A-Za-z\d])|(?<=[A-Za-z])\s++(?=\d)|(?<=\d)\s++(?=[A-Za-z])"
)
_WORDLIKE = re.compile(r"(?:\\text\s?\{[^{}]*\}|[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*)[.!']{0,3}")
_LETTER = re.compile(r"(?:\\text\s?\{\s*+)?\(?\s*+([A-Za-z])\s*+(?:\)\s*+)?\}?")
_LETTERS = re.compile(r"[^\w:+/-]+|_")
_DELIMITERS = re.compile(r"(?<!\\)\$|\\[()]|\\\[|\\\](?!\])")
_NAME_WITH_NUMBER = re.compile(r"(?:[A-Za-z]=)?[a-z]+\d{1,4}")
_EMPTY = re.compile(r"\\(?:emptyset|varnothing)(?![A-Za-z])|\\\{\s?\\\}")
_HEDGE = re.compile(r"(?<![A-Za-z])(?:maybe|perhaps|possibly)(?![A-Za-z])", re.IGNORECASE)
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


def is_prose(text: str) -> bool:
    """Whether a normalized answer has numbers among words, as in ``36sides of the``; such text is never an answer."""
    if _NAME_WITH_NUMBER.fullmatch(text):
        return False
    plain_text = COMMAND.sub(" ", ENVIRONMENT.sub(" ", text))
    return any(sign.isdigit() for sign in plain_text) and _PLAIN_WORD.search(plain_text) is not None


@lru_cache(maxsize=8192)
def normalize_expression(text: str) -> str:
    r"""Return the canonical form of a mathematical answer; empty if it is longer than `MAX_CHARS`.

    >>> for answer in (r"$\left( \dfrac{3}{4} , 2\sqrt{5} \right)$.", r"864 \mbox{ inches}^2", "x = 1 or x = 2.50"):
    ...     print(normalize_expression(answer))
    (\frac{3}{4},2\sqrt{5})
    864
    x=1,x=2.5
    """
    if len(text) > MAX_CHARS:
        return ""
    text = _WRAPPER.sub(r"\\text", _QUOTES.sub("", " ".join(in_digits(plain_ascii(text)).split())).rstrip(" .,;:"))
    text = _SMALL_FRAC.sub(r"\\frac", _CURRENCY.sub("", text))
    text = _without_frame(_DELIMITERS.sub("", text).strip().rstrip(".,;:"))
    if _EMPTY.fullmatch(text):
        return r"\emptyset"
    # Each solution is read as a whole first, so that "1,000 or 2,000" are two numbers; in brackets, "or" is a comma.
    solutions = (part.replace("\n", ", ") for part in _split(_JOINED.sub("\n", text), "\n"))
    return ",".join(map(_normalized_solution, solutions))


def _normalized_solution(text: str) -> str:
    name, equals, value = text.partition("=")
    named = bool(equals) and _NAME.fullmatch(name.strip()) is not None
    whole = _normalized_value(value.strip() if named else text)
    if whole is not None:
        return f"{name.strip()}={whole}" if named else whole
    return ",".join(_normalized_cell(cell) for cell in _split(text, ","))


def _normalized_value(text: str) -> str | None:
    """Return the canonical form of a letter, a number or words; None for anything else."""
    letter = _LETTER.fullmatch(text)
    if letter is not None:
        return letter[1]
    number = parse_number(_without_units(text))
    if number is not None:
        return format_number(number)
    if _WORDLIKE.fullmatch(text) is None and ":" not in text:
        return None
    # ``East.`` becomes ``east``, and ``3:30 p.m.`` becomes ``3:30pm``.
    return _LETTERS.sub("", text.replace("\\text", " ")).casefold()


def _normalized_cell(text: str) -> str:
    name, equals, value = _result(text.strip()).rpartition("=")
    value = _without_units(_DEGREES.sub("", value.strip()))
    simple = _normalized_value(value) if name or not equals else None
    return name.replace(" ", "") + equals + (simple or _SCRIPT.sub(r"\1\2", _PLAIN_SPACE.sub("", value)))


_EQUALITY = re.compile(r"(?<![<>!:\\])=(?!=)")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_RELATED = re.compile(r"=|\\in(?![a-z])")


def _result(text: str) -> str:
    """Return the end of a chain ``a = b = c``, with its first side if that is a name; keep ``y = 2x + 3``.

    In ``x = y = 2x``, the name only labels the equation ``y = 2x``.
    """
    parts = [part.strip() for part in _EQUALITY.split(text)]
    if len(parts) > 1 and all(parts) and _NAME.fullmatch(parts[0]):
        rest = text.partition("=")[2]
        if parts[0] in _VARIABLE.findall(COMMAND.sub(" ", rest)) and _RELATED.search(rest):
            return rest
        return f"{parts[0]}={parts[-1]}"
    has_variable = _VARIABLE.search(COMMAND.sub(" ", parts[0])) is not None
    return text if len(parts) < 3 and has_variable else parts[-1]


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
    for tail in (_TEXT_TAIL, _WORD_TAIL):
        shorter = tail.sub("", text)
        # a unit follows a value; words without a value, and words after an operator, are the answer itself
        if shorter != text and shorter.strip() and shorter.rstrip()[-1] not in "+-*/=^_<>,&":
            text = shorter.strip()
    return text


_NAME = re.compile(r"[A-Za-z](?:_(?:\{\w+\}|\w))?'?|[A-Za-z]\([A-Za-z]\)|\([A-Za-z](?:,\s?[A-Za-z])+\)")


def read_expression(span: str) -> str | None:
    r"""Read the mathematical answer that a statement gives, in canonical form.

    Formulas between delimiters take precedence over the words around them. Formulas
    joined only by commas, "and" or "or" form one list. A chain ``a = b = c`` gives
    ``c`` (``x = b = c`` gives ``x=c``), and a computation ``2 + 3 = 5`` gives its result, but an equation such as
    ``y = 2x + 3`` is kept. A hedge ("18, maybe 20") is no answer.
    """
    if len(span) > MAX_CHARS or _HEDGE.search(span):
        return None
    text = in_digits(plain_ascii(span)).strip()
    found = list(_MATH.finditer(text))
    formulas = [next(part for part in m.groups() if part is not None) for m in found]
    if formulas:
        gaps = [text[a.end() : b.start()] for a, b in pairwise(found)]
        joined = all(_BETWEEN.fullmatch(gap) for gap in gaps)
        text = ", or ".join(formulas) if joined else formulas[-1]
    else:
        end = _SENTENCE_END.search(text)
        text = text[: end.start()] if end is not None else text
        stated = _STATED.match(text)
        # "the answer is 5!" is an exclamation, a bare "5!" a factorial
        text = text[stated.end() :].rstrip("!") if stated is not None else text
    answer = normalize_expression(text)
    if not formulas and is_prose(answer):
        value = _VALUE_IN_PROSE.fullmatch(text.strip())
        answer = answer if value is None else normalize_expression(value["value"])
    return answer or None


# -------------------------------------------------------------- comparison


def compare_expressions(reference: str, answer: str) -> SymbolicVerdict:
    r"""Compare two answers by meaning; return ``"equal"`` or the reason why they are not equal.

    Args:
        reference: The right answer, as a problem gives it.
        answer: The answer to grade, as returned by `extract_answer` or as written by a person.

    Raises:
        MissingDependencyError: The comparison needs the symbolic engine, which is not installed.

    >>> compare_expressions("1000", "$1,000.0"), compare_expressions("0.5", r"\frac12")
    ('equal', 'equal')
    """
    if reference == answer:
        return "equal"
    right, given = normalize_expression(reference), normalize_expression(answer)
    if right == given:
        return "equal"
    if not right or not given:
        return "different"
    a, b = _NAMED.fullmatch(right), _NAMED.fullmatch(given)
    if a is not None and b is None and "=" not in given:
        right = normalize_expression(a["value"])
    elif b is not None and a is None and "=" not in right:
        given = normalize_expression(b["value"])
    x, y = parse_number(right), parse_number(given)
    if x is not None and y is not None:
        return "equal" if close(x, y, is_rounded(right, given)) else "different"
    if right == given or _is_word(right) or _is_word(given) or len(right) == len(given) == 1:
        return "equal" if right.casefold() == given.casefold() else "different"
    # math-verify ignores the base of a number
    if _BASED.search(right) or _BASED.search(given):
        return "different"
    return equal_by_meaning(right, given)


_NAMED = re.compile(rf"(?:{_NAME.pattern})(?:=|\\in(?![a-z]))(?P<value>[^=]+)")
_BASED = re.compile(r"\d_\{?\d")


def _is_word(text: str) -> bool:
    return (len(text) > 3 and text.isalpha()) or ":" in text


def _split(text: str, separator: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and sign == separator:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]
