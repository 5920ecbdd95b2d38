r"""Grade a final message: extract its answer and compare it with the reference.

There are two modes. ``"paper"`` follows the paper's App. "Answer extraction and
normalization" literally (`mas_gym.tasks.grading.paper_rules`). ``"strict"``, the default,
uses the same equality rules and corrects errors of the literal rules: the last
statement of an answer is used instead of the first, boxes and LaTeX are parsed,
fractions and roots keep their value, the article "A" is not an option, and an
announced answer that cannot be parsed does not count as an answer.

A message may state an answer in many forms ("Final Answer: 18", ``\boxed{18}``,
"#### 18", "so the answer is **18**.") and more than once. The last explicit
statement that can be parsed is the answer. A bare number or label is used only if the
message contains no explicit statement. Extraction takes time linear in the message.

Texts, patterns and formulas are extracted from the same statements; if a message has none, its
last line is used. Only the extracted answer is compared, so that reasoning cannot match.

>>> from mas_gym.tasks.base import Problem
>>> grade(Problem("p", "How many?", "18"), "First, 9 eggs are laid. Final Answer: $18.00 per day")
Grade(correct=True, extracted='18', reason='equal', tokens=0, prompt_tokens=0)
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mas_gym.errors import ConfigError
from mas_gym.internal.suggestions import choice
from mas_gym.policies.reasoning import after_reasoning
from mas_gym.tasks.base import GRADING_MODES, Grade, Grader, GradingMode, Kind, Problem
from mas_gym.tasks.grading import paper_rules
from mas_gym.tasks.grading.choices import label_without_statement, read_label
from mas_gym.tasks.grading.expressions import compare_expressions, is_prose, read_expression
from mas_gym.tasks.grading.formulas import compare_formulas, read_formula
from mas_gym.tasks.grading.numbers import MAX_CHARS, TAIL, Decimal, last_number, read_number, same_number
from mas_gym.tasks.grading.sandbox import Limits, run_tests
from mas_gym.tasks.grading.texts import EDGES, MAX_TEXT, accepted_texts, matches, normalize_text, read_code

# ------------------------------------------------------------------ the answer


def extract_answer(problem: Problem, text: str, mode: GradingMode = "strict", decimal: Decimal = ".") -> str | None:
    r"""Read the answer from a final message, normalized so that equal answers usually become equal strings.

    Uses the kind of the problem and the texts of its options, never its reference answer.

    Args:
        problem: The problem that the message answers.
        text: The whole final message; any text, of any length.
        mode: ``"strict"`` or ``"paper"``.
        decimal: The sign before the fraction of a number, where it could also separate thousands.

    Returns:
        A number such as ``"1000"``, ``"0.5"`` or ``"1/3"``, a canonical LaTeX line, a formula without spaces, an
        option label in upper case, a normalized text, a piece of code, or None if the message gives no answer.
    """
    if mode == "paper" and problem.kind in ("number", "expression", "choice"):
        return paper_rules.extract(text, problem.kind)
    text = after_reasoning(text)
    if problem.kind == "code":
        return read_code(text)
    if problem.kind in ("text", "regex", "judge"):
        words = read_text(text)
        return None if words is None else normalize_text(words)
    options = problem.metadata.get("options", ()) if problem.kind == "choice" else ()
    loose = None
    announced = False
    for statement in statements(text):
        announced = announced or (statement.declared and not statement.firm)
        if not statement.span or (loose is not None and not statement.firm):
            continue
        answer = _read(statement.span, problem.kind, options, decimal)
        if answer is not None and statement.firm:
            return answer
        loose = loose or answer
        announced = announced or statement.declared
    if loose is not None or announced:
        return None if announced else loose
    return _guess(text, problem.kind, options, decimal)


def _read(span: str, kind: Kind, options: Sequence[str], decimal: Decimal) -> str | None:
    if kind == "number":
        return read_number(span, decimal)
    if kind == "formula":
        return read_formula(span)
    return read_label(span, options) if kind == "choice" else read_expression(span)


_SHORT = 100


def _guess(text: str, kind: Kind, options: Sequence[str], decimal: Decimal) -> str | None:
    """Read a message that states no answer: use a short last line as a whole, or else the paper's fallbacks."""
    if kind == "choice":
        return label_without_statement(text, options)
    if kind == "formula":
        return read_formula(text[-TAIL:].strip().rpartition("\n")[2])
    message = text[-TAIL:].strip() if kind == "expression" else ""
    last_line = message.rpartition("\n")[2]
    if last_line and ("$" in last_line or r"\(" in last_line or len(last_line) <= _SHORT):
        answer = read_expression(last_line)
        if answer is not None and not answer.count(" ") > 2 and not is_prose(answer):
            return answer
    return last_number(text, decimal)


_LATEX_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox)\s?\{([^{}]*+)\}")
_COURTESY = re.compile(
    r"(?:i hope|hope this|let me know|please let|feel free|if you have|is there anything)\b", re.IGNORECASE
)


def read_text(text: str) -> str | None:
    """Read an answer in words: the last statement, or the last line."""
    loose = None
    for statement in statements(text):
        if statement.span.strip(EDGES):
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


# ------------------------------------------------------------------ grades

NEEDS = {
    "code": "kind 'code' runs code that a model wrote, isolated by bubblewrap; if you accept that, pass "
    "allow_code=True or --allow-code",
    "judge": "kind 'judge' needs a policy that grades answers; pass judge='openai:MODEL@URL' or --judge",
}
"""Requirements of the kinds that need more than the message."""


def grade(problem: Problem, text: str, mode: GradingMode = "strict", decimal: Decimal = ".") -> Grade:
    """Grade a final message against the reference answer of its problem.

    Args:
        problem: The problem, with its reference answer.
        text: The whole final message; any text, of any length. Nothing in it is evaluated.
        mode: ``"strict"`` or ``"paper"``.
        decimal: The sign before the fraction of a number, where it could also separate thousands.

    Returns:
        The grade. It is not correct if the message has no readable answer or the comparison times out.

    Raises:
        MissingDependencyError: The comparison needs math-verify, which is not installed.
        ConfigError: The kind is ``"code"`` or ``"judge"``, which need a `KindGrader`.
    """
    if problem.kind in ("code", "judge"):
        raise ConfigError(f"problem {problem.id!r}: {NEEDS[problem.kind]}")
    answer = extract_answer(problem, text, mode, decimal)
    if answer is None:
        return Grade(False, None, "no answer found")
    kind, reference = problem.kind, problem.answer
    if kind == "formula":
        verdict = compare_formulas(reference, answer)
    elif kind == "expression" and mode == "strict":
        verdict = compare_expressions(reference, answer)
    else:
        if kind == "text":
            equal = answer in map(normalize_text, accepted_texts(reference))
        elif kind == "regex":
            equal = matches(reference, read_text(after_reasoning(text)) or "")
        elif mode == "paper":
            equal = paper_rules.same(reference, answer, kind)
        elif kind == "choice":
            equal = reference.strip().casefold() == answer.casefold()
        else:
            equal = same_number(reference, answer, decimal)
        verdict = "equal" if equal else "different"
    return Grade(verdict == "equal", answer, verdict)


def check_mode(mode: str) -> GradingMode:
    """Return the mode if it exists. Raises `ConfigError` otherwise."""
    choice("grading", mode, GRADING_MODES)
    return mode  # type: ignore[return-value]


@dataclass(frozen=True)
class KindGrader:
    """Grades each problem by its kind.

    Attributes:
        mode: ``"strict"`` or ``"paper"``.
        limits: Resource limits for code; None disables code.
        judge: Grades problems of kind ``"judge"``; None disables them.
        decimal: The sign before the fraction of a number, ``"."`` or ``","``, where it could also separate thousands.
    """

    mode: GradingMode = "strict"
    limits: Limits | None = None
    judge: Grader | None = None
    decimal: Decimal = "."

    def identity(self) -> object:
        """Return the mode, and the attributes that differ from the defaults."""
        parts = {"limits": self.limits, "judge": self.judge, "decimal": self.decimal}
        stated = {name: part for name, part in parts.items() if part not in (None, Limits(), ".")}
        return {"mode": self.mode, **stated} if stated else self.mode

    def refusal(self, kind: str) -> str | None:
        """Return the reason why problems of a kind cannot be graded, or None if they can be graded."""
        missing = (kind == "code" and self.limits is None) or (kind == "judge" and self.judge is None)
        return NEEDS[kind] if missing else None

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalized answer from a final message, without looking at the reference."""
        return extract_answer(problem, text, self.mode, self.decimal)

    def grade(self, problem: Problem, text: str) -> Grade:
        """Compare the answer in a final message with the reference.

        Raises:
            ConfigError: The kind needs code execution or a judge, and this grader has none.
        """
        if problem.kind == "judge" and self.judge is not None:
            return self.judge.grade(problem, text)
        if problem.kind == "code" and self.limits is not None:
            code = extract_answer(problem, text)
            if code is None:
                return Grade(False, None, "no answer found")
            return run_tests(code, problem.answer, self.limits)
        return grade(problem, text, self.mode, self.decimal)


NO_REFERENCE = "no reference"
"""The reason of a grade without a reference answer."""


class Ungraded(KindGrader):
    """Reads answers by kind without grading them, for questions without a reference."""

    def grade(self, problem: Problem, text: str) -> Grade:
        """Return the answer, graded as not correct."""
        return Grade(False, self.extract(problem, text), NO_REFERENCE)


# ------------------------------------------------------------------ where a message states its answer

_MOST_STATEMENTS = 32


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
