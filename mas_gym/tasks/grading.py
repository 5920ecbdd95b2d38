r"""Grade a final message: extract its answer and compare it with the reference.

There are two modes. ``"paper"`` follows the paper's App. "Answer extraction and
normalization" literally (`mas_gym.tasks.paper`). ``"strict"``, the default,
keeps its rules of equality and corrects what the literal rules get wrong: the
last statement of an answer counts instead of the first, boxes and LaTeX are
read, fractions and roots keep their value, the article "A" is not an option,
and an announced answer that cannot be read is no answer.

A message may state an answer in many ways ("Final Answer: 18", ``\boxed{18}``,
"#### 18", "so the answer is **18**.") and more than once. The last explicit
statement that can be read counts. Only a message without one is searched for a
bare number or label. Extraction is linear in the length of the message.

Texts and patterns are read by the same statements; a message without one gives its
last line. Both are compared with the whole answer, so that reasoning cannot match.

>>> from mas_gym.tasks.base import Problem
>>> grade(Problem("p", "How many?", "18"), "First, 9 eggs are laid. Final Answer: $18.00 per day")
Grade(correct=True, extracted='18', reason='equal', tokens=0, prompt_tokens=0)
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import NamedTuple

from mas_gym.errors import ConfigError
from mas_gym.graph import matcher
from mas_gym.tasks import paper
from mas_gym.tasks.base import GRADING_MODES, Grade, GradingMode, Kind, Problem
from mas_gym.tasks.equality import compare, read_expression
from mas_gym.tasks.numerals import MAGNITUDE, MAX_CHARS, last_number, plain, read_number

# --------------------------------------- where a message states its answer

_MOST_STATEMENTS = 32
_TAIL = 4096


class Statement(NamedTuple):
    """One place where a message states its answer.

    Attributes:
        span: The text that holds the answer, one line or the content of a box; may be empty.
        firm: Whether this is clearly a statement of the answer; others count only if no firm one can be read.
        declared: Whether it is a tag such as "Final Answer:". If its span cannot be read, nothing is guessed.
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
    """Return the rest of the line, or the next line with content; longer than `MAX_CHARS` if it is too long."""
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
    r"""Return what ``\boxed`` holds, with a magnitude behind it, or None if it never closes or holds too much."""
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


# ------------------------------------------------------------------ options

_DRESS = re.compile(r"\\(?:text|textbf|mathbf|mathrm|boxed|mbox)\s?\{|\\[()\[\]]|[*_`$\"“”{}#]|^'|'$")
_LEADING_LABEL = re.compile(
    r"[\s(\[<:.>-]*(?:(?:is|be|the|correct|option|choice|answer|letter)\b[\s:(\[]*)*([A-Za-z])(?![A-Za-z0-9'\u2019])",
    re.IGNORECASE,
)
_REASON = r"(?:is|was|because|since|as|due|given|based|which|follows|holds|must|and|or)\b"
_CLOSED = re.compile(rf"\s*(?:$|[).:,;\]>/&\n\u2013\u2014-])|\s+{_REASON}", re.IGNORECASE)
_ANOTHER = re.compile(r"[\s).\]]*(?:,|and|or|&|/|\+)\s*(?:option\s*)?\(?([A-Z])(?![A-Za-z0-9'\u2019])")
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


def undress(span: str) -> str:
    """Drop emphasis, quotes and LaTeX wrappers around a label or an option."""
    return _DRESS.sub("", plain(span)).strip()


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
    text = undress(span)
    labels = ascii_uppercase[: len(options) or 4]
    lead = _LEADING_LABEL.match(text)
    if lead is not None and lead[1].upper() in labels:
        letter, closed = lead[1], _CLOSED.match(text, lead.end()) is not None
        other = _ANOTHER.match(text, lead.end())
        if other is not None and other[1] in labels and other[1] != letter.upper():
            return None
        if closed or (letter.isupper() and letter not in "AI"):
            return letter.upper()
    by_text = _label_of_text(text, options)
    return by_text or _only_label(text, labels)


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
    tail = undress(text[-_TAIL:])
    crowned = [m[1] for m in _CROWNED.finditer(tail) if m[1] in labels]
    if crowned:
        return crowned[-1]
    last = tail.rpartition("\n")[2]
    lead = _LEADING_LABEL.match(last) if len(last) <= MAX_CHARS else None
    if lead is not None and lead[1].upper() in labels and _CLEAR_END.match(last, lead.end()):
        return lead[1].upper()
    return _label_of_text(tail, options) or _only_label(tail, labels)


def check_mode(mode: str) -> GradingMode:
    """Return the mode if it exists.

    Raises:
        ConfigError: There is no such mode.
    """
    if mode not in GRADING_MODES:
        raise ConfigError(f"expected a grading mode of {' or '.join(map(repr, GRADING_MODES))}, got {mode!r}")
    return mode  # type: ignore[return-value]


# ---------------------------------------------------- texts, patterns, code

MAX_TEXT = 2000
"""Maximum length of an answer in words."""

_EDGES = " \t\r\n\"'\u201c\u201d\u2018\u2019\u00ab\u00bb`*_()[]{}<>.,;:!?\u2026"
_ARTICLES = ("the ", "a ", "an ")
_INFO = re.compile(r"[ \t]*+[\w+.#-]{0,20}+[ \t]*+\r?\n")


def normalise_text(text: str) -> str:
    """Write an answer in words in the form that is compared: case, edges, spaces and a leading article do not count.

    >>> normalise_text(' The  "Vienna". '), normalise_text("C++")
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


def read_text(text: str) -> str | None:
    """Read an answer in words: what the last statement says, or the last line."""
    loose = None
    for statement in statements(text):
        if statement.span.strip(_EDGES):
            if statement.firm or statement.declared:
                return _short_text(statement.span)
            loose = loose or statement.span
    lines = text[-2 * MAX_TEXT :].strip().splitlines()
    last = loose if loose is not None else lines[-1] if lines else ""
    return _short_text(last)


def _short_text(span: str) -> str | None:
    text = " ".join(span.split()).strip("*_`$ ")
    return text if text and len(text) <= MAX_TEXT else None


def read_code(text: str) -> str | None:
    """Read the code of a message: its last block between triple backticks, or what follows its last answer tag."""
    for block in reversed(text.split("```")[1::2]):
        info = _INFO.match(block)
        block = block[info.end() :] if info is not None else block
        if block.strip():
            return block.strip("\r\n")
    tag = text.casefold().rfind("final answer:")
    code = text[tag + len("final answer:") :] if tag >= 0 and len(text.casefold()) == len(text) else text
    return code.strip("\r\n") if code.strip() else None


def _grade_words(problem: Problem, text: str) -> Grade:
    answer = extract_answer(problem, text)
    if answer is None:
        return Grade(False, None, "no answer found")
    if problem.kind == "regex":
        span = read_text(text)
        equal = span is not None and matcher(problem.answer)(span)
    else:
        equal = answer in map(normalise_text, accepted_texts(problem.answer))
    return Grade(equal, answer, "equal" if equal else "different")


# ----------------------------------------------------------------- grading


def extract_answer(problem: Problem, text: str, mode: GradingMode = "strict") -> str | None:
    r"""Read the answer from a final message, normalised so that equal answers are mostly equal strings.

    Uses the kind of the problem and the texts of its options, never its reference answer.

    Args:
        problem: The problem that the message answers.
        text: The whole final message; any text, of any length.
        mode: ``"strict"`` or ``"paper"``.

    Returns:
        A number such as ``"1000"``, ``"0.5"`` or ``"1/3"``, a canonical LaTeX line, an option label in upper case,
        a normalised text, a piece of code, or None if the message gives no answer.
    """
    if problem.kind == "code":
        return read_code(text)
    if problem.kind in ("text", "regex", "judge"):
        words = read_text(text)
        return None if words is None else normalise_text(words)
    if mode == "paper":
        return paper.extract(text, problem.kind)
    options = problem.metadata.get("options", ()) if problem.kind == "choice" else ()
    loose = None
    announced = False
    for statement in statements(text):
        if not statement.span or (loose is not None and not statement.firm):
            continue
        answer = _read(statement.span, problem.kind, options)
        if answer is not None and statement.firm:
            return answer
        loose = loose or answer
        announced = announced or statement.declared
    if loose is not None or announced:
        return None if announced else loose
    return _guess(text, problem.kind, options)


def _read(span: str, kind: Kind, options: Sequence[str]) -> str | None:
    if kind == "number":
        return read_number(span)
    return read_label(span, options) if kind == "choice" else read_expression(span)


_SHORT = 80


def _guess(text: str, kind: Kind, options: Sequence[str]) -> str | None:
    """Read a message that states no answer: a short last line as a whole, then the paper's fallbacks."""
    if kind == "choice":
        return label_without_statement(text, options)
    message = text[-4096:].strip() if kind == "expression" else ""
    last_line = message.rpartition("\n")[2]
    if last_line and ("$" in last_line or r"\(" in last_line or len(last_line) <= _SHORT):
        answer = read_expression(last_line)
        if answer is not None and not answer.count(" ") > 2:
            return answer
    return last_number(text)


NEEDS = {
    "code": "kind 'code' runs code that a model wrote; if you accept that, pass allow_code=True or --allow-code",
    "judge": "kind 'judge' needs a policy that decides; pass judge='openai:MODEL@URL' or --judge",
}
"""What the kinds that need more than the message ask for."""


def grade(problem: Problem, text: str, mode: GradingMode = "strict") -> Grade:
    """Grade a final message against the reference answer of its problem.

    Args:
        problem: The problem, with its reference answer.
        text: The whole final message; any text, of any length. Nothing in it is evaluated.
        mode: ``"strict"`` or ``"paper"``.

    Returns:
        The grade. A message without a readable answer is not correct, nor is one whose comparison times out.

    Raises:
        MissingDependencyError: The comparison needs math-verify, which is not installed.
        ConfigError: Code and judged answers need more than a text: a `mas_gym.tasks.graders.KindGrader`.
    """
    if problem.kind in ("text", "regex"):
        return _grade_words(problem, text)
    if problem.kind in ("code", "judge"):
        raise ConfigError(f"problem {problem.id!r}: {NEEDS[problem.kind]}")
    answer = extract_answer(problem, text, mode)
    if answer is None:
        return Grade(False, None, "no answer found")
    verdict = compare(problem.answer, answer, problem.kind, mode)
    return Grade(verdict == "equal", answer, verdict)
