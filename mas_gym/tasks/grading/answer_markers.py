r"""Finds the markers of an answer in a message, such as ``Final Answer:``, ``\boxed{...}`` and ``####``."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from mas_gym.tasks.grading.numbers import MAGNITUDE, MAX_CHARS

_MOST_STATEMENTS = 32
_TAIL = 4096


class Statement(NamedTuple):
    """One place where a message states its answer.

    Attributes:
        span: The text that contains the answer, one line or the content of a box; may be empty.
        firm: Whether this clearly states the answer; other statements are used only if no firm one can be parsed.
        declared: Whether a box or a marker such as "Final Answer:" declares it. Then, if its span cannot be parsed,
            no answer is guessed.
    """

    span: str
    firm: bool
    declared: bool = False


_MARK = re.compile(r"\banswer\b|\\(?:boxed|fbox)(?![a-zA-Z])|^####(?!#)", re.IGNORECASE | re.MULTILINE)
_HASHED = re.compile(
    r"####[ \t]{0,4}([-+$]{0,3}[\d.][\d.,'\u2018\u2019\u02bc\u00a0\u2009\u202f \\{}:;!]{0,60}"
    rf"(?:[kKM]|{MAGNITUDE.pattern})?)[ \t]{{0,40}}$",
    re.MULTILINE | re.IGNORECASE,
)
_FINAL = re.compile(r"final[\s*_]{1,6}$", re.IGNORECASE)
_LINE_OPENING = re.compile(
    r"[\s*#>_\"'(\[{-]*(?:(?:so|thus|therefore|hence|the|my|our|correct|final|best|right)[\s,:*_]{1,4}){0,4}$",
    re.IGNORECASE,
)
_LINK = re.compile(
    r"[\"'*_)\]\s]{0,8}(?P<colon>:|=(?!=)|-{1,2}>)[:\s*_]{0,8}"
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
_NOT = re.compile(r"\s*(?:not|never)\b", re.IGNORECASE)
_DISPLAY_END = re.compile(r"\\\]|(?<=.)\$\$")
_HOLLOW = re.compile(r"[\s*_:#>`$~-]*(?:\\[\[(]|\\begin\{\w+\*?\})?[\s*_$]*")


def statements(text: str) -> Iterator[Statement]:
    """Yield the places where a message states an answer, last first.

    Args:
        text: The whole final message.

    Yields:
        The statements, at most 32.
    """
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
        return None
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
    r"""Return the content of ``\boxed`` and a following magnitude, such as "million".

    Return None if the box is unclosed or too long.
    """
    start += len(text[start : start + 4]) - len(text[start : start + 4].lstrip())
    if text[start : start + 1] != "{":
        return text[start : start + 1] or None
    depth = 0
    for place in range(start, min(len(text), start + MAX_CHARS + 2)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                magnitude = MAGNITUDE.match(text, place + 1)
                return text[start + 1 : place] + (magnitude[0] if magnitude is not None else "")
    return None
