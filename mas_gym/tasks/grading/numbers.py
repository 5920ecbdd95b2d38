r"""Parses numbers as people and models write them, exactly and in bounded time.

``1,000``, ``$18.50``, ``-3/4``, ``1\frac{4}{5}``, ``6.72e-5`` and similar forms
become a `Fraction`. Nothing is evaluated: ``3 + 4`` and ``9**9`` are not numbers,
and their parts are not answers.

Digits may be in groups of three or in Indian groups (``1,00,000``), separated by commas, spaces
of any kind (``1\,000``, ``12 000``), apostrophes or, from a million on, points. A magnitude
is part of the number: "1.5 million" is 1500000 and "$5k" is 5000.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from functools import lru_cache
from string import ascii_letters

MAX_CHARS = 600  # a longer text is not read as an answer
MAX_DIGITS = 100
MAX_POWER = 300
_TAIL = 4096  # the end of a message, which nearly always contains its last number
_LONGEST = 100_000

_MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_SPACES = "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5"}
_VULGAR |= {"⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
_SIGNS = {
    "\u00d7": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": "/",
    "\u2044": "/",
    "\u2215": "/",
    "∞": r"\infty ",
    "π": r"\pi ",
}
_SIGNS |= {"°": r"^\circ ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "\u222a": r"\cup ", "∩": r"\cap ", "∈": r"\in "}
_SIGNS |= {"≈": "=", "→": "=", "⇒": "=", "θ": r"\theta ", "∅": r"\emptyset ", "‰": " per mille"}
_SIGNS |= {"\u066b": ".", "\u066c": ","}

_TABLE: dict[int, str] = (
    {ord(c): "-" for c in _MINUS} | {ord(c): " " for c in _SPACES} | {ord(c): "" for c in _INVISIBLE}
)
_TABLE |= {ord(c): f" {text}" for c, text in _VULGAR.items()} | {ord(c): text for c, text in _SIGNS.items()}
_TABLE |= {0xFF01 + i: chr(0x21 + i) for i in range(94)}  # full-width forms
_TABLE |= {zero + digit: str(digit) for zero in (0x660, 0x6F0, 0x966, 0x9E6) for digit in range(10)}
_TABLE |= {ord("\uff0d"): "-", ord("\uff04"): "$"}

_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_ROOT_SIGN = re.compile(r"√\s{0,3}(?:(\d+)|\(([^()]*)\)|(?=\{))")
_LATEX_SPACE = re.compile(r"\\!\s*|(?:\\(?:text|mbox|mathrm|mathord))?\{,\}")
_LATEX_GAP = re.compile(
    r"(?:(?<!\\)\\[,;:> ]|\{\\[,;:> ]\}|~|\\(?:q?quad|(?:thin|med|thick|en)space)\b"
    r"|\\(?:left|right|displaystyle|textstyle)(?![A-Za-z]))\x20*+"
)
_CURRENCY = re.compile(r"(?<![\d}])(?:\bUS)?\\?[$€£¥₹₩₽]\s{0,3}(?=[-+.\d])")
_OTHER_CURRENCY = re.compile(r"\\?[$€£¥₹₩₽]")
DEGREES = re.compile(r"\^\s?\{?\s?\\(?:circ|degree)\s?\}?|\\(?:degree|deg)\b")
PERCENT = re.compile(r"\\?%")
_MARKUP = re.compile(r"\\[()\[\]]|`|(?<![\d)])\*\*|\*\*(?![\d(])")


TOLERANCE = Fraction(1, 1000)


def plain_ascii(text: str) -> str:
    """Rewrite typographic symbols, invisible characters and LaTeX spacing as plain ASCII where possible."""
    if not text.isascii():
        text = _ROOT_SIGN.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}" if m[1] or m[2] else r"\sqrt", text)
        text = _RAISED_RUN.sub(lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
        text = _LOWERED_RUN.sub(lambda m: f"_{{{m[0].translate(_LOWERED)}}}", text)
        text = text.translate(_TABLE)
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
_TEN_POWER = re.compile(r"10\s?(?:\^|\*\*)\s?\{?\s?([-+]?\d{1,3})\s?\}?(?![\d^*!])", re.ASCII)
_REPEATING = re.compile(r"([-+]?)(\d{0,20})\.(\d{0,20})\\overline\{?\s?(\d{1,20})\s?\}?", re.ASCII)
_SIMPLE = re.compile(r"-?\d{1,18}", re.ASCII)
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


# A number does not begin within a word, a decimal, an exponent or a list.
_SEPARATOR = r"[\x20'\u2018\u2019\u02bc]"
_BEGIN = rf"(?<![\w,^])(?<!(?<![A-Za-z])\.)(?<!\d{_SEPARATOR})"
_GROUPS = re.compile(
    rf"{_BEGIN}[1-9](?:\d{{0,2}}(?P<sep>{_SEPARATOR})\d{{3}}(?:(?P=sep)\d{{3}})*"
    rf"|\d?(?P<indian>{_SEPARATOR})\d\d(?:(?P=indian)\d\d)*(?P=indian)\d{{3}})(?![\d/]|{_SEPARATOR}\d|-[A-Za-z])",
    re.ASCII,
)
_POINTED = re.compile(rf"{_BEGIN}([1-9]\d{{0,2}}(?:\.\d{{3}}){{2,}})(?:,(\d+))?(?![.,]?\d)", re.ASCII)
_NO_DIGIT = re.compile(r"\D", re.ASCII)

_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"lakh": 10**5, "crore": 10**7}
_SCALE = re.compile("|".join(_SCALES), re.IGNORECASE)
# With possible prefixes, as in "$1.5$ million" and r"1.5\text{ million}".
MAGNITUDE = re.compile(
    r"(?P<gap>(?:[^\S\n]|[-$*`\"'})\]]|\\[()\[\]]|\\(?:text|mbox|mathrm|textrm|textbf)\s?\{){0,6})"
    rf"(?P<scale>(?:{_SCALE.pattern})s?(?:[^\S\n](?:{_SCALE.pattern})s?){{0,2}})(?!\w)",
    re.ASCII | re.IGNORECASE,
)
_TOKEN = re.compile(rf"(?<![\w.^\\])(?<!\^\{{)(?<!_\{{)(?<!\d,){NUMBER.pattern}", re.VERBOSE | re.ASCII)
_SCALED = re.compile(_TOKEN.pattern + MAGNITUDE.pattern, re.VERBOSE | re.ASCII | re.IGNORECASE)
_LETTERS = {"k": 10**3, "m": 10**6, "mn": 10**6, "mm": 10**6, "mil": 10**6}
_LETTERS |= {"b": 10**9, "bn": 10**9, "t": 10**12, "tn": 10**12}
_LETTERED = re.compile(
    rf"""(?P<money>(?:(?:\bUS)?[$€£¥₹₩₽]|\b(?:USD|EUR|GBP|INR|Rs\.?))\s?)?{_TOKEN.pattern}
    (?P<gap>[^\S\n]?)(?P<letter>[kK]|[mM](?:[nNmM]|il)?|[bBtT][nN]?)(?![\w^])
    (?P<paid>[^\S\n]?(?:[€£¥₹₩₽]|\\\$|(?:USD|EUR|GBP|INR|dollars?|euros?|rupees?)\b))?""",
    re.VERBOSE | re.ASCII,
)
_CLOSING_DOLLAR = re.compile(r"[^$]*\$(?!\s?[-+.\d])")


def in_digits(text: str) -> str:
    r"""Write the numbers in plain text as digits: without thousands separators, and with their magnitude expanded.

    >>> in_digits("12 000"), in_digits("1'000.5"), in_digits("1.000.000"), in_digits("1.5 million"), in_digits("7 10")
    ('12000', '1000.5', '1000000', '1500000', '7 10')
    """
    text = _GROUPS.sub(lambda m: _NO_DIGIT.sub("", m[0]), text)
    text = _POINTED.sub(lambda m: m[1].replace(".", "") + (f".{m[2]}" if m[2] else ""), text)
    return _SCALED.sub(_scaled, text) if _SCALE.search(text) is not None else text


def _scaled(match: re.Match[str]) -> str:
    value = value_of(match)
    if value is None:
        return match[0]
    for word in _SCALE.findall(match["scale"]):
        value *= _SCALES[word.lower()]
    return f"{format_number(value)}{match['gap'].strip(' -')}"


def _spelled(match: re.Match[str]) -> str:
    """Expand a letter that denotes a magnitude; other letters are units.

    Next to a currency, each letter is a magnitude. Without a currency, the letters of "5k", "5M", "5 k" and "5 bn" are
    magnitudes, and those of "5m" and "300 K" are units.
    """
    letter, value = match["letter"], value_of(match)
    # "$5m$" is a formula.
    money = match["money"] and not ("$" in match["money"] and _CLOSING_DOLLAR.match(match.string, match.end()))
    alone = letter in ("k", "bn", "Bn", "BN") or (letter in ("K", "M") and not match["gap"])
    if value is None or not (money or match["paid"] or alone):
        return match[0]
    return f"{match['money'] or ''}{format_number(value * _LETTERS[letter.lower()])}{match['paid'] or ''}"


def bare(text: str, letters: bool = False) -> str:
    """Apply `plain_ascii` and `in_digits`, and drop currency, percent and degree signs, LaTeX delimiters and emphasis.

    Args:
        text: Any text.
        letters: Whether to read "5k" and "$5m" as numbers; in an expression the letter may be a variable.
    """
    text = in_digits(plain_ascii(text))
    if letters:
        text = _LETTERED.sub(_spelled, text)
    if "$" in text or not text.isascii():
        text = _OTHER_CURRENCY.sub(" ", _CURRENCY.sub("", text))
    if "\\" in text or "`" in text or "**" in text:
        text = _MARKUP.sub(" ", DEGREES.sub(" ", text))
    return PERCENT.sub("", text)


@lru_cache(maxsize=4096)
def parse_number(text: str) -> Fraction | None:
    r"""Read a text that is exactly one number; None if it is not.

    >>> parse_number(r"-1\frac{1}{2}"), parse_number("$1,000.50"), parse_number("3 + 4")
    (Fraction(-3, 2), Fraction(2001, 2), None)
    """
    if len(text) > MAX_CHARS:
        return None
    text = bare(text).strip()
    while len(text) > 1 and (text[0], text[-1]) in {("(", ")"), ("[", "]"), ("{", "}")}:
        text = text[1:-1].strip()
    ten = _TEN_POWER.fullmatch(text)
    if ten is not None:
        return Fraction(10) ** int(ten[1]) if abs(int(ten[1])) <= MAX_POWER else None
    repeating = _REPEATING.fullmatch(text)
    if repeating is not None:
        sign, whole, fixed, cycle = repeating.groups()
        shift = 10 ** len(fixed)
        value = (
            int(whole or 0) + Fraction(int(fixed or 0), shift) + Fraction(int(cycle), (10 ** len(cycle) - 1) * shift)
        )
        return -value if sign == "-" else value
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


def same_number(reference: str, answer: str) -> bool:
    """Whether two texts are equal, or are numbers that agree."""
    if reference == answer:
        return True
    right, given = parse_number(reference), parse_number(answer)
    return right is not None and given is not None and close(right, given, is_rounded(reference, answer))


def format_number(value: Fraction) -> str:
    """Format a value in its unique form: a whole number, a finite decimal, or ``p/q``.

    >>> format_number(Fraction(1, 2)), format_number(Fraction(2, 6)), format_number(Fraction(-4, 2))
    ('0.5', '1/3', '-2')
    """
    top, bottom = value.numerator, value.denominator
    if bottom == 1:
        return str(top)
    twos = fives = 0
    rest = bottom
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    if rest != 1 or places > MAX_DIGITS:
        return f"{top}/{bottom}"
    digits = str(abs(top) * 10**places // bottom).rjust(places + 1, "0")
    return f"{'-' if top < 0 else ''}{digits[:-places]}.{digits[-places:]}"


_SENTENCE_END = re.compile(r"[.?!](?=\s|$)|\n")
_EQUALS = re.compile(r"=>?|\\(?:approx|implies|to|rightarrow|Rightarrow|simeq|sim)\b|(?<!-)-++>")
_OPENING = re.compile(
    r"(?:[\s\[({<\"'*_:~]|-\s)*(?:(?:about|approximately|approx\.?|exactly|only|just|roughly|Rs\.?)\s+)?"
)
_HEDGE = re.compile(r"\bor\b[^.]{0,80}?\d|\band\s+\d")
# "18 eggs 2" gives two numbers, "18 in 2 days" only one.
_SECOND = re.compile(r"\s*(?!(?:in|for|over|within|during|after|across)\b)[A-Za-z]+\s+[-+]?\d", re.ASCII)
_WITHIN = re.compile(
    r"\b(?:in|for|over|within|during|after|across)\s+(?:(?:the|all|these|those|about|only|just|first|last|next)\s+){0,3}$"
)
_COUNTED = re.compile(r"\s*-?\s?(?:seconds?|minutes?|hours?|days?|nights?|weeks?|months?|years?|people|persons)\b")
_ASSERTED = re.compile(
    r"\b(?:is|are|was|were|be|equals|totals?|makes?|made|earns?|earned|saves?|saved|costs?|gets?|needs?|spends?|spent|has|have)"
    r"\s+(?:(?:a|an|the|total|of|about|approximately|exactly|only|just|roughly|up|to)\s+){0,4}$",
    re.IGNORECASE,
)
_PART = re.compile(rf"\s*([A-Za-z]+)\.?,?\s+(?:and\s+)?({_DEC})\s*([A-Za-z]+)\b", re.ASCII)

_UNITS: dict[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(size))
    for dimension, sizes in {
        "time": {
            "week wk": 604_800,
            "day": 86_400,
            "hour hr h": 3_600,
            "minute min": 60,
            "second sec": 1,
        },
        "calendar": {"year yr": 12, "month": 1},
        "length": {"mile": 63_360, "yard yd": 36, "foot feet ft": 12, "inch inche": 1},
        "metre": {"kilometer kilometre km": 100_000, "meter metre m": 100, "centimeter centimetre cm": 1},
        "weight": {"pound lb": 16, "ounce oz": 1},
        "gram": {"kilogram kg": 1_000, "gram g": 1},
        "money": {"dollar": 100, "cent": 1},
    }.items()
    for names, size in sizes.items()
    for name in names.split()
}
_CLOCK = re.compile(r"\s*\d{1,2}:\d{2}(?::\d{2})?(?!\d)", re.ASCII)
_DIGIT = re.compile(r"\d", re.ASCII)
_GAP = re.compile(r"\s(?!\d)", re.ASCII)


def read_number(span: str) -> str | None:
    """Read the single number of a stated answer, such as ``$18 per day`` or ``9 * 2 = 18.``.

    If the span starts with a number, that number is the answer. Otherwise, the answer is the last
    number of its first sentence, unless that number is only a count that follows the
    asserted answer ("the total is 18 in 2 days"). The parts of one quantity are
    combined in its first unit: "18 minutes and 30 seconds" is 18.5. An
    unevaluated expression, a list or a hedge ("18 or 20") is not a number.

    Args:
        span: The text after an answer tag, at most `MAX_CHARS` characters.

    Returns:
        The number as `format_number` writes it, a clock time unchanged, or None.
    """
    simple = _SIMPLE.fullmatch(span)
    if simple is not None:
        return str(int(span))
    if len(span) > MAX_CHARS:
        return None
    text = bare(span, letters=True)
    stop = _SENTENCE_END.search(text, _first_digit(text))
    text = text[: stop.start()] if stop is not None else text
    for part in reversed(_EQUALS.split(text)):
        opening = _OPENING.match(part)
        start = opening.end() if opening is not None else 0
        clock = _CLOCK.match(part, start)
        if clock is not None:
            return clock[0].strip()
        match = NUMBER.match(part, start)
        if match is None:
            match = _asserted_token(part)
            if match is None or begins_inside(part, match.start()):
                continue
        value = value_of(match)
        if value is None:
            continue
        value, end = _with_parts(part, match, value)
        if not (continues(part, end) or _HEDGE.search(part, end) or _SECOND.match(part, end)):
            return format_number(value)
    return None


def _asserted_token(text: str) -> re.Match[str] | None:
    """Return a sentence's last number, or the asserted number before it if the last number is a count ("in 2 days").

    The parts of a quantity count as one number, which begins at the first part.
    """
    tokens = list(_TOKEN.finditer(text))
    count = None
    while len(tokens) > 1:
        before, last = tokens[-2:]
        if _COUNTED.match(text, last.end()) and _WITHIN.search(text, before.end(), last.start()):
            count = count or last
        elif _with_parts(text, before, Fraction(0))[1] <= last.start():
            break
        tokens.pop()
    if count is not None and _ASSERTED.search(text, 0, tokens[-1].start()) is None:
        return count
    return tokens[-1] if tokens else None


def _with_parts(text: str, match: re.Match[str], value: Fraction) -> tuple[Fraction, int]:
    """Add the smaller parts of a quantity, as in "5 feet 6 inches", to its number; also return where the parts end.

    The parts of a quantity have the same dimension, and each part is smaller than the one before.
    """
    end, first = match.end(), None
    while (part := _PART.match(text, end)) is not None:
        unit, smaller = (_UNITS.get(part[place].lower().removesuffix("s")) for place in (1, 3))
        amount = _decimal(part[2])
        if unit is None or smaller is None or amount is None or unit[0] != smaller[0] or unit[1] <= smaller[1]:
            break
        first = first or unit
        value += (-amount if value < 0 else amount) * smaller[1] / first[1]
        end = part.start(3)
    if first is not None:
        end += len(text[end:]) - len(text[end:].lstrip(ascii_letters))
    return value, end


def _first_digit(text: str) -> int:
    digit = _DIGIT.search(text)
    return digit.start() if digit is not None else 0


def _last_token(text: str) -> re.Match[str] | None:
    tokens = deque(_TOKEN.finditer(text), maxlen=1)
    return tokens[0] if tokens else None


def last_number(text: str) -> str | None:
    """Read the last number of a message that states no answer, in time linear in its length."""
    tail = text[-_TAIL:]
    if len(text) > _TAIL:
        # the cut must not fall inside a number
        gap = _GAP.search(tail)
        tail = tail[gap.end() :] if gap is not None else ""
        if _DIGIT.search(tail) is None:
            tail = text[-_LONGEST:]
    tail = bare(tail, letters=True)
    match = _last_token(tail)
    if match is None:
        return None
    begin = max(0, match.start() - MAX_CHARS)
    stops = [stop.end() for stop in _SENTENCE_END.finditer(tail, begin, match.start())]
    start = stops[-1] if stops else begin
    if stops or not begin:
        match = _asserted_token(tail[start : match.end() + MAX_CHARS]) or match
    else:
        start = 0
    value = value_of(match)
    if value is None or begins_inside(tail, start + match.start()):
        return None
    value, end = _with_parts(match.string, match, value)
    return None if continues(tail, start + end) else format_number(value)
