"""Comparison of answers that are short texts, patterns or programs."""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata

from mas_gym.systems.conditions import matcher
from mas_gym.tasks.grading.answer_markers import statements

# ---------------------------------------------------- texts, patterns, code

MAX_TEXT = 2000
"""Maximum length of an answer in words."""

_EDGES = " \t\r\n\"'\u201c\u201d\u2018\u2019\u00ab\u00bb`*_()[]{}<>.,;:!?\u2026"
_ARTICLES = ("the ", "a ", "an ")
_LATEX_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox)\s?\{([^{}]*+)\}")
_COURTESY = re.compile(
    r"(?:i hope|hope this|let me know|please let|feel free|if you have|is there anything)\b", re.IGNORECASE
)
_INFO = re.compile(r"[ \t]*+[\w+.#-]{0,20}+[ \t]*+\r?\n")


def normalize_text(text: str) -> str:
    """Normalize an answer in words for comparison: ignore case, spacing, outer punctuation and a leading article.

    >>> normalize_text(' The  "Vienna". '), normalize_text("C++")
    ('vienna', 'c++')
    """
    folded = " ".join(unicodedata.normalize("NFKC", text[: 2 * MAX_TEXT]).casefold().split())
    bare = folded.strip(_EDGES) or folded
    for article in _ARTICLES:
        if bare.startswith(article):
            return bare[len(article) :].lstrip(_EDGES) or bare
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
    bare = text.strip(_EDGES)
    article = next((article for article in _ARTICLES if bare.casefold().startswith(article)), "")
    return whole(text) or whole(bare) or whole(bare[len(article) :])


def read_text(text: str) -> str | None:
    """Read an answer in words: the last statement, or the last line."""
    loose = None
    for statement in statements(text):
        if statement.span.strip(_EDGES):
            if statement.firm:
                return _short_text(statement.span)
            loose = loose or statement.span
        elif statement.declared and not statement.firm:
            return None
    lines = [line for line in text[-2 * MAX_TEXT :].strip().splitlines() if line.strip()]
    if len(lines) > 1 and _COURTESY.match(lines[-1].strip()):
        del lines[-1]
    return _short_text(loose if loose is not None else lines[-1] if lines else "")


def _short_text(span: str) -> str | None:
    text = " ".join(_LATEX_TEXT.sub(r"\1", span).split()).strip("*_`$ ")
    return text if text and len(text) <= MAX_TEXT else None


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
