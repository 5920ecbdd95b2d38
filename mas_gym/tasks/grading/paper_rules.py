r"""Extraction and equality exactly as in the paper's App. "Answer extraction and normalization".

This mode reproduces the paper's results and shows the errors of its literal rules:
the first match of the tag is used, so "the answer is the larger one. ... Final
Answer: 7" does not give 7; there are no rules for boxes, fractions or LaTeX; and the
first standalone "a" of a message is option A.

Where the paper is silent, this mode decides as follows: a number-like token is a decimal with an optional
sign. If a span is not a number as a whole, its last such token is the answer of a
numeric problem; LaTeX answers remain text.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Context, Decimal

from mas_gym.tasks.base import Kind

TOLERANCE = Decimal("0.001")
_MAX_CHARS = 100_000

# The paper's expression; possessive repeats make it linear without changing any non-empty match.
_TAG = re.compile(r"\b(?:Final Answer|Answer)\s*+:?+\s*+(.+)", re.IGNORECASE)
_TOKEN = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)
_LABEL = re.compile(r"\b[ABCD]\b", re.IGNORECASE)
_UNIT = re.compile(
    r"(?:\\text\s?\{[^{}]{0,80}\}|\\mbox\s?\{[^{}]{0,80}\}|\^\s?\{?\\circ\}?|\\?%"
    r"|(?<![a-z])(?:cm|mm|km|m|kg|g|mg|lbs?|ft|feet|foot|inch(?:es)?|degrees?|dollars?|cents?|percent|units?"
    r"|hours?|minutes?|seconds?|days?|weeks?|months?|years?))(?:\^\{?\d\}?)?[\s.$]*$",
    re.IGNORECASE,
)
_SPACES_AND_COMMAS = re.compile(r"[\s,]+")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)


def extract(text: str, kind: Kind) -> str | None:
    """Read the answer of a final message by the paper's rule; None if there is none."""
    tag = _TAG.search(text)
    if kind == "choice":
        label = _LABEL.search(tag[1] if tag is not None else text)
        return label[0].upper() if label is not None else None
    if tag is not None:
        answer = normalize_as_paper(tag[1][:_MAX_CHARS])
        if kind == "expression" or _NUMBER.fullmatch(answer):
            return answer or None
        return _last_token(tag[1])
    return _last_token(text)


def _last_token(text: str) -> str | None:
    tokens = deque(_TOKEN.finditer(_without_units(text[-_MAX_CHARS:])), maxlen=1)
    return normalize_as_paper(tokens[0][0]) if tokens else None


def _without_units(text: str) -> str:
    end = len(text)
    while True:
        # units are at the end, so only the end is searched
        start = max(0, end - 100)
        unit = _UNIT.search(text[start:end])
        if unit is None:
            return text[:end]
        end = start + unit.start()


def normalize_as_paper(text: str) -> str:
    """Lowercase, strip commas and spaces, remove trailing unit markers and the zero fraction of whole numbers."""
    text = _SPACES_AND_COMMAS.sub("", _without_units(text.strip().rstrip(".")).lower())
    if _NUMBER.fullmatch(text) and len(text) <= 100:
        value = Decimal(text)
        return f"{value.normalize():f}" if value else "0"
    return text


def same(reference: str, answer: str, kind: Kind) -> bool:
    """Whether two answers are equal by the paper's rule: numbers within 1e-3, anything else as normalized text."""
    if kind == "choice":
        return reference.strip().upper() == answer.strip().upper()
    right, given = normalize_as_paper(reference), normalize_as_paper(answer)
    if right == given:
        return True
    # without traps, text that is not a number becomes NaN and a number too large becomes infinite; neither is near
    context = Context(traps=[])
    difference = context.subtract(context.create_decimal(right), context.create_decimal(given))
    return not difference.is_nan() and abs(difference) <= TOLERANCE
