"""Labels of multiple-choice options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from mas_gym.tasks.grading.numbers import MAX_CHARS, TAIL, plain_ascii

# ------------------------------------------------------------------ options

_DRESS = re.compile(r"\\(?:text|textbf|mathbf|mathrm|boxed|mbox)\s?\{|\\[()\[\]]|[*_`$\"“”{}#]|^'|'$")
_LEADING_LABEL = re.compile(
    r"[\s(\[<:.>-]*(?:(?:is|be|the|correct|option|choice|answer|letter)\b[\s:(\[]*)*([A-Za-z])(?![A-Za-z0-9'\u2019])",
    re.IGNORECASE,
)
_REASON = r"(?:is|was|because|since|as|due|given|based|which|follows|holds|must|and|or)\b"
_CLOSED = re.compile(rf"\s*(?:$|[^\x00-\x7f]|[).:,;\]>/&\n\u2013\u2014-])|\s+{_REASON}", re.IGNORECASE)
_ANOTHER = re.compile(
    r"[\s).\](]*(?:(?:,|[;|](?=\s*\(?[A-Z]\W*$)|and|or|&|/|\+|maybe|perhaps|possibly|alternatively|und|oder|et|ou?|y"
    r"|\u0438(?:\u043b\u0438)?|\u548c|\u6216|na|au)\s*)+(?:option\s*)?\(?([A-Z])(?![A-Za-z0-9'\u2019])",
    re.IGNORECASE,
)
_STANDALONE = re.compile(r"(?<![A-Za-z0-9'\u2019])[A-Z](?![A-Za-z0-9'\u2019])")
_NAMED = re.compile(
    r"\b(?:option|choice|letter|answer)\s*+(?:(?:is|:)\s*+)?[(\[]?([A-Za-z])(?![A-Za-z0-9'\u2019])", re.IGNORECASE
)
_CROWNED = re.compile(
    r"(?<![A-Za-z0-9])\(?([A-Z])\)?\s+(?:is|must be|would be)\s+(?:(?:the|therefore|thus|clearly|most|only)\s+)*"
    r"(?:correct|right|best|true|valid|answer|entailed|consistent|supported|option)\b"
)
_CLOSING = re.compile(
    r"\(([A-Z])\)|(?<![A-Za-z0-9'\u2019.])([A-Z])(?=[)\]]?[^\S\n]*+(?:\n|$|[.!][^\S\n]*+(?:\n|$)|\.\s))"
)
_ARTICLE = re.compile(r"\s+(?!(?:is|was|because|since|holds|follows|must)\b)[a-z]")
_REFUSED = re.compile(
    r"(?:\bnot|n't|\bneither|\bnor|\bthan|\bexcept|\bruled? out|\breject)\s+(?:option\s+)?\(?$", re.IGNORECASE
)
_WORDS = re.compile(r"\w+")
_CLEAR_END = re.compile(r"\s*(?:$|[).:\]])")


def without_markup(span: str) -> str:
    """Drop emphasis, quotes and LaTeX wrappers around a label or an option."""
    return _DRESS.sub("", plain_ascii(span)).strip()


def read_label(span: str, options: Sequence[str] = ()) -> str | None:
    """Read the option that a stated answer names, by label or by its whole text.

    The article "A" and the first letter of a word are not labels; two different labels give no answer.

    Args:
        span: The text after an answer tag.
        options: The texts of the options, in the order of their labels; if empty, four options are assumed.

    Returns:
        The label in upper case, or None.
    """
    if len(span) > MAX_CHARS:
        return None
    text = without_markup(span)
    labels = ascii_uppercase[: len(options) or 4]
    lead = _LEADING_LABEL.match(text)
    if lead is not None and lead[1].upper() in labels:
        letter, closed = lead[1], _CLOSED.match(text, lead.end()) is not None
        other = _ANOTHER.match(text, lead.end())
        if other is not None and other[1] in labels and other[1] != letter.upper():
            return None
        if closed or (letter.isupper() and letter not in "AI"):
            return letter.upper()
    if _has_alternatives(text, labels):
        return None
    by_text = _label_of_text(text, options)
    return by_text or _only_label(text, labels)


def _has_alternatives(text: str, labels: str) -> bool:
    """Whether a text offers two options, as in "either A or B"."""
    offered = ((one[0], _ANOTHER.match(text, one.end())) for one in _STANDALONE.finditer(text))
    return any(a in labels and b is not None and b[1] in labels and a != b[1] for a, b in offered)


def _label_of_text(text: str, options: Sequence[str]) -> str | None:
    words = _WORDS.findall(text.casefold())
    same = [
        label
        for label, option in zip(ascii_uppercase, options, strict=False)
        if words == _WORDS.findall(option.casefold())
    ]
    return same[0] if words and len(same) == 1 else None


def _only_label(text: str, labels: str) -> str | None:
    """Return the only label that a text names and does not reject; None if there is none or more than one."""
    named = {m[1].upper() for m in _NAMED.finditer(text) if not (m[1] == "a" and _ARTICLE.match(text, m.end()))}
    named = {label for label in named if label in labels}
    if not named:
        named = {
            m[1] or m[2]
            for m in _CLOSING.finditer(text)
            if (m[1] or m[2]) in labels and not _REFUSED.search(text, max(0, m.start() - 24), m.start())
        }
    return named.pop() if len(named) == 1 else None


def label_without_statement(text: str, options: Sequence[str] = ()) -> str | None:
    """Read the option that a message chooses without an explicit statement."""
    labels = ascii_uppercase[: len(options) or 4]
    tail = without_markup(text[-TAIL:])
    crowned = [m[1] for m in _CROWNED.finditer(tail) if m[1] in labels]
    if crowned:
        return crowned[-1]
    last = tail.rpartition("\n")[2]
    lead = _LEADING_LABEL.match(last) if len(last) <= MAX_CHARS else None
    if lead is not None and lead[1].upper() in labels and _CLEAR_END.match(last, lead.end()):
        return lead[1].upper()
    if _has_alternatives(last, labels):
        return None
    return _label_of_text(tail, options) or _only_label(tail, labels)
