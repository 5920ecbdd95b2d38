"""Model and user text for printing: on one line, without control characters."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping

_LONGEST_LINE = 500
# Characters that reorder the text after them and could disguise a message.
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def name_of(function: object) -> str:
    """Return the qualified name of a function or class; for any other object, the name of its class.

    >>> name_of(str.upper), name_of(3)
    ('str.upper', 'int')
    """
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def printable(text: str) -> str:
    r"""Return a text that is safe to print: control, bidirectional and lone surrogate characters are escaped.

    Newlines and tabs are kept.

    >>> printable("ok\x1b[31m")
    'ok\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _steers(c) else c.encode("unicode_escape").decode() for c in text)


def one_line(text: object) -> str:
    r"""Return a name or a reason as one printable line of bounded length, for messages and tables.

    >>> one_line("two\nlines")
    'two\\nlines'
    """
    return printable(cut(str(text), _LONGEST_LINE)).replace("\n", "\\n").replace("\t", "\\t")


def cut(text: str, most: int) -> str:
    """Return the first ``most`` characters of a text, and the number of characters cut."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"


_VARIES = re.compile(r"""'[^']*'|"[^"]*"|\d+(?:[.,]\d+)*""")
_PLACE = re.compile(r"\([^()]+, line \d+\)$")
_COMPARED = 2000


def by_cause(reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    """Group reasons that differ only in quoted text and numbers; return a line and a count for each group.

    >>> by_cause({"no file 'a'": 1, "no file 'b'": 2, "timeout": 4})
    [('timeout', 4), ("no file 'b' (and 1 similar reason)", 3)]
    """
    groups: dict[tuple[str, str], Counter[str]] = {}
    for reason, number in reasons.items():
        place = _PLACE.search(reason[-_COMPARED:])
        key = _VARIES.sub("#", reason[:_COMPARED].removesuffix(place[0] if place else "")), place[0] if place else ""
        groups.setdefault(key, Counter())[reason] += number
    found: list[tuple[str, int]] = []
    for group in groups.values():
        [(reason, _)], others = group.most_common(1), len(group) - 1
        similar = f" (and {others} similar reason{'s' * (others > 1)})" if others else ""
        found.append((one_line(reason) + similar, group.total()))
    return sorted(found, key=lambda pair: -pair[1])


def _steers(character: str) -> bool:
    # Cc: control characters, Cs: lone surrogates, which no terminal can encode, Zl and Zp: line and paragraph ends.
    return character in _DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
