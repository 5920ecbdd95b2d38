r"""Grade a final message: extract its answer and compare it with the reference.

There are two modes. ``"paper"`` follows the paper's App. "Answer extraction and
normalization" literally. ``"strict"``, the default, keeps its rules of equality
and corrects what the literal rules get wrong: the last statement of an answer
counts instead of the first, boxes and LaTeX are read, fractions and roots keep
their value, the article "A" is not an option, and an announced answer that
cannot be read is no answer.

>>> from mas_gym.tasks.base import Problem
>>> grade(Problem("p", "How many?", "18"), "First, 9 eggs are laid. Final Answer: $18.00 per day")
Grade(correct=True, extracted='18', reason='equal')
"""

from __future__ import annotations

from collections.abc import Sequence

from mas_gym.errors import ConfigError
from mas_gym.tasks import paper
from mas_gym.tasks.base import GRADING_MODES, Grade, GradingMode, Kind, Problem
from mas_gym.tasks.equality import answers_equal, compare
from mas_gym.tasks.expressions import read_expression
from mas_gym.tasks.extraction import label_without_statement, read_label, statements
from mas_gym.tasks.numerals import last_number, read_number


def check_mode(mode: str) -> GradingMode:
    """Return the mode if it exists.

    Raises:
        ConfigError: There is no such mode.
    """
    if mode not in GRADING_MODES:
        raise ConfigError(f"expected a grading mode of {' or '.join(map(repr, GRADING_MODES))}, got {mode!r}")
    return mode  # type: ignore[return-value]


def extract_answer(problem: Problem, text: str, mode: GradingMode = "strict") -> str | None:
    r"""Read the answer that a final message gives, in a form in which equal answers are mostly equal texts.

    Uses the kind of the problem and the texts of its options, never its reference answer.

    Args:
        problem: The problem that the message answers.
        text: The whole final message; any text, of any length.
        mode: ``"strict"`` or ``"paper"``.

    Returns:
        A number such as ``"1000"``, ``"0.5"`` or ``"1/3"``, a canonical LaTeX line, an option label in upper case,
        or None if the message gives no answer.
    """
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
    """Read a message that states no answer, by the paper's fallbacks; a short last line is read as a whole first."""
    if kind == "choice":
        return label_without_statement(text, options)
    message = text[-4096:].strip() if kind == "expression" else ""
    last_line = message.rpartition("\n")[2]
    if last_line and ("$" in last_line or r"\(" in last_line or len(last_line) <= _SHORT):
        answer = read_expression(last_line)
        if answer is not None and not answer.count(" ") > 2:
            return answer
    return last_number(text)


def grade(problem: Problem, text: str, mode: GradingMode = "strict") -> Grade:
    """Grade a final message against the reference answer of its problem.

    Args:
        problem: The problem, with its reference answer.
        text: The whole final message; any text, of any length. Nothing in it is evaluated.
        mode: ``"strict"`` or ``"paper"``.

    Returns:
        The grade; a message without a readable answer, or one whose comparison runs out of time, is not correct.

    Raises:
        MissingDependencyError: The comparison needs math-verify, which is not installed.
    """
    answer = extract_answer(problem, text, mode)
    if answer is None:
        return Grade(False, None, "no answer found")
    verdict = compare(problem.answer, answer, problem.kind, mode)
    return Grade(verdict == "equal", answer, verdict)


__all__ = ["answers_equal", "check_mode", "extract_answer", "grade"]
