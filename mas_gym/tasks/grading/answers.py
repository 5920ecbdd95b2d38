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

from collections.abc import Sequence
from dataclasses import dataclass

from mas_gym.errors import ConfigError
from mas_gym.internal.suggestions import choice
from mas_gym.policies.reasoning import after_reasoning
from mas_gym.tasks.base import GRADING_MODES, Grade, Grader, GradingMode, Kind, Problem
from mas_gym.tasks.grading import paper_rules
from mas_gym.tasks.grading.answer_markers import statements
from mas_gym.tasks.grading.choices import label_without_statement, read_label
from mas_gym.tasks.grading.expressions import compare_expressions, is_prose, read_expression
from mas_gym.tasks.grading.formulas import compare_formulas, read_formula
from mas_gym.tasks.grading.numbers import Decimal, last_number, read_number, same_number
from mas_gym.tasks.grading.sandbox import Limits, run_tests
from mas_gym.tasks.grading.texts import accepted_texts, matches, normalize_text, read_code, read_text


def check_mode(mode: str) -> GradingMode:
    """Return the mode if it exists. Raises `ConfigError` otherwise."""
    choice("grading", mode, GRADING_MODES)
    return mode  # type: ignore[return-value]


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
        return read_formula(text[-4096:].strip().rpartition("\n")[2])
    message = text[-4096:].strip() if kind == "expression" else ""
    last_line = message.rpartition("\n")[2]
    if last_line and ("$" in last_line or r"\(" in last_line or len(last_line) <= _SHORT):
        answer = read_expression(last_line)
        if answer is not None and not answer.count(" ") > 2 and not is_prose(answer):
            return answer
    return last_number(text, decimal)


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
