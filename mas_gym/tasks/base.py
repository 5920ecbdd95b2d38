"""The base class `Task`: an indexed sequence of problems that can grade a text.

Only the task has the reference answers; planners, policies and critics never receive them.

A task can also define which messages are equal. A search merges equal messages into one
child, and mining compares only distinct siblings (paper, App. "MASPRM training data
generation", rule (i)). The bundled agents begin their messages with one of six words that
carry no information.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import index
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args, overload, runtime_checkable

from mas_gym.errors import ConfigError, UnknownNameError, shown
from mas_gym.internal.adapter import Adapter, ClassName, describe_type, has_method
from mas_gym.internal.json_types import JSONMapping
from mas_gym.internal.suggestions import choice, did_you_mean

Kind = Literal["number", "expression", "formula", "choice", "text", "regex", "code", "judge"]
GradingMode = Literal["strict", "paper"]

KINDS: tuple[Kind, ...] = get_args(Kind)
SPLITS = ("train", "dev", "test")
GRADING_MODES = ("strict", "paper")


@dataclass(frozen=True, slots=True)
class Problem:
    """One instance ``(x, y*)`` of a task (paper, Sec. "Preliminaries").

    Attributes:
        id: Unique within the task and split, stable across versions, for example ``"gsm8k/test/17"``.
        question: The text ``x`` of the question node. Options of a choice problem are part of it.
        answer: The reference answer ``y*``: a number, a LaTeX expression, a formula such as ``"(7+1-2)*4"``, an
            option label such as ``"A"``, a text or a JSON list of accepted texts, a regular expression, or unit tests.
        kind: How to grade: ``"number"``, ``"expression"`` (LaTeX, symbolic equality), ``"formula"`` (uses each
            number of the reference once and has the same value), ``"choice"``, ``"text"`` (normalized exact match),
            ``"regex"``, ``"code"`` (the answer contains unit tests) or ``"judge"`` (a policy decides).
        metadata: Additional JSON-serializable data, such as the subject or the reference solution; read-only. A choice
            problem lists the texts of its options under ``"options"``, in the order of their labels.

    Raises:
        ConfigError: The kind does not exist.
    """

    id: str
    question: str
    answer: str
    kind: Kind = "number"
    metadata: JSONMapping = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            choice(f"kind of problem {shown(self.id)}", self.kind, KINDS)
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the metadata as a dict, because a mapping proxy cannot be pickled."""
        return Problem, (self.id, self.question, self.answer, self.kind, dict(self.metadata))

    def __deepcopy__(self, memo: dict[int, object]) -> Problem:
        """Return the problem itself, because it is immutable."""
        return self


MAX_TOKENS = 10**12
"""Maximum number of tokens of one grade."""


class _Grade(NamedTuple):
    correct: bool
    extracted: str | None
    reason: str
    tokens: int
    prompt_tokens: int


class Grade(_Grade):
    """The outcome of grading one final message.

    Attributes:
        correct: Whether the extracted answer equals the reference.
        extracted: The answer read from the text, normalized so that a vote counts equal answers together; None if
            there is none.
        reason: One of ``"equal"``, ``"different"``, ``"other numbers"`` (for formulas), ``"no answer found"``,
            ``"timed out"``, ``"too complex"``, ``"no reference"``, ``"judged correct"``,
            ``"judged incorrect"``, or for code the result of its tests.
        tokens: Tokens that a judge generated for the grade.
        prompt_tokens: Prompt tokens that the judge read.

    Raises:
        ConfigError: A field has the wrong type, or tokens are out of range.
    """

    __slots__ = ()

    def __new__(
        cls, correct: bool, extracted: str | None = None, reason: str = "", tokens: int = 0, prompt_tokens: int = 0
    ) -> Self:
        """Check the fields, because user-defined graders also create grades and a search stores them."""
        if type(correct).__name__ not in ("bool", "bool_"):
            raise ConfigError(
                f"Grade: expected correct to be True or False, got {shown(correct)}; compare a score with a threshold"
            )
        if not isinstance(extracted, str | None):
            raise ConfigError(f"Grade.extracted: expected a str or None, got {shown(extracted)}; use str()")
        if not isinstance(reason, str):
            raise ConfigError(f"Grade: expected reason to be a str, got {shown(reason)}; use str()")
        counts = _count("tokens", tokens), _count("prompt_tokens", prompt_tokens)
        return super().__new__(cls, bool(correct), extracted, reason, *counts)


def _count(name: str, value: Any) -> int:
    try:
        # NumPy's integers are counts too.
        number = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_TOKENS:
        raise ConfigError(
            f"Grade: expected {name} to be an int from 0 to {MAX_TOKENS:,}, got {shown(value)}; leave it out if unknown"
        )
    return number


@runtime_checkable
class Grader(Protocol):
    """Reads and grades answers.

    A run with a store needs the grader's identity, which is part of the run's identity (see
    `mas_gym.internal.identity`).
    """

    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalized answer from a final message, without looking at the reference."""
        ...

    def grade(self, problem: Problem, text: str) -> Grade:
        """Compare the answer in a final message with the reference."""
        ...


class Task(Sequence[Problem], ABC):
    """The problems of one split, as a sequence that also grades answers; slices are tasks too.

    A subclass defines ``__len__``, ``__getitem__``, `extract` and `grade`; the rest have defaults. An object that only
    has these methods is adapted on loading (`as_task`). `mas_gym.tasks.ProblemTask.of` builds a task from problems.

    Attributes:
        name: Name of the task, such as ``"gsm8k"``; by default the class's name.
        split: ``"train"``, ``"dev"`` or ``"test"``; empty for a task without splits.
        grading: The grading mode of `grade`.
        mas: The MAS that commands and environments use by default.
        grader: The replaceable grader (see `graded_by`); None if only the task can grade.
    """

    name: str = ClassName()  # type: ignore[assignment]
    split: str = ""
    grading: GradingMode = "strict"
    mas: str = "rpsv"
    grader: Grader | None = None

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Task: ...
    @abstractmethod
    def __getitem__(self, index: int | slice) -> Problem | Task:
        """Return a problem, or a slice as a task."""

    @abstractmethod
    def extract(self, problem: Problem, text: str) -> str | None:
        """Read the normalized answer from a final message, without looking at the reference."""

    @abstractmethod
    def grade(self, problem: Problem, text: str) -> Grade:
        """Compare the answer read from a final message with the reference."""

    def problem(self, problem_id: str) -> Problem:
        """Return the problem with this id. Raises `UnknownNameError`."""
        return self.only(problem_id)[0]

    def only(self, problem_id: str) -> Task:
        """Return a task that contains only the given problem. Raises `UnknownNameError`."""
        for place, problem in enumerate(self):
            if problem.id == problem_id:
                return self[place : place + 1]
        raise unknown_problem(self, problem_id)

    def graded_by(self, grader: Grader) -> Task:
        """Return the same task with another grader. Raises `ConfigError` if the task does not support this."""
        raise ConfigError(
            f"task {self.name!r} supports no other grader; leave out grader, or derive the task from ProblemSequence"
        )


def unknown_problem(task: Task, problem_id: object) -> UnknownNameError:
    """Return the error for an id that no problem of a task has."""
    ids = [problem.id for problem in task[:100]]
    examples = f", such as {', '.join(map(repr, ids[:3]))}" if ids else ""
    return UnknownNameError(
        f"task {task.name}: expected the id of one of its {len(task):,} problems{examples}, got {shown(problem_id)}"
        f"{did_you_mean(problem_id, ids)}"
    )


class _AdaptedTask(Adapter, Task):
    def __init__(self, part: object, problems: Any) -> None:
        super().__init__(part, Task)
        self._problems = problems

    def __len__(self) -> int:
        return len(self._problems)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._problems)

    def __getitem__(self, index: Any) -> Any:
        found = self._problems[index]
        if not isinstance(index, slice) or is_task(found):
            return as_task(found) if isinstance(index, slice) else found
        # A slice of a list is a list, which lacks the methods of the task.
        return _AdaptedTask(self.identical_to, found)

    def extract(self, problem: Problem, text: str) -> str | None:
        found: str | None = self.identical_to.extract(problem, text)
        return found

    def grade(self, problem: Problem, text: str) -> Grade:
        found: Grade = self.identical_to.grade(problem, text)
        return found


def is_task(part: object) -> bool:
    """Return whether an object can grade answers, as a task does; a list of problems cannot."""
    return isinstance(part, Task) or (has_method(part, "extract") and has_method(part, "grade"))


def as_task(part: object) -> Task:
    """Return a `Task` unchanged; adapt any other object with a task's methods by adding the missing attributes.

    Raises:
        ConfigError: The object lacks one of the methods.
    """
    if isinstance(part, Task):
        return part
    if not (is_task(part) and isinstance(part, Sized) and has_method(part, "__getitem__")):
        methods = "__len__, __getitem__, extract(problem, text) and grade(problem, text)"
        raise ConfigError(
            f"expected a task's name or an object with {methods}, got {describe_type(part)}; "
            "derive from mas_gym.tasks.Task"
        )
    return _AdaptedTask(part, part)


# ------------------------------------------------------------------ equal messages

Same = Callable[[str, str], bool]
"""An equivalence relation on messages; the first of several equal messages represents them."""

_OPENING = re.compile(r"(?:(?<!\s)\s++)?+(?<![^\W\d_])[^\W\d_]++:")


def question_digest(question: str) -> str:
    """Return the digest of a question, 16 hexadecimal digits; spaces do not matter."""
    return blake2b(" ".join(question.split()).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def normalize_message(text: str) -> str:
    """Return the case-folded text without extra spaces or closing punctuation."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".!;,")


def same_text(a: str, b: str) -> bool:
    """Return whether two messages differ at most in case, spaces and closing punctuation.

    >>> same_text("Work: 3+4.", "work:  3+4")
    True
    """
    return normalize_message(a) == normalize_message(b)


def same_after_opening(a: str, b: str) -> bool:
    """Return whether two messages are the same text after an opening word and its colon.

    >>> same_after_opening("Plan: start 4, + 2.", "Steps: start 4, + 2.")
    True
    >>> same_after_opening("Plan: start 4, + 2.", "Plan: start 4, - 2.")
    False
    """
    return same_text(_OPENING.sub("", a, count=1), _OPENING.sub("", b, count=1))


RULES: Mapping[str, Same] = MappingProxyType({"text": same_text, "opening": same_after_opening})
"""Rules by name, as in ``"mcts:10,3,same=opening"``."""

TASK_RULES: Mapping[str, str] = MappingProxyType({"arithmetic": "opening", "ordering": "opening"})
"""The tasks with a rule other than ``"text"``."""


def same_rule(rule: str | Same) -> Same:
    """Return the rule of this name for equal messages; a function is returned unchanged.

    Raises:
        UnknownNameError: There is no rule with that name.
        ConfigError: The rule is neither a name nor a function.
    """
    if not isinstance(rule, str):
        if not callable(rule):
            raise ConfigError(f"expected a rule name or a function same(a, b), got {type(rule).__name__}")
        return rule
    if rule not in RULES:
        raise UnknownNameError(f"no rule {rule!r} for equal messages; expected one of {', '.join(RULES)}")
    return RULES[rule]


def rule_of(task: str) -> str:
    """Return the name of a task's rule for equal messages, given the task's name; ``"text"`` by default."""
    return TASK_RULES.get(task, "text")
