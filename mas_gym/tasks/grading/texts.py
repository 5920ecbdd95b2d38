"""Comparison of answers that are short texts, patterns or programs."""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata

from mas_gym.systems.conditions import matcher

# ---------------------------------------------------- texts, patterns, code

MAX_TEXT = 2000
"""Maximum length of an answer in words."""

EDGES = " \t\r\n\"'\u201c\u201d\u2018\u2019\u00ab\u00bb`*_()[]{}<>.,;:!?\u2026"
"""Characters around an answer in words that are no part of it."""

_ARTICLES = ("the ", "a ", "an ")
_INFO = re.compile(r"[ \t]*+[\w+.#-]{0,20}+[ \t]*+\r?\n")


def normalize_text(text: str) -> str:
    """Normalize an answer in words for comparison: ignore case, spacing, outer punctuation and a leading article.

    >>> normalize_text(' The  "Vienna". '), normalize_text("C++")
    ('vienna', 'c++')
    """
    folded = " ".join(unicodedata.normalize("NFKC", text[: 2 * MAX_TEXT]).casefold().split())
    bare = folded.strip(EDGES) or folded
    for article in _ARTICLES:
        if bare.startswith(article):
            return bare[len(article) :].lstrip(EDGES) or bare
    return bare


def accepted_texts(answer: str) -> list[str]:
    """Return the texts that a reference accepts: a JSON list of texts, or the answer itself."""
    if answer.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            texts = json.loads(answer)
            if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
                return texts
    return [answer]


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches a whole answer, as it stands or without punctuation around it and a leading article.

    Raises:
        ConfigError: RE2 does not accept the pattern.
    """
    whole = matcher(rf"\A(?:{pattern})\z")
    bare = text.strip(EDGES)
    article = next((article for article in _ARTICLES if bare.casefold().startswith(article)), "")
    return whole(text) or whole(bare) or whole(bare[len(article) :])


def read_code(text: str) -> str | None:
    """Read the code in a message: the last fenced block, else the text after the last answer tag, else all of it."""
    for block in reversed(text.split("```")[1::2]):
        info = _INFO.match(block)
        block = block[info.end() :] if info is not None else block
        if block.strip():
            return block.strip("\r\n")
    tag = text.casefold().rfind("final answer:")
    code = text[tag + len("final answer:") :] if tag >= 0 and len(text.casefold()) == len(text) else text
    return code.strip("\r\n") if code.strip() else None
