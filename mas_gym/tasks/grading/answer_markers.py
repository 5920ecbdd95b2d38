r"""Finds the markers of an answer in a message, such as ``Final Answer:``, ``\boxed{...}`` and ``####``."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from mas_gym.tasks.grading.numbers import MAX_CHARS

_MOST_STATEMENTS = 32
_TAIL = 4096


class Statement(NamedTuple):
    """One place where a message states its answer.

    Attributes:
        span: The text that contains the answer, one line or the content of a box; may be empty.
        firm: Whether this clearly states the answer; other statements are used only if no firm one can be parsed.
        declared: Whether a box or a marker such as "Final Answer:" declares it. Then, if its span cannot be parsed,
            no answer is guessed. A statement that is declared but not firm only says what the answer is not.
    """

    span: str
    firm: bool
    declared: bool = False


_ANSWER = (  # of the languages of MGSM
    r"\b(?:antwort|r\u00e9ponse|respuesta|\u043e\u0442\u0432\u0435\u0442|jibu)\b|\u7b54\u6848|\u7b54\u3048"
    r"|\u0e04\u0e33\u0e15\u0e2d\u0e1a|\u0989\u09a4\u09cd\u09a4\u09b0|\u0c38\u0c2e\u0c3e\u0c27\u0c3e\u0c28\u0c02"
)
_MARK = re.compile(rf"\banswer\b|\\(?:boxed|fbox)(?![a-zA-Z])|^####(?!#)|{_ANSWER}", re.IGNORECASE | re.MULTILINE)
_FOREIGN_LINK = re.compile(
    r"(?:[\s*_:\"'\uff1a\u2014\u2013-]|\u662f|\u4e3a|\u306f|\u0e04\u0e37\u0e2d|\u0e02\u0e49\u0e2d|\u09b9\u09b2\u09cb?"
    r"|\u0e2a\u0e38\u0e14\u0e17\u0e49\u0e32\u0e22|(?:lautet|ist|betr\u00e4gt|finale?|est|es|la opci\u00f3n|la mwisho|ni"
    r"|option|\u0432\u0430\u0440\u0438\u0430\u043d\u0442)(?![a-z\u0430-\u044f]))*",
    re.IGNORECASE,
)
_HASHED = re.compile(r"####[ \t]{0,4}([-+$]{0,3}[\d.][^\n]{0,80})$", re.MULTILINE)
_FINAL = re.compile(r"final[\s*_]{1,6}$", re.IGNORECASE)
_LINE_OPENING = re.compile(
    r"[\s*#>_\"'(\[{-]*(?:(?:so|thus|therefore|hence|the|my|our|correct|final|best|right)[\s,:*_]{1,4}){0,4}$",
    re.IGNORECASE,
)
_LINK = re.compile(
    r"[\"'*_)\]\s]{0,8}(?P<colon>[:\uff1a]|=(?!=)|-{1,2}>)[:\s*_]{0,8}"
    r"|[\"'*_\s]{1,8}(?P<verb>is|are|was|would be|should be|will be|must be|becomes|equals)\b"
    r"(?P<after>\s*:)?[\s*_]{0,8}",
    re.IGNORECASE,
)
_LOOSE_LINK = re.compile(r"\s{1,3}(?:of|to be|as)\s", re.IGNORECASE)
_FILLER = re.compile(
    r"(?:[\s*_:\"'`]|(?:therefore|thus|hence|then|now|so|simply|just|indeed|clearly|approximately|about|exactly"
    r"|equal to|option|choice|letter)\b)*",
    re.IGNORECASE,
)
_VALUE = re.compile(r"[-+\u2212]?\s?[.\d$€£¥\\√π½¼¾]|[(\[{]\s?[-\d\\A-Da-d]|[A-Da-d](?![A-Za-z])")
_NOT = re.compile(r"[\s*_]{0,8}(?:not|never)\b", re.IGNORECASE)
_AFTER_NOT = re.compile(r"\bbut\s+|[.;!]\s+(?=\S)|\n", re.IGNORECASE)
_DISPLAY_END = re.compile(r"\\\]|(?<=.)\$\$")
_HOLLOW = re.compile(r"[\s*_:#>`$~-]*(?:\\[\[(]|\\begin\{\w+\*?\})?[\s*_$]*")


def statements(text: str) -> Iterator[Statement]:
    """Yield the places where a message states an answer, last first, at most 32."""
    for mark in reversed(deque(_MARK.finditer(text), maxlen=_MOST_STATEMENTS)):
        found = mark[0]
        if found[0] == "\\":
            content = _box_content(text, mark.end())
            if content is not None:
                yield Statement(content, firm=True, declared=True)
        elif found[0] == "#":
            hashed = _HASHED.match(text, mark.start())
            if hashed is not None:
                yield Statement(hashed[1], firm=True, declared=True)
        elif found.casefold() != "answer":
            line = _line(text, mark.end())
            link = _FOREIGN_LINK.match(line)
            yield Statement(line[link.end() :] if link is not None else line, firm=True)
        else:
            statement = _tagged(text, mark.start(), mark.end())
            if statement is not None:
                yield statement


def _tagged(text: str, start: int, end: int) -> Statement | None:
    before, after = text[start - 1 : start], text[end : end + 1]
    if before == "<" and after == ">":
        return Statement(_line(text, end + 1).split("</")[0], firm=True, declared=True)
    if before in ("/", "<"):
        return None
    final = _FINAL.search(text, max(0, start - 12), start) is not None
    opens_line = _opens_line(text, start)
    link = _LINK.match(text, end)
    if link is None:
        heading = not text[end : end + 24].partition("\n")[0].strip(" *_#\r\t") and "\n" in text[end : end + 24]
        if (final or opens_line) and (heading or _VALUE.match(text, _skip(text, end))):
            return Statement(_line(text, end), firm=True)
        loose = _LOOSE_LINK.match(text, end)
        return Statement(_line(text, loose.end()), firm=False) if loose is not None else None
    if _NOT.match(text, link.end()):
        # nothing but what follows the negation can be the answer
        rest = _AFTER_NOT.search(text, link.end(), link.end() + MAX_CHARS)
        line = _line(text, rest.end()) if rest is not None else ""
        return Statement(line, firm=bool(line), declared=True)
    span = _line(text, link.end())
    if link["colon"] or link["after"]:
        if final or opens_line:
            return Statement(span, firm=True, declared=True)
        if link["colon"]:
            return Statement(span, firm=False)
    return Statement(span, firm=_VALUE.match(text, _skip(text, link.end())) is not None)


def _skip(text: str, start: int) -> int:
    filler = _FILLER.match(text, start, start + 80)
    return filler.end() if filler is not None else start


def _opens_line(text: str, start: int) -> bool:
    line = text.rfind("\n", max(0, start - 40), start) + 1
    if line == 0 and start > 40:
        return False
    return _LINE_OPENING.match(text, line, start) is not None


def _line(text: str, start: int) -> str:
    """Return the rest of the line, or the next line with content.

    A line longer than `MAX_CHARS` is cut after its last complete sentence; without one, the result stays too long.
    """
    window = text[start : start + 2 * MAX_CHARS]
    hollow = _HOLLOW.match(window)
    if hollow is not None and "\n" in hollow[0]:
        # keep an opening delimiter: it marks mathematics
        window = window[hollow[0].rfind("\n") + 1 :]
    line = window.partition("\n")[0]
    if line.strip() in ("$$", r"\["):
        line = window.replace("\n", " ")
        line = _DISPLAY_END.split(line, maxsplit=1)[0]
    if len(line) > MAX_CHARS:
        cut = line.rfind(". ", 0, MAX_CHARS)
        line = line[: cut + 1] if cut >= 0 else line
    return line.strip()


def _box_content(text: str, start: int) -> str | None:
    r"""Return the content of ``\boxed``; None if the box is unclosed or too long."""
    start += len(text[start : start + 4]) - len(text[start : start + 4].lstrip())
    if text[start : start + 1] != "{":
        return text[start : start + 1] or None
    depth = 0
    for place in range(start, min(len(text), start + MAX_CHARS + 2)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start + 1 : place]
    return None
