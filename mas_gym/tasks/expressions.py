r"""Mathematical answers as one canonical line of LaTeX.

`normalise` removes what does not change the meaning (spacing, ``\left``,
``\dfrac``, ``\mbox``, units, degree signs, delimiters) and nothing else, so
``2\sqrt5`` stays ``2\sqrt{5}`` and ``\text{Evelyn}`` stays a word. `mas_gym.tasks.equality`
compares two such lines.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

from mas_gym.tasks.numerals import MAX_CHARS, format_number, parse_number, plain

# Every pattern here is linear in the text, also when it searches: repeats that could give back what they took are
# possessive, and a run of spaces is entered only at its beginning.
_LEAD = r"(?:(?<!\s)\s++)?+"
# The content of a formula ends at the next delimiter of its kind, so an opening one without an end costs nothing.
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
_DEGREES = re.compile(r"\^\s?\{?\s?\\(?:circ|degree)\s?\}?|\\(?:degree|deg)\b")
_CURRENCY = re.compile(r"\\\$|^\s*[$€£¥₹]\s?(?=[-+.\d])|(?<=[-+])[$€£¥₹](?=[.\d])")
_PERCENT = re.compile(r"\\?%")
_TEXT_TAIL = re.compile(_LEAD + r"\\text\s?\{[^{}]*+\}\s?(?:\^\s?\{?\s?\d\s?\}?)?+[\s.]*+$")
# Words after a number, a bracket or the letter i of "5i", "2\pi" and "2pi"; after the i of any word would be quadratic.
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
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:\s\d{3})+(?![\d/])", re.ASCII)
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


def is_words(text: str) -> bool:
    r"""Whether a normalised answer is words and no mathematics: ``\text{Evelyn}``, ``even``."""
    return _WORDLIKE.fullmatch(text) is not None


def words_key(text: str) -> str:
    r"""Reduce a word answer to the part that is compared: ``East.`` to ``east``, ``3:30 p.m.`` to ``3:30pm``."""
    inner = text.replace("\\text", " ").strip()
    return _LETTERS.sub("", inner.replace("{", " ").replace("}", " ")).casefold()


@lru_cache(maxsize=8192)
def normalise(text: str) -> str:
    r"""Write a mathematical answer in its canonical form; empty if it is longer than `MAX_CHARS`.

    >>> normalise(r"$\left( \dfrac34 , 2\sqrt5 \right)$."), normalise(r"864 \mbox{ inches}^2"), normalise("$1,000.50")
    ('(\\frac{3}{4},2\\sqrt{5})', '864', '1000.5')
    """
    if len(text) > MAX_CHARS:
        return ""
    text = _WRAPPER.sub(r"\\text", _QUOTES.sub("", " ".join(plain(text).split())).rstrip(" .,;:"))
    text = _SIZE.sub("", _SMALL_FRAC.sub(r"\\frac", _JOINED.sub(",", text)))
    text = _CURRENCY.sub("", _PERCENT.sub("", _DEGREES.sub("", text)))
    text = _DELIMITERS.sub("", text).strip().rstrip(".,;:")
    if _CLOCK.fullmatch(text) is not None:
        return words_key(text)
    text = _without_frame(text)
    letter = _LETTER.fullmatch(text)
    if letter is not None:
        return letter[1]
    text = _without_units(text)
    text = _GROUPED.sub(lambda m: "".join(m[0].split()), text)
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
    """Drop brackets around the whole of an answer, unless a comma makes them a tuple, an interval or a set."""
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
        # a unit follows a value; words alone, and words after an operator, are the answer itself
        if shorter != text and shorter.strip() and shorter.rstrip()[-1] not in "+-*/=^_<>,&":
            text = shorter.strip()
    return text


def read_expression(span: str) -> str | None:
    r"""Read the mathematical answer that a statement gives, in canonical form.

    Formulas between delimiters win over the words around them; several joined
    only by commas, "and" or "or" are one list. A chain ``a = b = c`` gives its
    last link, and a computation ``2 + 3 = 5`` its result, but an equation such as
    ``y = 2x + 3`` stays one.
    """
    if len(span) > MAX_CHARS:
        return None
    text = plain(span).strip()
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
    answer = normalise(_result(text))
    return answer or None


def _is_price(text: str, match: re.Match[str]) -> bool:
    """Whether a pair of dollar signs encloses two prices rather than a formula."""
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
