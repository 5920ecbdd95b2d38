r"""Parses numbers as people and models write them, exactly and in bounded time.

``1,000``, ``$18.50``, ``-3/4``, ``1\frac{4}{5}``, ``6.72e-5`` and similar forms
become a `Fraction`. Nothing is evaluated: ``3 + 4`` and ``9**9`` are not numbers,
and their parts are not answers.

Digits of any script may be in groups of three or in Indian groups (``1,00,000``), separated by commas, points,
apostrophes or spaces of any kind (``1\,000``, ``12 000``). A magnitude is part of the number: "1.5 million" is 1500000
and "7万" is 70000. A message may write a decimal comma where it cannot be a separator of thousands (``2,5``,
``1.234,50``); in ``1,234`` and ``1.234``, the task's setting ``decimal`` decides.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from fractions import Fraction
from functools import lru_cache
from itertools import count
from typing import Literal

Decimal = Literal[".", ","]
"""The sign before the fraction of a number."""

MAX_CHARS = 600  # a longer text is not read as an answer
MAX_DIGITS = 100
MAX_POWER = 300
TAIL = 4096  # the end of a message, which nearly always contains its answer

_MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_SPACES = "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5"}
_VULGAR |= {"⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
_SIGNS = {"\u00d7": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "\u2044": "/", "\u2215": "/"}
_SIGNS |= {"∞": r"\infty ", "π": r"\pi "}
_SIGNS |= {"°": r"^\circ ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "\u222a": r"\cup ", "∩": r"\cap ", "∈": r"\in "}
_SIGNS |= {"≈": "=", "→": "=", "⇒": "=", "θ": r"\theta ", "∅": r"\emptyset ", "‰": " per mille"}
_SIGNS |= {"\u066b": ".", "\u066c": ",", "\u3002": ". ", "\u0964": ". ", "\u3001": ", "}

_TABLE: dict[int, str] = (
    {ord(c): "-" for c in _MINUS} | {ord(c): " " for c in _SPACES} | {ord(c): "" for c in _INVISIBLE}
)
_TABLE |= {ord(c): f" {text}" for c, text in _VULGAR.items()} | {ord(c): text for c, text in _SIGNS.items()}
_TABLE |= {0xFF01 + i: chr(0x21 + i) for i in range(94)}  # full-width forms
_TABLE |= {ord("\uff0d"): "-", ord("\uff04"): "$"}

_DIGIT = re.compile(r"\d")
_LATEX_SPACE = re.compile(r"\\!\s*|(?:\\(?:text|mbox|mathrm|mathord))?\{,\}")
_LATEX_GAP = re.compile(
    r"(?:(?<!\\)\\[,;:> ]|\{\\[,;:> ]\}|~|\\(?:q?quad|(?:thin|med|thick|en)space)\b"
    r"|\\(?:left|right|displaystyle|textstyle)(?![A-Za-z]))\x20*+"
)
_CURRENCY = re.compile(r"(?:\bUS)?\\?[$€£¥₹₩₽]")
_DEGREES = re.compile(r"\^\s?\{?\s?\\(?:circ|degree)\s?\}?|\\(?:degree|deg)\b")
_PERCENT = re.compile(r"\\?%")
_MARKUP = re.compile(r"\\[()\[\]]|`|(?<![\d)])\*\*|\*\*(?![\d(])")

TOLERANCE = Fraction(1, 1000)


def plain_ascii(text: str) -> str:
    """Rewrite typographic symbols, digits, invisible characters and LaTeX spacing as plain ASCII where possible."""
    if not text.isascii():
        text = _DIGIT.sub(lambda m: str(unicodedata.decimal(m[0])), text.translate(_TABLE))
    if "\\" in text or "~" in text or "{,}" in text:
        text = _LATEX_SPACE.sub(lambda m: "," if m[0][-1] == "}" else "", text)
        text = _LATEX_GAP.sub(" ", text)
    return text


_DEC = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_SIGNED = rf"[-+]?\s?(?:{_DEC})"
_FRACTION = rf"\\[dtc]?frac\s?(?:\{{\s?(?P<n>{_SIGNED})\s?\}}|(?P<n1>\d))\s?(?:\{{\s?(?P<d>{_SIGNED})\s?\}}|(?P<d1>\d))"
NUMBER = re.compile(
    rf"""(?P<sign>[-+])?
    (?:
        (?P<whole>\d+)?\s?{_FRACTION}
      | (?:(?P<mixed>\d+)\s(?=\d+/))?(?P<over>{_DEC})\s?/\s?(?P<under>{_DEC})
      | (?P<dec>{_DEC})
        (?: [eE](?P<e>[-+]?\d{{1,3}})(?!\w)
          | \s?(?:\\times|\\cdot|[*xX])\s{{0,2}}10\s?(?:\^|\*\*)\s?\{{?\s?(?P<power>[-+]?\d{{1,3}})\s?\}}?
        )?
    )""",
    re.VERBOSE | re.ASCII,
)
_LOOSE_SIGN = re.compile(r"([-+])\s+(?=[\d.\\])", re.ASCII)

# Text after a number that is only part of an expression and therefore not the answer.
_CONTINUES = re.compile(
    r"""[A-Za-z](?<![mgLlshdcCFJWV])(?![A-Za-z]) | \([\d\\] | :\d | _\s?\{?\d
    | \s*+(?:
        \^ | \*{1,2}\s*[-+]?[\d(\\.] | /\s*[\d(\\] | [x<>]\s*\d | [-+]\s*(?:[\d.(\\]|[b-hj-zB-HJ-Z](?![A-Za-z]))
      | \\(?!text|mbox|mathrm|mathbf|boldsymbol|end\b|\\|,|\s|$)
      | (?:hundred|thousand|million|billion)ths?\b | (?:and\s+)?a\s+(?:half|third|quarter)\b
      | (?:,|;|or\b|and\b|to\b)\s*+(?:[-+]\s*+)?[.\\]?\d
    ) | \s+[xyzni](?![A-Za-z']) | \.\d | [^\S\n]++\d++(?!-?[A-Za-z])""",
    re.VERBOSE | re.ASCII,
)
# Text before such a number.
_PRECEDED = re.compile(
    r"(?:[+*/^]|[\d)}]\s*-|\d:|\\(?:times|cdot|div|sqrt|pm)|(?<!boxed)(?<!text)(?<!textbf)(?<!mathbf)(?<!mathrm)\{)\s*$"
    r"|\d[^\S\n]+$",
    re.ASCII,
)


def continues(text: str, end: int) -> bool:
    """Whether the number that ends at ``end`` is only part of an expression, a list, a range or a time."""
    return end < len(text) and _CONTINUES.match(text, end) is not None


def begins_inside(text: str, start: int) -> bool:
    """Whether the number at ``start`` continues an expression that begins before it, such as the 4 in ``3 + 4``."""
    return start > 0 and _PRECEDED.search(text, max(0, start - 12), start) is not None


def _decimal(text: str) -> Fraction | None:
    digits = text.replace(",", "").replace(" ", "")
    return Fraction(digits) if len(digits) <= MAX_DIGITS else None


def value_of(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of `NUMBER`; None if its denominator is zero or it is too large."""
    dec = match["dec"]
    if dec is not None:
        value = _decimal(dec)
        power = int(match["e"] or match["power"] or 0)
        if value is None or abs(power) > MAX_POWER:
            return None
        value = value * Fraction(10) ** power if power else value
    else:
        top = _decimal(match["n"] or match["n1"] or match["over"])
        bottom = _decimal(match["d"] or match["d1"] or match["under"])
        whole = _decimal(match["whole"] or match["mixed"] or "0")
        if top is None or bottom is None or whole is None or bottom == 0:
            return None
        value = whole + top / bottom
    sign = match["sign"]
    return -value if sign and sign[0] == "-" else value


_SEPARATOR = r"[\x20'\u2018\u2019\u02bc]"
_GROUPS = re.compile(
    rf"(?<![\w,^.])(?<!\d{_SEPARATOR})[1-9]\d{{0,2}}(?P<sep>{_SEPARATOR})\d{{3}}(?:(?P=sep)\d{{3}})*"
    rf"(?![\d/]|{_SEPARATOR}\d|-[A-Za-z])",
    re.ASCII,
)
_RUN = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)+(?![.,]?\d)", re.ASCII)
_THOUSANDS = re.compile(r"\d{1,3}(?:([.,])\d{3})(?:\1\d{3})*|\d{1,2}(?:,\d{2})+,\d{3}", re.ASCII)
_NO_DIGIT = re.compile(r"\D", re.ASCII)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"lakh": 10**5, "crore": 10**7, "\u4e07": 10**4, "\u842c": 10**4, "\u4ebf": 10**8, "\u5104": 10**8}
_SCALED = re.compile(
    r"(?<![A-Za-z\d_.^\\,])(\d+(?:\.\d+)?)\s?"
    r"(?:(hundred|thousand|million|billion|trillion|lakh|crore)(?:s|en)?(?!\w)|([\u4e07\u842c\u4ebf\u5104]))",
    re.IGNORECASE,
)
_MINUS_WORD = re.compile(
    r"(?<![\d)}\]]\s)(?<!\w)(?:negative|minus|moins|menos|\u043c\u0438\u043d\u0443\u0441|\u8d1f|\u30de\u30a4\u30ca\u30b9)"
    r"\s?(?=(?:\\?[$€£¥₹₩₽])?[\d.\\])",
    re.IGNORECASE,
)


def in_digits(text: str) -> str:
    r"""Write the numbers in plain text without spaced groups, and with their magnitude expanded.

    >>> in_digits("12 000"), in_digits("1'000.5"), in_digits("1.5 million"), in_digits("7 10")
    ('12000', '1000.5', '1500000', '7 10')
    """
    return _SCALED.sub(_scaled, _GROUPS.sub(lambda m: _NO_DIGIT.sub("", m[0]), text))


def _scaled(match: re.Match[str]) -> str:
    value = _decimal(match[1])
    return match[0] if value is None else format_number(value * _SCALES[(match[2] or match[3]).lower()])


def _with_points(text: str, decimal: Decimal) -> str:
    """Write the fractions of numbers after a point, and remove the separators of thousands."""
    return _RUN.sub(lambda m: _with_point(m[0], decimal), text)


def _with_point(run: str, decimal: Decimal) -> str:
    last = max(run.rfind("."), run.rfind(","))
    whole, part = run[:last], run[last + 1 :]
    groups = _THOUSANDS.fullmatch(run)
    if groups is not None and (run[last] != decimal or run.count(run[last]) > 1) and whole[0] != "0":
        return _NO_DIGIT.sub("", run)
    groups = _THOUSANDS.fullmatch(whole)
    if whole.isdigit() or (groups is not None and run[last] not in whole):
        return f"{_NO_DIGIT.sub('', whole)}.{part}"
    return run


def _bare(text: str) -> str:
    """Apply `plain_ascii` and `in_digits`, and drop currency, percent and degree signs, delimiters and emphasis."""
    text = _CURRENCY.sub("", in_digits(_MINUS_WORD.sub("-", plain_ascii(text))))
    if "\\" in text or "`" in text or "**" in text:
        text = _MARKUP.sub(" ", _DEGREES.sub(" ", text))
    return _PERCENT.sub("", text)


@lru_cache(maxsize=4096)
def parse_number(text: str, decimal: Decimal = ".") -> Fraction | None:
    r"""Read a text that is exactly one number; None if it is not.

    >>> parse_number(r"-1\frac{1}{2}"), parse_number("$1,000.50"), parse_number("3 + 4"), parse_number("1.000,5", ",")
    (Fraction(-3, 2), Fraction(2001, 2), None, Fraction(2001, 2))
    """
    if len(text) > MAX_CHARS:
        return None
    text = _bare(text).strip()
    if decimal == "," or text.count(".") > 1:
        text = _with_points(text, decimal)
    while len(text) > 1 and (text[0], text[-1]) in {("(", ")"), ("[", "]"), ("{", "}")}:
        text = text[1:-1].strip()
    match = NUMBER.fullmatch(_LOOSE_SIGN.sub(r"\1", text.rstrip("."), count=1))
    return value_of(match) if match is not None else None


def is_rounded(right: str, given: str) -> bool:
    """Whether one of two numbers is written with a decimal point, so that it may be rounded."""
    return "." in right or "." in given


def close(reference: Fraction, answer: Fraction, rounded: bool = True) -> bool:
    """Whether two numbers agree: exactly, or within ``1e-3`` (relative if both are below 1) if one may be rounded."""
    if reference == answer or not rounded:
        return reference == answer
    scale = min(Fraction(1), max(abs(reference), abs(answer)))
    return abs(reference - answer) <= TOLERANCE * scale


def same_number(reference: str, answer: str, decimal: Decimal = ".") -> bool:
    """Whether two texts are equal, or are numbers that agree; the answer is as `read_number` writes it."""
    if reference == answer:
        return True
    right, given = parse_number(reference, decimal), parse_number(answer)
    return right is not None and given is not None and close(right, given, is_rounded(reference, answer))


def format_number(value: Fraction) -> str:
    """Format a value in its unique form: a whole number, a finite decimal, or ``p/q``.

    >>> format_number(Fraction(1, 2)), format_number(Fraction(2, 6)), format_number(Fraction(-4, 2))
    ('0.5', '1/3', '-2')
    """
    top, bottom = value.numerator, value.denominator
    if bottom == 1:
        return str(top)
    if 10**MAX_DIGITS % bottom:
        return f"{top}/{bottom}"
    places = next(n for n in count(1) if 10**n % bottom == 0)
    digits = str(abs(top) * 10**places // bottom).rjust(places + 1, "0")
    return f"{'-' if top < 0 else ''}{digits[:-places]}.{digits[-places:]}"


_SENTENCE_END = re.compile(r"[.?!](?=\s|$)|\n")
_EQUALS = re.compile(r"=>?|\\(?:approx|implies|to|rightarrow|Rightarrow|simeq|sim)\b|(?<!-)-++>")
_OPENING = re.compile(
    r"(?:[\s\[({<\"'*_:~]|-\s)*(?:(?:about|approximately|approx\.?|exactly|only|just|roughly|Rs\.?)\s+)?"
)
# Other numbers that are offered too, in this sentence or the next.
_HEDGE = re.compile(
    r"\b(?:or|either|maybe|perhaps|possibly|oder|vielleicht|ou|o|\u0438\u043b\u0438)\b[^.]{0,80}?\d|\band\s+\d"
    r"|\d[^.]{0,40}?\b(?:alternatively|otherwise|else|actually|no,?\s+wait)\b[^.]{0,80}?\d|\d\s+\|\s+\d"
    r"|(?:\u6216|\u307e\u305f\u306f|\u0e2b\u0e23\u0e37\u0e2d)[^.]{0,80}?\d",
    re.IGNORECASE,
)
# "5 feet 6 inches" and "18 of 20" give two numbers, "18 in 2 days" only one.
_SECOND = re.compile(r"\s*(?!(?:in|for|over|within|during|after|across)\b)[A-Za-z]+\s+[-+]?\d", re.ASCII)
_SECOND_THOUGHT = re.compile(r"[.?!\s]*(?:or|maybe|perhaps|possibly)\b[^.]{0,80}?\d", re.IGNORECASE)
_NEGATED = re.compile(
    r"(?:\bnot|n't|\bnever|\bnicht|\bpas|\bno es|\b\u043d\u0435|\u4e0d\u662f)"
    r"\s{0,3}(?:(?:equal\s)?to\s|exactly\s)?[-+]?$",
    re.IGNORECASE,
)
_TOKEN = re.compile(rf"(?<![\w.^\\])(?<!\^\{{)(?<!_\{{)(?<!\d,){NUMBER.pattern}", re.VERBOSE | re.ASCII)


def read_number(span: str, decimal: Decimal = ".", stated: bool = True) -> str | None:
    """Read the single number of a stated answer, such as ``$18 per day`` or ``9 * 2 = 18.``.

    If the span starts with a number, that number is the answer. Otherwise, the answer is the last
    number of its first sentence. An unevaluated expression, a list, a negated number ("not 18") or a hedge ("18 (maybe
    20)") is not a number.

    Args:
        span: The text after an answer tag, at most `MAX_CHARS` characters.
        decimal: What a single comma or point before three digits means; the other sign separates thousands.
        stated: Whether the span begins where the answer is expected; otherwise, only its last number is read.

    Returns:
        The number as `format_number` writes it, or None.
    """
    if len(span) > MAX_CHARS:
        return None
    text = _with_points(_bare(span), decimal)
    digit = _DIGIT.search(text)
    stop = _SENTENCE_END.search(text, digit.start() if digit is not None else 0)
    if stop is not None:
        if _SECOND_THOUGHT.match(text, stop.end()):
            return None
        text = text[: stop.start()]
    for part in reversed(_EQUALS.split(text)):
        opening = _OPENING.match(part)
        match = NUMBER.match(part, opening.end()) if opening is not None and stated else None
        if match is None:
            match = next(iter(deque(_TOKEN.finditer(part), maxlen=1)), None)
            if match is None or begins_inside(part, match.start()):
                continue
        value = value_of(match)
        if value is None or continues(part, match.end()) or _SECOND.match(part, match.end()):
            continue
        return None if _NEGATED.search(part, 0, match.start()) or _HEDGE.search(part) else format_number(value)
    return None


def last_number(text: str, decimal: Decimal = ".") -> str | None:
    """Read the number in the last sentence that has one, of a message that states no answer."""
    tail = text[-TAIL:].rstrip()
    sentences = _SENTENCE_START.split(tail)
    for sentence in reversed(sentences[1:] if len(text) > TAIL else sentences):
        if _DIGIT.search(sentence) is not None:
            return read_number(sentence[-MAX_CHARS:] if len(sentence) > MAX_CHARS else sentence, decimal, stated=False)
    return None


_SENTENCE_START = re.compile(r"(?<=[.?!])\s+|\n+|(?<=[\u3002\u0964])")
